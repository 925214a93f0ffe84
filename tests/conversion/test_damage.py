"""Packed folders whose files contradict each other are refused when they are loaded, before a kernel sees an address of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.model.loading import load_model
from edgexpert.weights.files import verify
from edgexpert.weights.manifest import DENSE, EXPERTS, MANIFEST, read_manifest
from tests.conftest import make_model, make_tokenizer

Json = dict[str, Any]


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    make_model("olmoe").save_pretrained(tmp_path / "source")
    make_tokenizer().save_pretrained(tmp_path / "source")
    convert(open_source(str(tmp_path / "source")), tmp_path / "pack", PackOptions(4, 8))
    return tmp_path / "pack"


def change(path: Path, edit: Callable[[Json], object]) -> None:
    stored = json.loads(path.read_text())
    edit(stored)
    stored["sha256"] = "" if path.name == MANIFEST else None  # as if its writer had known no hash
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("key", ["num_experts", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
def test_a_configuration_of_another_shape_is_refused(pack: Path, key: str, dtype: str | None) -> None:
    change(pack / "config.json", lambda config: config.update({key: config[key] // 2}))
    with pytest.raises(UserError, match="disagree"):
        load_model(str(pack), dtype=dtype)


def at(*keys: Any, to: Any) -> Callable[[Json], object]:
    def edit(stored: Any) -> None:
        for key in keys[:-1]:
            stored = stored[key]
        stored[keys[-1]] = to

    return edit


@pytest.mark.parametrize("edit", [
    at("layers", 0, "gate_up", "scales", to=None),
    at("layers", 0, "gate_up", "outputs", to=-1),
    at("layers", 0, "gate_up", "values", "offset", to=64),
    at("layers", 1, "offset", to=0),
    at("layers", 0, "stride", to=4096 * 64),
    at("layers", 0, "transposed", to=True),
    at("layers", 0, "experts", to=10**12),
    at("layers", 0, "experts", to=True),
    at("layers", 0, "down", "bits", to=5),
    at("layers", 0, "parameters", to={"gate_up": []}),
    at("layers", to=[]),
    at("layers", to={"a": [[[]]]}),
    at("group_size", to=0),
    at("zero_point", to=True),
    at("format_version", to="one"),
    lambda stored: stored["linears"].popitem(),
    lambda stored: next(iter(stored["linears"].values())).update(outputs=7),
])
def test_a_manifest_that_does_not_follow_from_its_shapes_is_refused(pack: Path, edit: Callable[[Json], object]) -> None:
    change(pack / MANIFEST, edit)
    with pytest.raises(UserError):
        load_model(str(pack))


def test_a_manifest_that_was_changed_is_refused_by_its_own_hash(pack: Path) -> None:
    assert MANIFEST in verify(pack)
    path = pack / MANIFEST
    path.write_text(path.read_text().replace('"method": "rtn"', '"method": "gptq"'))
    with pytest.raises(UserError, match="SHA-256"):
        read_manifest(pack)
    change(path, lambda stored: None)
    with pytest.raises(UserError, match="no hash of its own"):
        verify(pack)


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_a_file_that_is_shorter_than_announced_is_refused(pack: Path, name: str) -> None:
    os.truncate(pack / name, (pack / name).stat().st_size - 4096)
    change(pack / MANIFEST, lambda stored: stored.pop("files"))
    with pytest.raises(UserError, match=name):
        load_model(str(pack))

"""Odd settings and damaged numbers: they run, or one sentence says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.model.finite import explain_not_finite
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from tests.conftest import make_tokenizer
from tests.parity.architectures import tiny_config, tiny_model
from tests.parity.examine import PROMPTS, branching, greedy, hosted, library, same, save


def test_a_config_that_asks_for_router_logits_runs(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    config.output_router_logits = True
    save(config, tmp_path)
    host = HostedModel(load_model(str(tmp_path)).model)
    text, logits = greedy(library(tmp_path), PROMPTS[0])
    same(branching(host, PROMPTS[0], text), text, logits, "trees")


@pytest.mark.parametrize(("family", "settings"), [
    ("mixtral", dict(sliding_window=16)),
    ("qwen2_moe", dict(use_sliding_window=True, sliding_window=16, max_window_layers=1)),
    ("qwen3_moe", dict(use_sliding_window=False, sliding_window=16)),
])
def test_a_window_is_the_one_that_the_library_applies(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    save(tiny_config(family, **settings), tmp_path)
    assert hosted(tmp_path, PROMPTS) is None  # raises where something differs from the library


def test_convolutional_layers_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    types = ["conv", "full_attention", "conv", "full_attention"]
    save(tiny_config("lfm2_moe", layer_types=types), tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:100])
    with pytest.raises(UserError, match="recurrent or convolutional state in 2 of its 4 layers"):
        load_model(str(tmp_path))


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    model.model.layers[2].self_attn.k_proj.weight.data[3, 5] = float("nan")
    assert "model.layers.2.self_attn.k_proj.weight is not finite" in explain_not_finite(HostedModel(model))


@pytest.mark.parametrize("part", ["gate_up", "down"])
def test_a_packed_scale_that_is_not_finite_is_named_with_its_layer_and_expert(part: str, tmp_path: Path) -> None:
    save(tiny_config("qwen3_moe"), tmp_path / "source")
    convert(open_source(str(tmp_path / "source")), tmp_path / "packed", PackOptions(4, 32))
    host = HostedModel(load_model(str(tmp_path / "packed")).model)
    packed = host.blocks[1].packed
    assert packed is not None
    scales = getattr(packed, part).scales
    assert scales is not None
    scales[5, 0, 2] = float("inf")
    assert f"layer 1, expert 5 ({part})" in explain_not_finite(host)


def test_finite_weights_whose_products_are_not_get_another_sentence(tmp_path: Path) -> None:
    host = HostedModel(tiny_model(tiny_config("qwen3_moe")).half())
    assert "load it with `dtype` float32" in explain_not_finite(host)


def test_the_tokenizer_is_not_asked_before_the_model(tmp_path: Path) -> None:
    save(tiny_config("qwen3_next"), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="recurrent"):
        load_model(str(tmp_path))
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="recurrent"):
        open_and_convert(tmp_path)


def open_and_convert(folder: Path) -> None:
    convert(open_source(str(folder)), folder / "packed", PackOptions(4, 32))


def test_nothing_is_written_for_what_is_refused(tmp_path: Path) -> None:
    save(tiny_config("mimo_v2_flash"), tmp_path / "source")
    with pytest.raises(UserError, match="attention sinks"):
        convert(open_source(str(tmp_path / "source")), tmp_path / "packed", PackOptions(4, 32))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]

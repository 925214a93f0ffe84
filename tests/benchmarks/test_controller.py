"""`benchmarks/controller.py`: a whole run on tiny models."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.dummy import DummySource, dummy_config
from tests.conftest import make_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_auto_takes_turns_with_every_fixed_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    controller = importlib.import_module("controller")
    make_model("granitemoe", num_hidden_layers=8, vocab_size=5000).config.save_pretrained(tmp_path)
    convert(DummySource(dummy_config(str(tmp_path)), "tiny"), tmp_path / "tiny", PackOptions(4, 8))
    fixed = tuple(shape for shape in controller.FIXED if shape.size in (0, 2, 64))
    for name, value in {"FIXED": fixed, "PROMPTS": ("Once upon a time",), "NEW_TOKENS": 40, "POLICIES": ("exact",)}.items():
        monkeypatch.setattr(controller, name, value)
    controller.main(tmp_path, shapes="tiny", threads=1, repetitions=1, json_file=tmp_path / "found.json")
    stories, tiny = json.loads((tmp_path / "found.json").read_text())["rows"]
    for row in (stories, tiny):
        assert [one["size"] for one in row["fixed"]] == [0, 2, 64]
        assert row["against_best"] == pytest.approx(row["auto_ms_per_token"] / row["best_ms_per_token"])
        assert row["best_ms_per_token"] == min(one["ms_per_token"] for one in row["fixed"])
        assert row["widths"]["1"] > 0
    (plain, chain, tree), (replayed_plain, replayed_chain, replayed_tree) = (
        [one["acceptance_length"] for one in row["fixed"]] for row in (stories, tiny))
    assert plain == replayed_plain == 1
    assert replayed_chain == pytest.approx(chain, rel=0.1)
    assert chain < replayed_tree <= tree, "a tree of random weights may be too shallow"

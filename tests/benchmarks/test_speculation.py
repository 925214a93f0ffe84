"""`benchmarks/speculation.py`: a whole run on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.dummy import DummySource, dummy_config
from edgexpert.speculation.draft import TreeShape
from tests.conftest import make_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_trees_are_replayed_at_the_acceptance_length_that_the_bundled_model_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    speculation = importlib.import_module("speculation")
    make_model("granitemoe", num_hidden_layers=8, vocab_size=5000).config.save_pretrained(tmp_path)
    convert(DummySource(dummy_config(str(tmp_path)), "tiny"), tmp_path / "tiny", PackOptions(4, 8))
    for name, value in {"TREES": (TreeShape(2, 2, 1),), "PROMPTS": ("Once upon a time",), "NEW_TOKENS": 40}.items():
        monkeypatch.setattr(speculation, name, value)
    speculation.main(tmp_path, shapes="tiny", threads=1, repetitions=1, json_file=tmp_path / "found.json")
    plain, *trees = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (plain["size"], plain["acceptance_length"], plain["faster"], plain["bytes"]) == (0, 1.0, 1.0, 1.0)
    assert [(row["size"], row["policy"]) for row in trees] == [(2, "exact"), (2, "edgexpert")]
    assert all(1.5 < row["acceptance_length"] <= 3 and row["experts"] > plain["experts"] for row in trees)
    exact, pruned = (row["bytes"] * row["acceptance_length"] for row in trees)  # of a stage, about
    assert pruned < exact, "edgexpert leaves channels out"

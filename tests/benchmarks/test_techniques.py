"""`benchmarks/techniques.py`: a whole run on a tiny model."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from edgexpert.core.errors import UserError
from edgexpert.policy import PRESETS, Hyperparameters
from tests.conftest import make_model, make_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_run_compares_all_policies_on_texts_that_are_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    techniques = importlib.import_module("techniques")
    target, texts = tmp_path / "target", tmp_path / "texts.jsonl"
    make_model("olmoe").save_pretrained(target)
    make_tokenizer().save_pretrained(target)
    calibrated = Hyperparameters(k_min=2, n_min=1, k_tri=3, n_tri=1, theta1=2.0, theta2=1.0, selection_ratio=0.5, keep_mass=0.5)
    (target / "edgexpert.json").write_text(json.dumps({"hyperparameters": asdict(calibrated)}))
    texts.write_text("\n".join(json.dumps({"text": text}) for text in ("a fox met a crow", "one day it rained", "short")))
    options = {"model": str(target), "texts": texts, "new_tokens": 4, "out": tmp_path}
    techniques.main(**options, prompt_tokens=8)
    found = json.loads((tmp_path / "techniques-target.json").read_text())
    assert list(found["policies"]) == list(PRESETS)
    assert found["about"]["texts"] == 2
    assert found["about"]["policies"]["edgexpert"]["keep_mass"] == 0.5, "what the checkpoint brings along, as it was measured"
    assert all(row["tokens"] == 4 for rows in found["rows"].values() for row in rows)
    assert found["about"]["commit"] and found["about"]["command"]
    with pytest.raises(UserError, match="--prompt-tokens"):
        techniques.main(**options, prompt_tokens=80)

"""`benchmarks/hyperparameters.py`: how it descends, and a whole run on a tiny model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edgexpert.model.calibrated import read_calibrated
from edgexpert.policy import PRESETS, Techniques
from tests.conftest import make_model, make_tokenizer


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("hyperparameters")


def test_the_descent_takes_what_saves_most_for_its_loss_and_stays_within_the_budget(benchmark: ModuleType,
                                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(engine: Any, policy: Techniques, cut: Any, shape: Any) -> Any:
        cheap, dear = 1.0 - (policy.keep_mass or 1), 1.0 - (policy.keep_channels or 1)
        useless = policy.selection_ratio or 0  # saves less than it costs
        return benchmark.Cost(0.001 * cheap + 0.01 * dear + 1e-4 * useless, 0.0, 100 * (2 - cheap - dear) - 0.01 * useless)

    monkeypatch.setattr(benchmark, "measure", cost)
    ladders = [tuple({name: share} for share in (1.0, 0.9, 0.8)) for name in ("keep_mass", "keep_channels")]
    ladders.append(({"selection_ratio": 0.0}, {"selection_ratio": 0.5}))
    chosen, found = benchmark.descend(None, PRESETS["edgexpert"], ladders, "decode", 0.0013, [], None)
    assert (chosen.keep_mass, chosen.keep_channels) == (0.8, 0.9), "all that is cheap, and of what is dear one step"
    assert chosen.selection_ratio == 0, "within the budget, but not worth it"
    assert found.loss == pytest.approx(0.0012)


def test_a_run_writes_hyperparameters_that_the_checkpoint_can_bring_along(benchmark: ModuleType, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    make_model("olmoe").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    texts.write_text("\n".join(json.dumps({"text": text}) for text in ("a fox met a crow", "one day it rained")))
    benchmark.main(texts, model=str(tmp_path), prompt_tokens=8, new_tokens=4, out=tmp_path / "edgexpert.json")
    found = read_calibrated(tmp_path)
    assert found is not None
    found.check(num_experts=8, top_k=2)

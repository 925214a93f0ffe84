"""What the README says of the bundled model, on a few of its held-out texts."""

from __future__ import annotations

import json

import pytest
import torch

import edgexpert
from edgexpert.core.resources import bundled_folder
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.ngram import NgramDraft


@pytest.fixture(scope="module")
def engine() -> Engine:
    return edgexpert.load("stories")


@pytest.fixture(scope="module")
def texts(engine: Engine) -> list[list[int]]:
    lines = (bundled_folder("stories") / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return [engine.encode(json.loads(line)["text"]) for line in lines[:8]]


def test_exact_text_is_that_of_transformers_for_every_draft_and_tree_size(engine: Engine, texts: list[list[int]]) -> None:
    engine.set_policy(PRESETS["exact"])
    eagle = engine.draft
    try:
        for text in texts[:2]:
            prompt = text[:60]
            truth = engine.host.model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, 60:].tolist()
            for draft in (eagle, NgramDraft(), None):
                engine.draft = draft
                for size in (1, 8, 64):
                    assert engine.generate(prompt, tree=TreeShape(size=size), max_new_tokens=40).token_ids == truth
    finally:
        engine.draft = eagle


def test_the_draft_is_accepted_at_least_two_and_a_half_tokens_a_stage(engine: Engine, texts: list[list[int]]) -> None:
    engine.set_policy(PRESETS["exact"])
    runs = [engine.generate(text[:80], tree=TreeShape(), max_new_tokens=60, ignore_eos=True).speculation for text in texts[:4]]
    assert all(run.stages > 0 for run in runs)
    assert sum(run.emitted for run in runs) / sum(run.stages for run in runs) >= 2.5


def test_edgexpert_reads_forty_per_cent_less_for_five_per_cent_of_perplexity(engine: Engine, texts: list[list[int]]) -> None:
    bits, read = {}, {}
    for name in ("exact", "edgexpert"):
        engine.set_policy(PRESETS[name])
        scores = [engine.score(text[:80], text[80:160]) for text in texts]
        bits[name] = -sum(sum(score.log_probs) for score in scores) / sum(len(score.log_probs) for score in scores)
        read[name] = sum(score.traffic.decode["experts"] for score in scores)
    assert read["edgexpert"] < 0.6 * read["exact"]
    assert bits["edgexpert"] - bits["exact"] < torch.tensor(1.05).log()


def test_reuse_saves_prefill_bytes_and_says_so(engine: Engine, texts: list[list[int]]) -> None:
    engine.set_policy(PRESETS["reuse"])
    got = engine.generate(texts[0][:100], max_new_tokens=2)
    assert got.traffic.prefill["experts"] < 0.7 * got.expert_bytes_exact_prefill
    assert any("reuse" in line for line in got.approximations)
    assert got.traffic.prefill["encoder"] > 0

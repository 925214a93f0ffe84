"""Trees chosen stage by stage: the text stays, the choice is told, and no tree means no drafting."""

from __future__ import annotations

import pytest

from edgexpert.model.host import HostedModel
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.controller import PLAIN
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.ngram import NgramDraft
from tests.conftest import make_model, make_tokenizer
from tests.speculation.drafts import GarbageDraft, OracleDraft, RandomDraft

PROMPT = "once upon a time a fox met a crow, once upon a time"
SAMPLED = dict(temperature=0.8, top_k=30, top_p=0.9, repetition_penalty=1.2, seed=3)


def make_engine(draft: Draft | None = None) -> Engine:
    return Engine(HostedModel(make_model("qwen3_moe")), make_tokenizer(), name="tiny", draft=draft, policy=PRESETS["exact"])


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_decoding_whatever_is_chosen(sampling: dict[str, float]) -> None:
    engine = make_engine()
    options = dict(max_new_tokens=40, ignore_eos=True, **sampling)
    truth = engine.generate(PROMPT, **options).token_ids
    for draft in (NgramDraft(), OracleDraft(truth), GarbageDraft(128), RandomDraft(128)):
        engine.draft = draft
        for _ in range(2):  # the second text begins with what the first one taught
            got = engine.generate(PROMPT, **options)
            assert got.token_ids == truth, draft.name
            assert got.speculation.mode == "auto"
            assert sum(got.speculation.widths.values()) == got.speculation.stages
            assert sum((width - 1) * count for width, count in got.speculation.widths.items()) == got.speculation.drafted


def test_the_result_tells_the_choice() -> None:
    engine = make_engine(GarbageDraft(128))
    fixed = engine.generate(PROMPT, tree=TreeShape(4, 4, 1), max_new_tokens=6, ignore_eos=True)
    assert fixed.to_json()["speculation"].items() >= {"mode": "fixed", "widths": {"5": fixed.speculation.stages}}.items()
    auto = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True).to_json()["speculation"]
    assert auto["mode"] == "auto"
    assert auto["widths"]["1"] >= PLAIN, "the first stages"
    engine.draft = None
    plain = engine.generate(PROMPT, max_new_tokens=6, ignore_eos=True).to_json()["speculation"]
    assert plain.items() >= {"mode": "fixed", "widths": {"1": 5}}.items(), "without a draft there is no choice"


def test_a_text_that_depends_on_the_clock_says_so() -> None:
    engine = make_engine(NgramDraft())

    def warned(policy: str, tree: TreeShape | str) -> bool:
        got = engine.generate(PROMPT, policy=policy, tree=tree, max_new_tokens=30, ignore_eos=True)
        assert got.speculation.drafted > 0
        return any("from run to run" in note for note in got.notes)

    assert warned("edgexpert", "auto")
    assert not warned("edgexpert", TreeShape(4, 4, 1))
    assert not warned("exact", "auto")


def test_where_no_tree_is_chosen_nothing_is_drafted() -> None:
    proposals = []

    class Watched(NgramDraft):
        def start(self):
            state = super().start()
            propose = state.propose
            state.propose = lambda root, shape: proposals.append(shape) or propose(root, shape)
            return state

    got = make_engine(Watched()).generate(PROMPT, max_new_tokens=PLAIN + 1, ignore_eos=True)
    assert got.speculation.stages == PLAIN and proposals == []


def test_what_is_learnt_is_kept_for_each_policy_and_draft() -> None:
    engine = make_engine(NgramDraft())
    options = dict(max_new_tokens=PLAIN + 1, ignore_eos=True)
    engine.generate(PROMPT, **options)
    assert len(engine._experience) == 1
    engine.generate(PROMPT, **options)
    assert len(engine._experience) == 1
    engine.generate(PROMPT, policy="pruned", **options)
    assert len(engine._experience) == 2

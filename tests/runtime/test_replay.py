"""Replayed speculation: the acceptance length asked for, the same trees at the same cost, and a label."""

from __future__ import annotations

import pytest
import torch

import edgexpert
from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree
from edgexpert.runtime.replay import recorded_tokens, relabelled, replay
from edgexpert.speculation.draft import TreeShape


@pytest.fixture(scope="module")
def engine() -> edgexpert.Engine:
    return edgexpert.load("stories")


@pytest.mark.parametrize("acceptance", [1.0, 2.5, 4.0])
def test_a_replay_has_the_acceptance_length_asked_for(engine: edgexpert.Engine, acceptance: float) -> None:
    text = recorded_tokens(engine, 41)
    got = replay(engine, engine.encode("Once upon a time"), text, acceptance, TreeShape(size=32))
    assert got.speculation.acceptance_length == pytest.approx(acceptance, abs=1.5 / got.speculation.stages)
    assert got.token_ids == text[: len(got.token_ids)]
    assert len(got.token_ids) >= len(text) - acceptance
    assert any("replayed" in note for note in got.notes)


def test_depths_that_no_tree_has_are_refused(engine: edgexpert.Engine) -> None:
    with pytest.raises(UserError, match="acceptance length of 9"):
        replay(engine, [1, 2], [3, 4], 9.0, TreeShape(depth=6))
    with pytest.raises(UserError, match="too shallow"):
        replay(engine, engine.encode("Once"), recorded_tokens(engine, 60), 3.0, TreeShape(size=1, depth=6))


def test_relabelling_keeps_the_tree_and_its_siblings_apart() -> None:
    tree = TokenTree(torch.tensor([9, 1, 2, 3, 4]), torch.tensor([-1, 0, 0, 1, 1]), torch.tensor([0.0, -0.1, -2.0, -0.5, -0.3]))
    labelled, path = relabelled(tree, [2, 8])
    assert path == [0, 1, 4]
    assert labelled.tokens.tolist() == [9, 2, 1, 3, 8]
    assert torch.equal(labelled.parents, tree.parents)
    assert torch.equal(labelled.path_log_prob, tree.path_log_prob)

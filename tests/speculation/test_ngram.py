"""Prompt look-up."""

from __future__ import annotations

import math

import torch

from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.ngram import NgramDraft


def drafted(text: list[int], root: int, **shape: int) -> tuple[list[int], list[int], list[float]]:
    draft = NgramDraft().start()
    draft.observe(torch.tensor(text), None)
    tree = draft.propose(root, TreeShape(**shape))
    return tree.tokens.tolist(), tree.parents.tolist(), [round(math.exp(x), 3) for x in tree.path_log_prob.tolist()]


def test_what_followed_the_longest_suffix_is_drafted() -> None:
    # "2 3" was followed by 4, the longer "1 2 3" by 5 6
    text = [9, 2, 3, 4, 0, 1, 2, 3, 5, 6, 8, 1, 2]
    assert drafted(text, 3, depth=2) == ([3, 5, 6], [-1, 0, 1], [1.0, 1.0, 1.0])


def test_a_suffix_longer_than_four_tokens_does_not_count() -> None:
    text = [1, 2, 3, 4, 5, 6, 0, 9, 2, 3, 4, 5, 7, 0, 1, 2, 3, 4]
    tokens, _, probabilities = drafted(text, 5, depth=1)
    assert sorted(tokens[1:]) == [6, 7]
    assert probabilities == [1.0, 0.5, 0.5]


def test_continuations_merge_to_a_tree_with_their_relative_counts() -> None:
    assert drafted([1, 5, 6, 1, 5, 7, 1, 8, 9], 1, depth=2, size=8) == (
        [1, 5, 8, 7, 6, 9],
        [-1, 0, 0, 1, 1, 2],
        [1.0, 0.667, 0.333, 0.333, 0.333, 0.333],
    )


def test_a_continuation_may_run_into_the_root_and_no_further() -> None:
    assert drafted([4, 4, 4], 4, depth=6)[0] == [4, 4]
    assert drafted([1, 2, 3, 1, 2], 3, depth=6)[0] == [3, 1, 2, 3]


def test_nothing_seen_before_drafts_nothing() -> None:
    assert drafted([1, 2, 3], 9)[0] == [9]
    assert drafted([1], 1, size=0)[0] == [1]


def test_tokens_observed_in_pieces_are_one_text() -> None:
    whole, pieces = NgramDraft().start(), NgramDraft().start()
    text = torch.tensor([1, 2, 3, 4, 1, 2])
    whole.observe(text, None)
    for piece in (text[:1], text[1:4], text[4:]):
        pieces.observe(piece, None)
    assert torch.equal(whole.propose(3, TreeShape()).tokens, pieces.propose(3, TreeShape()).tokens)


def test_a_fork_is_as_if_it_had_seen_no_more() -> None:
    fresh, whole = NgramDraft().start(), NgramDraft().start()
    whole.observe(torch.tensor([1, 2, 3, 1, 2, 4]), None)
    forked = whole.fork(4)
    fresh.observe(torch.tensor([1, 2, 3, 1]), None)
    a, b = fresh.propose(2, TreeShape()), forked.propose(2, TreeShape())
    assert a.tokens.tolist() == b.tokens.tolist() == [2, 3, 1, 2]

"""Token trees and stages hold their invariants."""

from __future__ import annotations

import pytest
import torch

from edgexpert.core.stage import Stage, TokenTree


def tree() -> TokenTree:
    #        0
    #      1   2
    #     3 4  5
    return TokenTree(
        torch.tensor([10, 11, 12, 13, 14, 15]),
        torch.tensor([-1, 0, 0, 1, 1, 2]),
        torch.tensor([0.0, -0.5, -1.0, -0.7, -2.0, -1.5]),
    )


def test_a_node_sees_its_ancestors_and_itself() -> None:
    mask = tree().mask
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1],
    ]
    assert tree().depth.tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("parents", [[0, 0], [-1, -1], [-1, 1], [-1, 2]])
def test_a_parent_stands_before_its_children_and_there_is_one_root(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        TokenTree(torch.tensor([1, 2]), torch.tensor(parents), torch.zeros(2))


def test_a_subtree_keeps_tokens_and_parents() -> None:
    part = tree().subtree([0, 2, 5])
    assert part.tokens.tolist() == [10, 12, 15]
    assert part.parents.tolist() == [-1, 0, 1]
    assert part.path_log_prob.tolist() == [0.0, -1.0, -1.5]


def test_a_subtree_that_lacks_a_parent_is_refused() -> None:
    with pytest.raises(AssertionError, match="one root"):
        tree().subtree([0, 5])


def test_a_forced_path_uses_what_is_drafted_and_adds_the_rest_no_likelier_than_drafted_siblings() -> None:
    forced, path = tree().with_path([11, 99, 98])
    assert path == [0, 1, 6, 7]
    assert forced.tokens[path].tolist() == [10, 11, 99, 98]
    assert forced.parents[6:].tolist() == [1, 6]
    assert forced.path_log_prob[6:].tolist() == [-2.0, -2.0]
    assert tree().with_path([12, 15])[1] == [0, 2, 5]
    assert len(tree().with_path([12, 15])[0]) == 6


def test_positions_are_prefix_plus_depth() -> None:
    assert Stage.verify(tree(), 7).positions.tolist() == [7, 8, 8, 9, 9, 9]
    assert Stage.prefill(torch.tensor([1, 2, 3]), 4).positions.tolist() == [4, 5, 6]


def test_a_chain_is_no_tree_for_attention() -> None:
    chain = TokenTree(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]), torch.zeros(3))
    assert not Stage.verify(chain, 0).is_tree
    assert Stage.verify(tree(), 0).is_tree

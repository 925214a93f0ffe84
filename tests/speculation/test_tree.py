"""Dynamic trees: what is expanded, what is kept, and what ties must not break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.kernels.dense import top_log_probs
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.tree import Expand, Level, build_tree


def table(*rows: dict[int, float]) -> Expand:
    """At depth d every node has the children ``rows[d]``: token -> probability. Keeps the levels that were asked for."""

    def expand(level: Level) -> tuple[Tensor, Tensor]:
        row = rows[len(expand.levels)]  # type: ignore[attr-defined]
        expand.levels.append(level)  # type: ignore[attr-defined]
        shape = (len(level.tokens), len(row))
        return torch.tensor(list(row)).expand(shape), torch.tensor(list(row.values())).log().expand(shape)

    expand.levels = []  # type: ignore[attr-defined]
    return expand


def test_a_tree_worked_by_hand() -> None:
    tree = build_tree(9, table({1: 0.6, 2: 0.3}, {3: 0.9, 4: 0.1}), TreeShape(size=4, depth=2, top_k=2))
    # candidates: 1 (.6), 2 (.3), 1-3 (.54), 1-4 (.06), 2-3 (.27), 2-4 (.03)
    assert tree.tokens.tolist() == [9, 1, 2, 3, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2]
    torch.testing.assert_close(tree.path_log_prob, torch.tensor([1.0, 0.6, 0.3, 0.54, 0.27]).log())


def test_only_the_likeliest_nodes_of_a_level_are_expanded() -> None:
    expand = table({1: 0.6, 2: 0.4}, {3: 0.9, 4: 0.1}, {5: 1.0})
    build_tree(9, expand, TreeShape(size=64, depth=3, top_k=2))
    # of 1-3 (.54), 1-4 (.06), 2-3 (.36), 2-4 (.04)
    levels = expand.levels  # type: ignore[attr-defined]
    assert [level.tokens.tolist() for level in levels] == [[9], [1, 2], [3, 3]]
    assert [level.parents.tolist() for level in levels] == [[0], [0, 0], [0, 1]]


def test_depth_is_the_depth_of_the_deepest_candidate_and_size_does_not_count_the_root() -> None:
    tree = build_tree(0, table(*[{1: 1.0}] * 6), TreeShape(size=64, depth=6, top_k=1))
    assert tree.candidates == 6
    assert tree.depth.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert build_tree(0, table(*[{1: 0.5, 2: 0.5}] * 6), TreeShape(size=63, depth=6, top_k=10)).candidates == 63


def test_a_child_as_likely_as_its_parent_never_takes_its_place() -> None:
    certain = {1: 1.0, 2: 1.0, 3: 1.0}
    for size in range(1, 13):
        tree = build_tree(0, table(*[certain] * 4), TreeShape(size=size, depth=4, top_k=3))  # its invariants are asserted
        assert tree.candidates == size


def test_half_precision_scores_that_round_to_certainty_leave_no_orphan() -> None:
    logits = torch.tensor([[20.0, 0.0, -1.0]]).half()

    def expand(level: Level) -> tuple[Tensor, Tensor]:
        tokens, log_probs = top_log_probs(logits.expand(len(level.tokens), -1), 2)
        assert log_probs.dtype == torch.float32
        return tokens, log_probs

    for size in range(1, 20):
        tree = build_tree(0, expand, TreeShape(size=size, depth=8, top_k=2))
        assert (tree.path_log_prob[1:] <= tree.path_log_prob[tree.parents[1:]]).all()


def test_levels_that_cannot_enter_the_tree_are_not_drafted() -> None:
    expand = table(*[{1: 0.5, 2: 0.5}] * 6)
    tree = build_tree(0, expand, TreeShape(size=2, depth=6, top_k=2))
    assert len(expand.levels) == 1  # type: ignore[attr-defined]
    assert tree.tokens.tolist() == [0, 1, 2]


def test_nodes_whose_children_cannot_enter_are_not_expanded() -> None:
    expand = table({1: 0.6, 2: 0.3, 3: 0.1}, {4: 0.9, 5: 0.05})
    tree = build_tree(9, expand, TreeShape(size=3, depth=2, top_k=3))
    # 1 (.6), 2 (.3) and 3 (.1) fill the tree, and nothing below 3 is likelier than 3; 1-4 (.54) enters in its place
    levels = expand.levels  # type: ignore[attr-defined]
    assert [level.tokens.tolist() for level in levels] == [[9], [1, 2]]
    assert tree.tokens.tolist() == [9, 1, 2, 4]


def test_impossible_tokens_are_not_drafted() -> None:
    tree = build_tree(0, table({1: 1.0, 2: 0.0}, {3: 0.0}), TreeShape(size=8, depth=5, top_k=2))
    assert tree.tokens.tolist() == [0, 1]


def test_a_tree_of_no_candidates_is_its_root() -> None:
    assert build_tree(7, table({1: 1.0}), TreeShape(size=0)).tokens.tolist() == [7]


@pytest.mark.parametrize(("values", "rule"), [
    ({"size": -1}, "`TreeShape.size` must be a whole number from 0 to 1024, not -1"),
    ({"size": 1025}, "`TreeShape.size` must be a whole number from 0 to 1024, not 1025"),
    ({"depth": 0}, "`TreeShape.depth` must be a whole number from 1 to 64, not 0"),
    ({"depth": 65}, "`TreeShape.depth` must be a whole number from 1 to 64, not 65"),
    ({"top_k": 0}, "`TreeShape.top_k` must be a whole number from 1 to 256, not 0"),
    ({"top_k": 257}, "`TreeShape.top_k` must be a whole number from 1 to 256, not 257"),
])
def test_a_shape_out_of_range_is_refused_with_the_rule(values: dict[str, int], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        TreeShape(**values)


def test_top_k_beyond_the_vocabulary_takes_the_vocabulary() -> None:
    tokens, log_probs = top_log_probs(torch.tensor([[0.0, 1.0]]), 10)
    assert tokens.tolist() == [[1, 0]]
    torch.testing.assert_close(log_probs.exp().sum(), torch.tensor(1.0))

from __future__ import annotations

import torch

from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import TokenTree
from edgexpert.policy.pruning import expected_candidates, needed_channels, prune_experts, union_by_expert


def test_the_keep_set_is_the_likeliest_candidates_with_their_ancestors() -> None:
    #            root -> 1 (.6) -> 3 (.3);  root -> 2 (.1);  the mass is 2.0
    tree = TokenTree(torch.arange(4), torch.tensor([-1, 0, 0, 1]), torch.tensor([1.0, 0.6, 0.1, 0.3]).log())
    assert expected_candidates(tree, 0.45).tolist() == [True, False, False, False]
    assert expected_candidates(tree, 0.75).tolist() == [True, True, False, False]
    assert expected_candidates(tree, 0.9).tolist() == [True, True, False, True]
    assert expected_candidates(tree, 1.0).all()


def test_an_expert_goes_only_when_no_kept_token_wants_it() -> None:
    gate = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.4, 0.4, 0.1], [0.1, 0.2, 0.1, 0.6]])
    scores = Scores(gate, gate, normalise=True)
    experts = torch.tensor([[0, 1], [1, 2], [3, 1]])
    routing = Routing(experts, scores.weights(experts), 4)
    pruned = prune_experts(routing, scores, torch.tensor([True, False, False]))
    assert pruned.experts.tolist() == [[0, 1], [1, 4], [4, 1]]
    torch.testing.assert_close(pruned.weights, torch.tensor([[0.625, 0.375], [1.0, 0.0], [0.0, 1.0]]))
    assert pruned.loaded.tolist() == [0, 1]


def test_a_token_may_lose_all_of_its_experts() -> None:
    gate = torch.eye(2)
    scores = Scores(gate, gate, normalise=True)
    routing = Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
    pruned = prune_experts(routing, scores, torch.tensor([True, False]))
    assert pruned.weights.tolist() == [[1], [0]]
    assert pruned.pairs[0].tolist() == [0]


def test_nothing_to_drop_returns_the_very_same_routing() -> None:
    routing = Routing(torch.tensor([[0], [0]]), torch.ones(2, 1), 2)
    scores = Scores(torch.rand(2, 2), torch.rand(2, 2), normalise=True)
    assert prune_experts(routing, scores, torch.tensor([True, False])) is routing


def test_the_routing_weight_decides_how_many_channels_an_expert_keeps() -> None:
    routing = Routing(torch.tensor([[0, 1]]), torch.tensor([[0.8, 0.2]]), 2)
    activations = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, -3.0, 2.0, 1.0]])
    # importance 3.2 2.4 1.6 .8 | .8 .6 .4 .2, in total 10
    assert needed_channels(activations, routing, 0.7).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    # 3.2 + 2.4 + 1.6 reach .72; the next rank is a tie of .8, and ties are kept alike
    assert needed_channels(activations, routing, 0.75).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


def test_no_routing_weight_is_too_small_for_the_pairs_own_largest_channel() -> None:
    routing = Routing(torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), 2)
    assert needed_channels(torch.tensor([[5.0, 1.0], [2.0, 1.0]]), routing, 0.5).tolist() == [[1, 0], [1, 0]]


def test_a_token_without_some_slots_ranks_only_what_it_has() -> None:
    routing = Routing(torch.tensor([[2, 0], [2, 2]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 2)
    assert needed_channels(torch.tensor([[3.0, 1.0]]), routing, 0.75).tolist() == [[1, 0]]


def test_the_union_of_an_expert_is_what_some_pair_needs() -> None:
    mask = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool()
    assert union_by_expert(mask, torch.tensor([2, 2, 0]), 3).tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 0]]

from __future__ import annotations

import torch

from edgexpert.core.routing import Routing, Scores
from edgexpert.policy.reuse import reuse_experts


def reuse(choice: list[list[int]], tiers: list[int], minor: tuple[int, int], trivial: tuple[int, int]) -> Routing:
    ranks = torch.tensor(choice, dtype=torch.float32)
    scores = Scores(ranks, ranks.softmax(1), normalise=True)
    experts = scores.choice.topk(3, dim=1).indices
    routing = Routing(experts, scores.weights(experts), len(choice[0]))
    return reuse_experts(routing, scores, torch.tensor(tiers), minor, trivial)


def test_algorithm_1_on_an_example_worked_out_by_hand() -> None:
    routing = reuse(
        [
            [9, 8, 7, 0, 1, 2, 3],  # major: 0, 1, 2 begin the shared set
            [0, 0, 7, 9, 8, 3, 6],  # minor, best four 3 4 2 6: 3 as its best, 2 as shared, 4 fills up
            [1, 0, 0, 0, 0, 9, 8],  # trivial, best five 5 6 0 1 2: 5 as its best, 0 as shared
            [0, 0, 0, 3, 1, 8, 9],  # trivial, best five 6 5 3 4 0: 6 as its best, 3 as the minor token shared it
        ],
        tiers=[0, 1, 2, 2], minor=(4, 3), trivial=(5, 2),
    )
    assert routing.experts.tolist() == [[0, 1, 2], [3, 2, 4], [5, 0, 7], [6, 3, 7]]
    assert routing.weights[2:, 2].tolist() == [0, 0]
    torch.testing.assert_close(routing.weights.sum(1), torch.ones(4))


def test_tokens_of_one_tier_do_not_see_each_others_new_experts() -> None:
    routing = reuse([[9, 8, 7, 0, 0], [0, 0, 2, 9, 8], [0, 0, 7, 8, 9]], tiers=[0, 1, 1], minor=(3, 2), trivial=(3, 1))
    assert routing.experts[:, :2].tolist() == [[0, 1], [3, 2], [4, 2]]


def test_the_order_of_experts_is_the_scores_where_nothing_is_shared() -> None:
    routing = reuse([[9, 8, 7, 0, 0, 0, 0], [0, 0, 0, 6, 7, 8, 9]], tiers=[0, 1], minor=(4, 3), trivial=(4, 1))
    assert routing.experts[1].tolist() == [6, 5, 4]


def test_a_forbidden_expert_is_never_chosen() -> None:
    choice = torch.tensor([[9.0, 8, 7, 0, 0], [-torch.inf, -torch.inf, -torch.inf, 2, 1]])
    scores = Scores(choice, choice.softmax(1), normalise=True)
    experts = torch.tensor([[0, 1, 2], [3, 4, 5]])
    routing = reuse_experts(Routing(experts, scores.weights(experts), 5), scores, torch.tensor([0, 1]), (4, 3), (5, 1))
    assert routing.experts[1].tolist() == [3, 4, 5]
    assert routing.weights[1, 2] == 0


def test_a_prompt_of_major_tokens_keeps_its_routing_object() -> None:
    experts = torch.tensor([[0, 1], [1, 2]])
    scores = Scores(torch.rand(2, 3), torch.rand(2, 3), normalise=False)
    routing = Routing(experts, scores.weights(experts), 3)
    assert reuse_experts(routing, scores, torch.tensor([0, 0]), (2, 1), (3, 1)) is routing

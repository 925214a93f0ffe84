"""What a policy does for one model: resolving hyperparameters, refusing contradictions, choosing when to act."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from edgexpert.core.errors import UserError
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.policy import PRESETS, Techniques, policy_named
from edgexpert.policy.techniques import TokenWeight

STORIES = {"model_type": "qwen3_moe", "num_experts": 64, "top_k": 4}


def routed(choice: torch.Tensor, top_k: int, normalise: bool = True) -> tuple[Routing, Scores]:
    scores = Scores(choice, choice.softmax(1), normalise)
    experts = choice.topk(top_k, dim=1).indices
    return Routing(experts, scores.weights(experts), choice.shape[1]), scores


def chain(length: int) -> TokenTree:
    return TokenTree(torch.arange(length), torch.arange(-1, length - 1), -torch.arange(length).float())


@pytest.mark.parametrize(
    ("model_type", "num_experts", "top_k", "row"),
    [
        ("granitemoe", 32, 8, (8, 7, 10, 6, 0.65, 0.45, 0.70)),
        ("olmoe", 64, 8, (10, 6, 12, 4, 0.80, 0.40, 0.90)),
        ("deepseek_v2", 64, 6, (6, 5, 8, 3, 0.55, 0.30, 0.90)),
        ("qwen3_moe", 128, 8, (10, 6, 12, 4, 0.80, 0.55, 0.90)),
    ],
)
def test_the_papers_models_get_table_iii(
    model_type: str, num_experts: int, top_k: int, row: tuple[float, ...]
) -> None:
    h = policy_named("edgexpert").resolved(model_type=model_type, num_experts=num_experts, top_k=top_k).hyperparameters
    assert (h.k_min, h.n_min, h.k_tri, h.n_tri, h.theta1, h.theta2, h.selection_ratio) == row


def test_another_model_of_a_papers_type_gets_the_same_ratios_to_its_top_k() -> None:
    h = Techniques().resolved(**STORIES).hyperparameters
    assert (h.k_min, h.n_min, h.k_tri, h.n_tri) == (5, 3, 6, 2)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (4, 1), (8, 2), (8, 8), (60, 4), (256, 8)])
def test_the_automatic_choice_obeys_every_rule(num_experts: int, top_k: int) -> None:
    resolved = Techniques().resolved(model_type="other", num_experts=num_experts, top_k=top_k)
    assert resolved.resolved(model_type="other", num_experts=num_experts, top_k=top_k) == resolved


def test_given_hyperparameters_are_kept() -> None:
    h = Techniques(k_tri=7, theta1=2.0, keep_mass=0.5).resolved(**STORIES).hyperparameters
    assert (h.k_min, h.k_tri, h.theta1, h.keep_mass) == (5, 7, 2.0, 0.5)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"k_min": 3}, "k_min (3) must be at least the model's top-k (4)"),
        ({"k_min": 9}, "k_tri (6) must be at least k_min (9)"),
        ({"k_tri": 65}, "k_tri (65) must be at most"),
        ({"n_min": 5}, "n_min (5) must be at most the model's top-k (4)"),
        ({"n_tri": 4}, "n_tri (4) must be at most n_min (3)"),
        ({"n_tri": 0}, "n_tri (0) must be at least 1"),
        ({"theta1": 0.4}, "theta1 (0.4) must be above theta2 (0.4)"),
        ({"theta2": -0.1}, "theta2 (-0.1) must not be negative"),
        ({"selection_ratio": 1.0}, "selection_ratio (1.0) must be from 0 to below 1"),
        ({"keep_channels": 0.0}, "keep_channels (0.0) must be above 0"),
        ({"keep_mass": float("nan")}, "keep_mass (nan) must be above 0"),
        ({"depth_aware_coalescing": True}, "needs the channel masks of fine pruning"),
        ({"fine_pruning": True, "computational_calibration": True}, "switch coalescing on"),
        ({"importance": "median"}, "importance must be one of mean, max, quantile"),
        ({"token_weight": "none"}, "token_weight must be one of routing, path, attention"),
    ],
)
def test_a_contradiction_is_refused_with_the_rule_it_breaks(change: dict, rule: str) -> None:
    with pytest.raises(UserError) as error:
        replace(Techniques(), **change).resolved(**STORIES)
    assert rule in str(error.value).replace("`", "")


def test_an_unknown_policy_is_refused_with_the_list_of_policies() -> None:
    with pytest.raises(UserError, match="exact, pruned, reuse, coalesced, edgexpert"):
        policy_named("fast")


def test_presets_add_one_technique_after_the_other() -> None:
    assert list(PRESETS) == ["exact", "pruned", "reuse", "coalesced", "edgexpert"]
    lines = [len(policy.resolved(**STORIES).approximations()) for policy in PRESETS.values()]
    assert lines == [0, 2, 3, 4, 5]
    assert [policy.is_exact for policy in PRESETS.values()] == [True, False, False, False, False]


def test_json_holds_every_resolved_hyperparameter() -> None:
    policy = policy_named("edgexpert").resolved(**STORIES)
    data = json.loads(json.dumps(policy.to_json()))
    assert Techniques(**data) == policy
    assert None not in data.values()


def test_exact_returns_the_very_same_routing_and_all_channels() -> None:
    routing, scores = routed(torch.randn(5, 8), 2)
    policy = Techniques().resolved(model_type="other", num_experts=8, top_k=2)
    prefill, verify = Stage.prefill(torch.arange(5), importance=torch.ones(5)), Stage.verify(chain(5), prefix=3)
    for stage in (prefill, verify):
        assert policy.route(routing, scores, stage) is routing
        assert policy.select_channels(torch.randn(10, 4), routing, stage) is None


def test_techniques_of_one_stage_leave_the_other_alone() -> None:
    routing, scores = routed(torch.randn(5, 8), 2)
    sizes = {"model_type": "other", "num_experts": 8, "top_k": 2}
    prefill, verify = Stage.prefill(torch.arange(5)), Stage.verify(chain(5), prefix=3)
    pruned = policy_named("pruned").resolved(**sizes)
    assert pruned.route(routing, scores, prefill) is routing
    assert pruned.select_channels(torch.randn(10, 4), routing, prefill) is None
    reuse = Techniques(prompt_wise_expert_reuse=True).resolved(**sizes)
    assert reuse.route(routing, scores, verify) is routing


def test_reuse_without_measured_importance_is_refused() -> None:
    routing, scores = routed(torch.randn(5, 8), 2)
    policy = Techniques(prompt_wise_expert_reuse=True).resolved(model_type="other", num_experts=8, top_k=2)
    with pytest.raises(UserError, match="give an encoder"):
        policy.route(routing, scores, Stage.prefill(torch.arange(5)))


def test_attention_as_token_weight_is_refused_where_it_was_not_measured() -> None:
    routing, _ = routed(torch.randn(3, 8), 2)
    policy = replace(policy_named("edgexpert"), token_weight="attention")
    policy = policy.resolved(model_type="other", num_experts=8, top_k=2)
    with pytest.raises(UserError, match="use routing or path"):
        policy.select_channels(torch.randn(6, 4), routing, Stage.verify(chain(3), 0))


@pytest.mark.parametrize(("token_weight", "loaded"), [("routing", 1), ("path", 0), ("attention", 0)])
def test_the_token_weight_decides_whose_channels_are_salient(token_weight: TokenWeight, loaded: int) -> None:
    """Two siblings each need one channel of an expert and touch the other's; only the heavier one's need is salient."""
    tree = TokenTree(torch.arange(3), torch.tensor([-1, 0, 0]), torch.tensor([0.0, -0.1, -3.0]))
    # The root routes elsewhere. The first sibling is likelier and received more attention, the second has more weight.
    routing = Routing(torch.tensor([[1], [0], [0]]), torch.tensor([[1.0], [0.1], [0.9]]), 2)
    activations = torch.tensor([[1.0, 1.0], [1.2, 0.2], [0.2, 1.2]])
    policy = Techniques(fine_pruning=True, depth_aware_coalescing=True, keep_channels=0.5, selection_ratio=0.5,
                    token_weight=token_weight).resolved(model_type="other", num_experts=2, top_k=1)
    selection = policy.select_channels(activations, routing, Stage.verify(tree, 0), received=torch.tensor([0.0, 0.9, 0.1]))
    assert selection is not None
    assert selection.loaded[0].nonzero().flatten().tolist() == [loaded]

"""Laws of choosing experts and channels, kept alike by PyTorch's rules and the native ones, for ties and every router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgexpert.core.routing import Routing, Scores
from edgexpert.kernels import native
from edgexpert.model.router import RouterForm
from edgexpert.policy.coalescing import salient_channels
from edgexpert.policy.importance import Tier
from edgexpert.policy.pruning import needed_channels, prune_experts
from edgexpert.policy.reuse import rank_experts, reuse_experts

law = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["torch", "native"])
def rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which rules run."""
    if request.param == "torch":
        monkeypatch.setattr(native, "computes", lambda _: False)
    elif native.path() == "torch":
        pytest.skip("no native kernels here")
    return str(request.param)


@dataclass
class Prompt:
    routing: Routing
    scores: Scores
    tiers: Tensor
    minor: tuple[int, int]
    trivial: tuple[int, int]

    def reused(self) -> Routing:
        return reuse_experts(self.routing, self.scores, self.tiers, self.minor, self.trivial)


@st.composite
def routed(draw: st.DrawFn) -> tuple[Routing, Scores]:
    """What a router of any form gives, its scores rounded so that many are equal, and its ties broken in any way."""
    tokens, groups, in_group = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(2, 5))
    count = groups * in_group
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(tokens, count, generator=generator)
    coarse = draw(st.sampled_from([None, 4.0, 1.0, 0.0]))  # steps of a quarter, of one, or all equal
    if coarse is not None:
        logits = (logits * coarse).round() / max(coarse, 1)
    bias = torch.randn(count, generator=generator).bfloat16().float() if draw(st.booleans()) else None
    limited = (groups, draw(st.integers(1, groups)), draw(st.integers(1, 2))) if groups > 1 and draw(st.booleans()) else None
    form = RouterForm(draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([1.0, 2.5])), bias, limited)
    scores = form.scores(logits.bfloat16())
    allowed = limited[1] * in_group if limited else count
    top_k = draw(st.integers(1, min(allowed, 4)))
    shuffled = torch.randperm(count, generator=generator)  # equal scores in any order
    best = scores.choice[:, shuffled].argsort(dim=1, descending=True, stable=True)[:, :top_k]
    experts = shuffled[best]
    if draw(st.booleans()):  # and routers that do not sort
        experts = experts.gather(1, torch.rand(tokens, top_k, generator=generator).argsort(1))
    return Routing(experts, scores.weights(experts), count, complete=True), scores


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    routing, scores = draw(routed())
    tokens, top_k = routing.experts.shape
    tiers = torch.tensor(draw(st.lists(st.sampled_from(list(Tier)), min_size=tokens, max_size=tokens)))
    tiers[draw(st.integers(0, tokens - 1))] = Tier.MAJOR
    k_min = draw(st.integers(top_k, routing.num_experts))
    n_min = draw(st.integers(1, top_k))
    return Prompt(routing, scores, tiers, (k_min, n_min),
                  (draw(st.integers(k_min, routing.num_experts)), draw(st.integers(1, n_min))))


def members(routing: Routing) -> list[set[int]]:
    return [{expert for expert in row if expert < routing.num_experts} for row in routing.experts.tolist()]


@law
@given(prompt=prompts())
def test_reuse_keeps_every_first_choice_and_loads_no_expert_that_exact_does_not(rules: str, prompt: Prompt) -> None:
    reused, first = prompt.reused(), rank_experts(prompt.routing, prompt.scores, 1)[:, 0].tolist()
    assert all(choice in own for choice, own in zip(first, members(prompt.routing), strict=True))
    assert all(choice in kept for choice, kept in zip(first, members(reused), strict=True))
    assert set(reused.loaded.tolist()) <= set(prompt.routing.loaded.tolist())
    best = torch.where(reused.experts < reused.num_experts, 0, -1)
    assert bool((best[:, 0] == 0).all()), "no token is left without an expert"


@law
@given(prompt=prompts())
def test_reuse_takes_as_many_experts_as_a_tier_may_each_once_by_the_models_own_weights(rules: str, prompt: Prompt) -> None:
    reused = prompt.reused()
    budget = torch.tensor([prompt.routing.experts.shape[1], prompt.minor[1], prompt.trivial[1]])[prompt.tiers]
    assert [len(own) for own in members(reused)] == budget.tolist()
    assert torch.equal((reused.experts < reused.num_experts).sum(1), budget)
    torch.testing.assert_close(reused.weights, prompt.scores.weights(reused.experts))
    major = prompt.tiers == Tier.MAJOR
    assert torch.equal(reused.experts[major], prompt.routing.experts[major])
    assert torch.equal(reused.weights[major], prompt.routing.weights[major])


@law
@given(case=routed(), data=st.data())
def test_pruning_leaves_each_token_those_of_its_experts_that_somebody_kept_wants(
    rules: str, case: tuple[Routing, Scores], data: st.DataObject
) -> None:
    (routing, scores), tokens = case, len(case[0].experts)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    keep[0] = True
    pruned = prune_experts(routing, scores, keep)
    wanted = set(routing.experts[keep].flatten().tolist())
    assert members(pruned) == [own & wanted for own in members(routing)]
    stays = pruned.experts == routing.experts
    assert bool((pruned.experts[~stays] == routing.num_experts).all())
    assert torch.equal(pruned.weights[stays.all(1)], routing.weights[stays.all(1)])
    torch.testing.assert_close(pruned.weights, scores.weights(pruned.experts))


def both(rule: Callable[[], Routing]) -> tuple[Routing, Routing]:
    """By the rules in PyTorch, and by the native ones."""
    if native.path() == "torch":
        pytest.skip("no native kernels here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "computes", lambda _: False)
        ours = rule()
    return ours, rule()


@law
@given(prompt=prompts(), data=st.data())
def test_native_choices_are_those_of_pytorch_slot_by_slot(prompt: Prompt, data: st.DataObject) -> None:
    tokens = len(prompt.tiers)
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    for rule in (prompt.reused, lambda: prune_experts(prompt.routing, prompt.scores, keep)):
        ours, native_ones = both(rule)
        assert torch.equal(ours.experts, native_ones.experts)
        torch.testing.assert_close(ours.weights, native_ones.weights)
        assert (ours is prompt.routing) == (native_ones is prompt.routing)


def test_equal_scores_rank_by_number_behind_the_routers_own() -> None:
    routing = Routing(torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.5]]), 5)
    scores = Scores(torch.tensor([[0.0, 1.0, 1.0, 1.0, -torch.inf]]), torch.full((1, 5), 0.2), normalise=True)
    assert rank_experts(routing, scores, 5).tolist() == [[1, 3, 2, 0, 5]]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Routing, Tensor, Tensor, float]:
    """A routing with gaps, activations of which many are equal, depths of tokens, and a share."""
    routing, scores = draw(routed())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    keep = torch.rand(len(routing.experts), generator=generator) < 0.7
    keep[0] = True
    routing = prune_experts(routing, scores, keep)
    x = torch.randn(len(routing.pair_expert), draw(st.integers(1, 40)), generator=generator)
    x = draw(st.sampled_from([x, x.bfloat16().float(), x.round(), x.sign(), torch.zeros_like(x), 1e4 * x]))
    depth = torch.arange(len(routing.experts)).sqrt().long()[routing.pair_token]
    return routing, x, depth, draw(st.sampled_from([0.05, 0.3, 0.8, 0.95, 1.0]))


@law
@given(case=selections())
def test_needed_channels_hold_the_share_equal_ones_alike_and_one_of_every_pair(
    rules: str, case: tuple[Routing, Tensor, Tensor, float]
) -> None:
    routing, x, _, share = case
    mask = needed_channels(x, routing, share)
    importance = x.abs() * routing.pair_weight.abs()[:, None]
    assert mask.any(1).all()
    for token in routing.pair_token.unique():
        own, kept = importance[routing.pair_token == token], mask[routing.pair_token == token]
        assert float((own * kept).double().sum()) >= share * float(own.double().sum()) * (1 - 1e-5)
        largest_out = float(own[~kept].max()) if (~kept).any() else -1.0
        forced = own == own.amax(1, keepdim=True)
        assert not bool((kept & ~forced & (own <= largest_out)).any()), "none is kept before a larger or an equal one"


@law
@given(case=selections(), ratio=st.sampled_from([0.0, 0.3, 0.5, 0.9]))
def test_native_channels_are_those_of_pytorch(case: tuple[Routing, Tensor, Tensor, float], ratio: float) -> None:
    routing, x, depth, share = case
    score = x.abs() * routing.pair_weight.abs().clamp(min=1e-20)[:, None]

    def chosen() -> tuple[Tensor, Tensor]:
        mask = needed_channels(x, routing, share)
        return mask, salient_channels(score, mask, routing.pair_expert, depth, routing.num_experts, ratio)

    ours, native_ones = both(chosen)  # type: ignore[arg-type, type-var]
    assert torch.equal(ours[0], native_ones[0])
    assert torch.equal(ours[1], native_ones[1])

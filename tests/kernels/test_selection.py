"""Native channel selection and pair sorting give what the rules in PyTorch give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.core.routing import Routing
from edgexpert.kernels import native
from edgexpert.kernels.reference import Pairs
from edgexpert.policy.coalescing import salient_channels
from edgexpert.policy.pruning import needed_channels

pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Routing, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tokens, experts, channels = draw(st.integers(1, 9)), draw(st.integers(2, 9)), draw(st.integers(1, 40))
    top_k = draw(st.integers(1, experts))
    chosen = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    if draw(st.booleans()):
        chosen[1:][torch.rand(tokens - 1, top_k, generator=generator) < 0.3] = experts
    weights = torch.rand(tokens, top_k, generator=generator) * (chosen < experts)
    routing = Routing(chosen, weights, experts)
    x = torch.randn(len(routing.pair_expert), channels, generator=generator) * draw(st.sampled_from([0.0, 1.0, 100.0]))
    return routing, x, draw(st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0]))


@given(cases())
@settings(max_examples=60, deadline=None)
def test_needed_and_salient_channels_are_those_of_the_rules(case: tuple[Routing, torch.Tensor, float]) -> None:
    routing, x, share = case
    mask = native.needed_channels(x, routing, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "computes", lambda _: False)
        assert torch.equal(mask, needed_channels(x, routing, share))
        depth = torch.arange(len(routing.experts)).sqrt().long()[routing.pair_token]
        score = x.abs() * routing.pair_weight[:, None]
        rule = salient_channels(score, mask, routing.pair_expert, depth, routing.num_experts, share)
    assert torch.equal(native.salient_channels(score, mask, routing.pair_expert, depth, routing.num_experts, share), rule)


@given(cases())
@settings(max_examples=30, deadline=None)
def test_pairs_are_sorted_by_expert_as_in_pytorch(case: tuple[Routing, torch.Tensor, float]) -> None:
    routing = case[0]
    ours, order = native.group(routing)
    theirs, expected = Pairs.group(routing.pair_expert, routing.pair_token)
    assert torch.equal(order, expected)
    assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("experts", "offsets", "tokens"))


def test_a_token_that_is_not_a_number_leaves_the_others_as_they_are() -> None:
    x = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
    routing = Routing(torch.tensor([[0, 1], [1, 2]]), torch.full((2, 2), 0.5), 3, complete=True)
    expected = native.needed_channels(x, routing, 0.9)
    x[1, 5] = torch.nan  # in the second pair, whose values then stand above the largest of the first
    assert torch.equal(native.needed_channels(x, routing, 0.9)[2:], expected[2:])

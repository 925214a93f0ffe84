"""The executor computes what the plan says, and reads no row more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.core.shapes import ExpertShape, WeightFormat
from edgexpert.kernels.experts import ExpertWeights, run_experts

EXPERTS, HIDDEN, INTER, TOKENS = 5, 12, 8, 7


def glu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def weights(request: pytest.FixtureRequest) -> ExpertWeights:
    torch.manual_seed(1)
    bias = request.param
    return ExpertWeights(
        torch.randn(EXPERTS, HIDDEN, 2 * INTER, dtype=torch.float64),
        torch.randn(EXPERTS, INTER, HIDDEN, dtype=torch.float64),
        torch.randn(EXPERTS, 2 * INTER, dtype=torch.float64) if bias else None,
        torch.randn(EXPERTS, HIDDEN, dtype=torch.float64) if bias else None,
        glu,
    )


@pytest.fixture
def routing() -> Routing:
    torch.manual_seed(2)
    experts = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(TOKENS)])
    experts[3, 1] = EXPERTS  # a token that lost an expert
    experts[5] = EXPERTS  # and one that lost all
    weights = torch.rand(TOKENS, 2, dtype=torch.float64) * (experts < EXPERTS)
    return Routing(experts, weights, EXPERTS)


def dense(
    x: Tensor, routing: Routing, w: ExpertWeights, gate_up: ChannelSelection | None, down: ChannelSelection | None
) -> Tensor:
    """Full work under masks, pair by pair."""
    out = torch.zeros_like(x)
    for pair, (token, slot) in enumerate(zip(*routing.pairs, strict=True)):
        expert = int(routing.experts[token, slot])
        y = x[token] * _mask(gate_up, expert, pair) @ w.gate_up[expert]
        y = y + w.gate_up_bias[expert] if w.gate_up_bias is not None else y
        y = w.apply_gate(y) * _mask(down, expert, pair) @ w.down[expert]
        y = y + w.down_bias[expert] if w.down_bias is not None else y
        out[token] += routing.weights[token, slot] * y
    return out


def _mask(selection: ChannelSelection | None, expert: int, pair: int) -> Tensor | float:
    if selection is None:
        return 1.0
    mask = selection.loaded[expert].double()
    return mask if selection.compute is None else mask * selection.compute[pair]


def random_selection(routing: Routing, channels: int, compute: bool) -> ChannelSelection:
    loaded = torch.rand(EXPERTS, channels) < 0.5
    routed = torch.isin(torch.arange(EXPERTS), routing.loaded)
    loaded &= routed[:, None]
    mask = (torch.rand(len(routing.pair_expert), channels) < 0.5) & loaded[routing.pair_expert] if compute else None
    return ChannelSelection(loaded, mask)


@pytest.mark.parametrize("compute", [None, False, True], ids=["all channels", "loaded channels", "own channels"])
def test_output_and_bytes_are_those_of_the_plan(weights: ExpertWeights, routing: Routing, compute: bool | None) -> None:
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    gate_up = None if compute is None else random_selection(routing, HIDDEN, compute)
    down = None if compute is None else random_selection(routing, INTER, compute)
    out, used, read = run_experts(x, routing, weights, gate_up, lambda _: down)
    torch.testing.assert_close(out, dense(x, routing, weights, gate_up, down))
    assert used is down
    assert read == LayerPlan(0, routing, gate_up, down).bytes(ExpertShape(HIDDEN, INTER, 2 * INTER, WeightFormat(8)))


def test_down_is_selected_from_the_activations_of_gate_and_up(weights: ExpertWeights, routing: Routing) -> None:
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    seen: list[Tensor] = []
    run_experts(x, routing, weights, None, lambda activations: seen.append(activations))  # type: ignore[func-returns-value]
    for pair, (token, slot) in enumerate(zip(*routing.pairs, strict=True)):
        expert = int(routing.experts[token, slot])
        y = x[token] @ weights.gate_up[expert]
        y = y + weights.gate_up_bias[expert] if weights.gate_up_bias is not None else y
        torch.testing.assert_close(seen[0][pair], glu(y))


def test_a_token_without_experts_gets_nothing(weights: ExpertWeights, routing: Routing) -> None:
    out, _, _ = run_experts(torch.randn(TOKENS, HIDDEN, dtype=torch.float64), routing, weights, None, lambda _: None)
    assert torch.equal(out[5], torch.zeros(HIDDEN, dtype=torch.float64))

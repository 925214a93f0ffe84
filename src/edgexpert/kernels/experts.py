"""Executing one layer's plan in PyTorch: only the planned weight rows are read.

Weights are channel-major, so that a skipped input channel is a skipped row: gate/up is [E, H, 2I], down is [E, I, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgexpert.plan import ChannelSelection, Routing


@dataclass(frozen=True)
class ExpertWeights:
    """Channel-major weights of one layer's experts, and how gate and up become the activation."""

    gate_up: Tensor  # [E, H, 2I]
    down: Tensor  # [E, I, H]
    gate_up_bias: Tensor | None  # [E, 2I]
    down_bias: Tensor | None  # [E, H]
    apply_gate: Callable[[Tensor], Tensor]  # [n, 2I] -> [n, I]


def run_experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    gate_up: ChannelSelection | None,
    select_down: Callable[[Tensor], ChannelSelection | None],
) -> tuple[Tensor, ChannelSelection | None, float]:
    """Weighted sum of each token's experts, on the selected channels.

    Args:
        x: [T, H].
        gate_up: selection of gate/up's input channels.
        select_down: called with the activations [P, I] that gate/up gave; returns the selection for down.

    Returns the output [T, H], down's selection, and the weight bytes that were read.
    """
    token, _ = routing.pairs
    groups = list(_by_expert(routing))
    activations, read = _activations(x[token], groups, weights, gate_up)

    down = select_down(activations)
    out = torch.zeros_like(x)
    for expert, pairs in groups:
        y, count = _product(activations[pairs], weights.down[expert], down, expert, pairs)
        read += count
        if weights.down_bias is not None:
            y = y + weights.down_bias[expert]
        out.index_add_(0, token[pairs], (y * routing.pair_weight[pairs, None]).to(x.dtype))
    return out, down, read


def down_inputs(x: Tensor, routing: Routing, weights: ExpertWeights) -> Tensor:
    """What goes into the down matrix of each pair where gate/up is loaded whole, [P, I]."""
    return _activations(x[routing.pairs[0]], list(_by_expert(routing)), weights, None)[0]


def _activations(
    x: Tensor, groups: Sequence[tuple[int, Tensor]], weights: ExpertWeights, gate_up: ChannelSelection | None
) -> tuple[Tensor, int]:
    """Activations [P, I] that gate/up gives for the pairs' inputs [P, H], and the weight bytes read."""
    read = 0
    activations = x.new_zeros(len(x), weights.down.shape[1])
    for expert, pairs in groups:
        y, count = _product(x[pairs], weights.gate_up[expert], gate_up, expert, pairs)
        read += count
        if weights.gate_up_bias is not None:
            y = y + weights.gate_up_bias[expert]
        activations[pairs] = weights.apply_gate(y)
    return activations, read


def _by_expert(routing: Routing) -> Iterator[tuple[int, Tensor]]:
    """Loaded experts in ascending order, each with the indices of its pairs."""
    order = torch.argsort(routing.pair_expert, stable=True)
    experts, counts = routing.pair_expert.unique(return_counts=True)
    yield from zip(experts.tolist(), order.split(counts.tolist()), strict=True)


def _product(
    x: Tensor, weight: Tensor, selection: ChannelSelection | None, expert: int, pairs: Tensor
) -> tuple[Tensor, int]:
    """``x`` [n, C] times ``weight`` [C, out] over the loaded channels, and the bytes of weight read."""
    if selection is not None:
        channels = selection.loaded[expert].nonzero().squeeze(1)
        x = x[:, channels] if selection.compute is None else (x * selection.compute[pairs])[:, channels]
        weight = weight[channels]
    return x @ weight, weight.numel() * weight.element_size()

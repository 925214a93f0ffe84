"""Executing one layer's plan: only the planned weight rows are read.

Weights are channel-major, so that a skipped input channel is a skipped row: gate/up is [E, H, 2I], down is [E, I, H]. Float
weights are multiplied in PyTorch, packed ones by the native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.core.shapes import WeightFormat
from edgexpert.kernels import native
from edgexpert.kernels.reference import Pairs
from edgexpert.weights.matrix import ALIGNMENT, PackedExperts
from edgexpert.weights.store import ExpertStore

SelectDown = Callable[[Tensor], ChannelSelection | None]


@dataclass(frozen=True)
class ExpertWeights:
    """Channel-major weights of one layer's experts, and how gate and up become the activation."""

    gate_up: Tensor  # [E, H, 2I]
    down: Tensor  # [E, I, H]
    gate_up_bias: Tensor | None  # [E, 2I]
    down_bias: Tensor | None  # [E, H]
    apply_gate: Callable[[Tensor], Tensor]  # [n, 2I] -> [n, I]


@dataclass(frozen=True)
class PackedExpertWeights:
    """Packed weights of one layer's experts.

    Attributes:
        activation: one of `reference.ACTIVATIONS`.
        gated: whether gate_up holds a gate beside up.
        layer, store: which layer of which store they are; None for experts that are in memory anyway.
    """

    gate_up: PackedExperts
    down: PackedExperts
    gate_up_bias: Tensor | None  # float32 [E, 2I]
    down_bias: Tensor | None  # float32 [E, H]
    activation: str
    gated: bool
    layer: int = 0
    store: ExpertStore | None = None

    @contextmanager
    def in_use(self, experts: Tensor) -> Iterator[None]:
        """While open, these experts, int64 [n], can be read."""
        if self.store is None or not self.store.watches:
            yield
            return
        ids = experts.tolist()
        self.store.use(self.layer, ids)
        try:
            yield
        finally:
            self.store.release(self.layer, ids)

    @property
    def format(self) -> WeightFormat:
        """How the weights are stored."""
        matrix = self.gate_up
        if matrix.scales is None:
            return WeightFormat(matrix.bits / 8, padding=ALIGNMENT)
        return WeightFormat(matrix.bits / 8, matrix.group, 2 if matrix.zeros is None else 3, ALIGNMENT)


def run_experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights | PackedExpertWeights,
    gate_up: ChannelSelection | None,
    select_down: SelectDown | None,
) -> tuple[Tensor, ChannelSelection | None, float]:
    """Weighted sum of each token's experts, on the selected channels.

    Args:
        x: [T, H].
        gate_up: selection of gate/up's input channels.
        select_down: called with the activations [P, I] that gate/up gave; returns the selection for down. None to load all.

    Returns the output [T, H], down's selection, and the weight bytes that were read.
    """
    if isinstance(weights, PackedExpertWeights):
        with weights.in_use(routing.loaded):
            return _run_packed(x, routing, weights, gate_up, select_down)
    token = routing.pair_token
    groups = list(_by_expert(routing))
    activations, read = _activations(x[token], groups, weights, gate_up)

    down = None if select_down is None else select_down(activations)
    out = torch.zeros_like(x)
    for expert, pairs in groups:
        y, count = _product(activations[pairs], weights.down[expert], down, expert, pairs)
        read += count
        if weights.down_bias is not None:
            y = y + weights.down_bias[expert]
        out.index_add_(0, token[pairs], (y * routing.pair_weight[pairs, None]).to(x.dtype))
    return out, down, read


def _run_packed(
    x: Tensor, routing: Routing, weights: PackedExpertWeights, gate_up: ChannelSelection | None, select_down: SelectDown | None
) -> tuple[Tensor, ChannelSelection | None, float]:
    pairs, order = native.group(routing)
    weight = routing.pair_weight.float()[order]
    read = _packed_bytes(weights.gate_up, gate_up, len(pairs.experts))
    activations = _packed_activations(x, pairs, order, weights, gate_up)
    down = None
    if select_down is not None:
        down = select_down(_by_token(activations, order))
    out = native.down(activations, weights.down, pairs, weight, len(x), *_in_order(down, order), bias=weights.down_bias)
    return out, down, read + _packed_bytes(weights.down, down, len(pairs.experts))


def _packed_activations(
    x: Tensor, pairs: Pairs, order: Tensor, weights: PackedExpertWeights, selection: ChannelSelection | None
) -> Tensor:
    return native.gate_up(
        x, weights.gate_up, pairs, *_in_order(selection, order), bias=weights.gate_up_bias, activation=weights.activation,
        gated=weights.gated,
    )


def _by_token(activations: Tensor, order: Tensor) -> Tensor:
    """Rows that stand by expert, in the order of the routing's own pairs."""
    rows = torch.empty_like(activations)
    rows[order] = activations
    return rows


def _in_order(selection: ChannelSelection | None, order: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Which channels are loaded, and which the pairs compute on in their order by expert."""
    if selection is None:
        return None, None
    return selection.loaded, None if selection.compute is None else selection.compute[order]


def _packed_bytes(matrices: PackedExperts, selection: ChannelSelection | None, experts: int) -> float:
    """Bytes of the selected channels: their rows of values, and the scales of every group that has one of them."""
    channels = experts * matrices.channels
    groups = channels // matrices.group
    if selection is not None:
        channels, groups = selection.channels, selection.groups(matrices.group)
    beside = sum(part[0, 0].nbytes for part in (matrices.scales, matrices.zeros) if part is not None)
    return channels * matrices.values[0, 0].nbytes + groups * beside


def down_inputs(x: Tensor, routing: Routing, weights: ExpertWeights | PackedExpertWeights) -> Tensor:
    """What goes into the down matrix of each pair where gate/up is loaded whole, [P, I]."""
    if isinstance(weights, PackedExpertWeights):
        with weights.in_use(routing.loaded):
            pairs, order = native.group(routing)
            return _by_token(_packed_activations(x, pairs, order, weights, None), order)
    return _activations(x[routing.pair_token], list(_by_expert(routing)), weights, None)[0]


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

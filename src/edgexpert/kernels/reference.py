"""Packed channel-major weights, and every native kernel in PyTorch with the same arithmetic.

All outputs of an input channel are one row, so that a skipped channel is a skipped contiguous run. Activations are quantised to
8 bits token by token (scale = largest magnitude of the whole row / 127, before any channel is left out; halves round to even),
products are summed as integers within a group of channels, and the groups are added in float32 in ascending order, in four parts
that are added in their order: threads can share the channels of a matrix. 16-bit weights take float activations as they are.
Here, too, a token's result is the same whatever other tokens share the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from edgexpert.kernels import rows
from edgexpert.weights.matrix import PackedExperts, PackedMatrix, integers

RUNS = 4
"""The groups of a matrix are summed in so many runs, which are then added."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True, eq=False)
class Pairs:
    """The (token, expert) pairs of a layer, grouped by expert in ascending order.

    Attributes:
        experts: ids of the experts, int64 [U].
        offsets: expert u owns the pairs from ``offsets[u]`` up to ``offsets[u + 1]``, int64 [U + 1].
        tokens: token of each pair, int64 [P].
    """

    experts: Tensor
    offsets: Tensor
    tokens: Tensor

    @classmethod
    def group(cls, expert: Tensor, token: Tensor) -> tuple[Pairs, Tensor]:
        """Pairs from the expert and the token of each, and the order [P] in which they now stand."""
        order = torch.argsort(expert, stable=True)
        experts, counts = expert.unique(return_counts=True)
        return cls(experts, F.pad(counts.cumsum(0), (1, 0)), token[order]), order


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in [-127, 127], held as float32 [T, C], and their scales [T, 1]."""
    largest = x.abs().amax(1, keepdim=True)
    largest = largest.where(~(largest < 1e-30), torch.zeros(()))
    factor = torch.where(largest == 0, 0.0, torch.tensor(127.0) / largest)  # number / tensor would round twice
    return (x * factor).round(), largest / 127


def _product(x: Tensor, matrix: PackedMatrix, selected: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [n, C] times the matrix -> [n, N]; ``selected`` is a bool mask that broadcasts to x."""
    q, scales, zeros = integers(matrix)
    if scales is None:
        out = rows.product(x if selected is None else x * selected, q)
    else:
        x, x_scale = quantise_activations(x)
        if selected is not None:
            x = x * selected
        exact = torch.float32 if matrix.group * 127 * 127 < 2**24 else torch.float64
        out = torch.zeros(())
        for p in range(RUNS):
            part = x.new_zeros(len(x), q.shape[1])
            for g in range(p * len(scales) // RUNS, (p + 1) * len(scales) // RUNS):
                own = slice(g * matrix.group, (g + 1) * matrix.group)
                part = part + (x[:, own].to(exact) @ (q[own] - zeros[g]).to(exact)).float() * scales[g]
            out = out + part
        out = out * x_scale
    out = out[:, : matrix.outputs]
    return out if bias is None else out + bias


def linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """x [T, C] times the matrix, plus bias [N] -> [T, N]."""
    return _product(x, matrix, None, bias)


def _grouped(
    x: Tensor, experts: PackedExperts, pairs: Pairs, loaded: Tensor | None, compute: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x [P, C], a row for each pair, times the matrices of the pairs' experts -> [P, N]."""
    out = x.new_zeros(len(x), experts.outputs)
    for u, expert in enumerate(pairs.experts.tolist()):
        own = slice(int(pairs.offsets[u]), int(pairs.offsets[u + 1]))
        selected = None if loaded is None else loaded[expert]
        if compute is not None:
            selected = compute[own] if selected is None else compute[own] & selected
        out[own] = _product(x[own], experts[expert], selected, None if bias is None else bias[expert])
    return out


def gate_up(
    x: Tensor,
    experts: PackedExperts,
    pairs: Pairs,
    loaded: Tensor | None = None,
    compute: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """Activations [P, I] of every pair: act(gate) * up, or act(up) where there is no gate.

    Args:
        x: float32 [T, C].
        experts: N = 2I outputs, gate first; N = I without a gate.
        loaded: which channels an expert reads, bool [E, C].
        compute: which channels a pair computes on, bool [P, C]; others count as zero.
        bias: float32 [E, N].
    """
    y = _grouped(x[pairs.tokens], experts, pairs, loaded, compute, bias)
    if not gated:
        return rows.elementwise(ACTIVATIONS[activation], y)
    gate, up = y.chunk(2, 1)
    return rows.elementwise(ACTIVATIONS[activation], gate) * up


def down(
    activations: Tensor,
    experts: PackedExperts,
    pairs: Pairs,
    weights: Tensor,
    tokens: int,
    loaded: Tensor | None = None,
    compute: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Output [tokens, N]: each token's experts, weighted by ``weights`` [P] and added in ascending order of expert."""
    y = _grouped(activations, experts, pairs, loaded, compute, bias)
    out = y.new_zeros(tokens, experts.outputs)
    for u in range(len(pairs.experts)):  # a token is at most once with an expert
        own = slice(int(pairs.offsets[u]), int(pairs.offsets[u + 1]))
        out[pairs.tokens[own]] += weights[own, None] * y[own]
    return out

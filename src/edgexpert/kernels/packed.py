"""Packed channel-major weights, and every native kernel in PyTorch with the same arithmetic.

All outputs of an input channel are one row, so that a skipped channel is a skipped contiguous run. Activations are quantised to
8 bits token by token (scale = largest magnitude of the whole row / 127, before any channel is left out; halves round to even),
products are summed as integers within a group of channels, and the groups are added in float32 in ascending order, in four parts
that are added in their order: threads can share the channels of a matrix. 16-bit weights take float activations as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 32
"""Rows are padded to a multiple of this many outputs."""

TILE_UNIT = 128
"""Tiles are multiples of this many outputs."""

PARTS = 4
"""The groups of a matrix are summed in so many runs, which are then added."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One matrix of ``channels`` inputs and ``outputs`` outputs, padded to Np outputs, a multiple of 32.

    Attributes:
        values: bits 4: uint8 [C, Np / 2], byte j holds outputs 2j (low nibble) and 2j + 1; weight = (q - zero) * scale.
            bits 8: int8 [C, Np], q in [-127, 127]; weight = q * scale. bits 16: bfloat16 [C, Np].
        scales: float16 [C / group, Np]; None for 16 bits.
        zeros: uint8 [C / group, Np]; None where every zero point is 8.
        group: channels that share a row of scales, a multiple of 4 that divides C.

    Rows and matrices may be views of a memory-mapped file: each matrix is contiguous, experts have a stride of their own.
    """

    values: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    channels: int
    outputs: int
    bits: int
    group: int


class PackedExperts(PackedMatrix):
    """The matrices of a layer's experts: the tensors of `PackedMatrix` with a leading dimension [E]."""

    def __getitem__(self, expert: int) -> PackedMatrix:
        scales, zeros = (None if t is None else t[expert] for t in (self.scales, self.zeros))
        return PackedMatrix(self.values[expert], scales, zeros, self.channels, self.outputs, self.bits, self.group)


class TiledMatrix(PackedMatrix):
    """A wide matrix cut into column tiles: the tensors of `PackedMatrix` with a leading dimension [tiles].

    Threads that share a matrix by its columns then read rows of their own, one behind the other; in the plain layout each fetches
    ahead into the other's. That is 1.5 times as fast for an output head of 49,152 tokens where it was measured.
    """

    @classmethod
    def of(cls, matrix: PackedMatrix) -> TiledMatrix:
        """The same weights in tiles of 1,024 to 2,048 outputs, a size that needs few zeros to fill up the last."""
        units = -(-matrix.outputs // TILE_UNIT)
        width = min(range(8, 17), key=lambda n: (-units % n, -n)) * TILE_UNIT

        def cut(rows: Tensor | None) -> Tensor | None:
            if rows is None:
                return None
            tile = width * matrix.bits // 8 // rows.element_size() if rows is matrix.values else width
            return F.pad(rows, (0, -rows.shape[1] % tile)).unflatten(1, (-1, tile)).transpose(0, 1).contiguous()

        values, scales, zeros = cut(matrix.values), cut(matrix.scales), cut(matrix.zeros)
        assert values is not None
        return cls(values, scales, zeros, matrix.channels, matrix.outputs, matrix.bits, matrix.group)

    def untiled(self) -> PackedMatrix:
        """The plain layout."""
        rows = [None if t is None else t.transpose(0, 1).flatten(1) for t in (self.values, self.scales, self.zeros)]
        assert rows[0] is not None
        return PackedMatrix(rows[0], rows[1], rows[2], self.channels, self.outputs, self.bits, self.group)


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


def dequantise(matrix: PackedMatrix) -> Tensor:
    """The float32 weights [.., C, N]."""
    q, scales, zeros = _integers(matrix)
    if scales is None:
        return q[..., : matrix.outputs]
    grouped = q.unflatten(-2, (-1, matrix.group))
    weight = (grouped - zeros.unsqueeze(-2)) * scales.unsqueeze(-2)
    return weight.flatten(-3, -2)[..., : matrix.outputs]


def _integers(matrix: PackedMatrix) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values [.., C, Np], scales and zero points [.., C / group, Np] as float32; 16-bit values are the weights themselves."""
    if isinstance(matrix, TiledMatrix):
        matrix = matrix.untiled()
    values = matrix.values
    if matrix.scales is None:
        return values.float(), None, torch.zeros(())
    scales = matrix.scales.float()
    if matrix.bits == 8:
        return values.float(), scales, torch.zeros_like(scales)
    q = torch.stack((values & 15, values >> 4), -1).flatten(-2).float()
    return q, scales, torch.full_like(scales, 8.0) if matrix.zeros is None else matrix.zeros.float()


def quantise_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in [-127, 127], held as float32 [T, C], and their scales [T, 1]."""
    largest = x.abs().amax(1, keepdim=True)
    largest = largest.where(~(largest < 1e-30), torch.zeros(()))
    factor = torch.where(largest == 0, 0.0, torch.tensor(127.0) / largest)  # number / tensor would round twice
    return (x * factor).round(), largest / 127


def _product(x: Tensor, matrix: PackedMatrix, selected: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [n, C] times the matrix -> [n, N]; ``selected`` is a bool mask that broadcasts to x."""
    q, scales, zeros = _integers(matrix)
    if scales is None:
        out = (x if selected is None else x * selected) @ q
    else:
        x, x_scale = quantise_activations(x)
        if selected is not None:
            x = x * selected
        exact = torch.float32 if matrix.group * 127 * 127 < 2**24 else torch.float64
        out = torch.zeros(())
        for p in range(PARTS):
            part = x.new_zeros(len(x), q.shape[1])
            for g in range(p * len(scales) // PARTS, (p + 1) * len(scales) // PARTS):
                rows = slice(g * matrix.group, (g + 1) * matrix.group)
                part = part + (x[:, rows].to(exact) @ (q[rows] - zeros[g]).to(exact)).float() * scales[g]
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
        rows = slice(int(pairs.offsets[u]), int(pairs.offsets[u + 1]))
        selected = None if loaded is None else loaded[expert]
        if compute is not None:
            selected = compute[rows] if selected is None else compute[rows] & selected
        out[rows] = _product(x[rows], experts[expert], selected, None if bias is None else bias[expert])
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
        return ACTIVATIONS[activation](y)
    gate, up = y.chunk(2, 1)
    return ACTIVATIONS[activation](gate) * up


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
        rows = slice(int(pairs.offsets[u]), int(pairs.offsets[u + 1]))
        out[pairs.tokens[rows]] += weights[rows, None] * y[rows]
    return out

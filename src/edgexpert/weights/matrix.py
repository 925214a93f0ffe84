"""Packed channel-major matrices: all outputs of an input channel are one row, so that a skipped channel is a skipped run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 32
"""Rows are padded to a multiple of this many outputs."""

TILE_UNIT = 128
"""Tiles are multiples of this many outputs."""


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


@dataclass(frozen=True, eq=False)
class PackedExperts(PackedMatrix):
    """The matrices of a layer's experts: the tensors of `PackedMatrix` with a leading dimension [S].

    Attributes:
        slots: in which of the S rows an expert lies, int64 [E], negative for one that is not in memory; None where S is E and
            every expert lies in its own. Whoever changes it tells the kernels, with `native.place`.
    """

    slots: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.values if self.slots is None else self.slots)

    def __getitem__(self, expert: int) -> PackedMatrix:
        slot = expert if self.slots is None else int(self.slots[expert])
        if slot < 0:
            raise RuntimeError(f"expert {expert} is used, but not in memory")
        scales, zeros = (None if t is None else t[slot] for t in (self.scales, self.zeros))
        return PackedMatrix(self.values[slot], scales, zeros, self.channels, self.outputs, self.bits, self.group)


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


def dequantise(matrix: PackedMatrix) -> Tensor:
    """The float32 weights [.., C, N]."""
    q, scales, zeros = integers(matrix)
    if scales is None:
        return q[..., : matrix.outputs]
    grouped = q.unflatten(-2, (-1, matrix.group))
    weight = (grouped - zeros.unsqueeze(-2)) * scales.unsqueeze(-2)
    return weight.flatten(-3, -2)[..., : matrix.outputs]


def integers(matrix: PackedMatrix) -> tuple[Tensor, Tensor | None, Tensor]:
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

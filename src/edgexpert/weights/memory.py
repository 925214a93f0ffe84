"""Where packed weights lie while they are used: in memory of huge pages if there is room, else in the mapped file.

With pages of 4 KiB an expert of 3 MB costs hundreds of page-table walks a token, which on virtual machines take longer than
reading it: huge pages made a 4-bit product of one token a third faster where this was measured.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from edgexpert.core.machine import available_memory
from edgexpert.weights.matrix import PackedMatrix, TiledMatrix

HUGE = 2 << 20
WIDE = 4096
"""Matrices of more outputs are tiled."""

SHARE = 0.5
"""A file is copied into memory if it takes at most this share of what is available."""


def read_file(path: Path) -> Tensor | None:
    """A file's bytes as uint8 [size] in huge pages, or None where it would take too much memory or there are none."""
    size = path.stat().st_size
    if size > SHARE * available_memory():
        return None
    memory = huge_pages(size)
    if memory is not None:
        with path.open("rb", buffering=0) as file:
            view, done = memoryview(memory.numpy().data), 0
            while done < size:
                done += file.readinto(view[done : done + (64 << 20)]) or size
    return memory


def huge_pages(size: int) -> Tensor | None:
    """Zeroed memory, uint8 [size], for which huge pages were asked; None where the system has none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return None  # switched off in this kernel
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]


def gathered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies side by side in huge pages, each at a multiple of 64 bytes; the tensors themselves where there are none."""
    places, size = [], 0
    for tensor in tensors:
        places.append(size)
        size += -(-tensor.nbytes // 64) * 64
    memory = huge_pages(size)
    if memory is None:
        return list(tensors)
    copies = []
    for tensor, place in zip(tensors, places, strict=True):
        copy = memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copies.append(copy.copy_(tensor))
    return copies


def placed(matrices: Sequence[PackedMatrix]) -> list[PackedMatrix]:
    """The matrices as they are read fastest: side by side in huge pages, wide ones in tiles."""
    tiled = [TiledMatrix.of(matrix) if matrix.outputs > WIDE else matrix for matrix in matrices]
    parts = [(matrix.values, matrix.scales, matrix.zeros) for matrix in tiled]
    copies = iter(gathered([tensor for tensors in parts for tensor in tensors if tensor is not None]))
    copied = []
    for matrix, tensors in zip(tiled, parts, strict=True):
        values, scales, zeros = (None if tensor is None else next(copies) for tensor in tensors)
        assert values is not None
        copied.append(replace(matrix, values=values, scales=scales, zeros=zeros))
    return copied

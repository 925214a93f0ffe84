"""Where the experts of a packed checkpoint lie while they are used: one store for all texts of a model.

The kernels take each expert's address from a table. A store that has all experts in memory fills it once. One that has not (see
`PackedExperts.slots`) is told before experts are read, by `use`, and changes the table until `release`.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from edgexpert.weights.manifest import DTYPES, LayerLayout, MatrixLayout
from edgexpert.weights.matrix import PackedExperts
from edgexpert.weights.memory import read_file

PAGE = mmap.PAGESIZE


class ExpertStore(Protocol):
    """Holds the experts of all layers. Layers are counted among those that have experts."""

    watches: bool
    """Whether `use` and `release` do something; otherwise nobody calls them."""

    def experts(self, layer: int) -> dict[str, PackedExperts]:
        """The matrices ``gate_up`` and ``down`` of a layer, the same objects in every call."""

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Begins to bring experts near that will probably be used. It does not wait."""

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Returns when all these experts lie where the table says, to stay there until they are released.

        Stages call it between a layer's router and its experts. An exception ends the stage; then nothing is in use.
        """

    def release(self, layer: int, experts: Sequence[int]) -> None:
        """They have been read."""


class WholeStore:
    """All experts in one piece of memory.

    Args:
        data: the expert file, uint8.
    """

    watches = False

    def __init__(self, data: Tensor, layers: Sequence[LayerLayout]) -> None:
        self._layers = layers
        self._experts = [{name: _views(data, layer, getattr(layer, name)) for name in ("gate_up", "down")} for layer in layers]

    def experts(self, layer: int) -> dict[str, PackedExperts]:
        return self._experts[layer]

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """They are here."""

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """They stay here."""

    def release(self, layer: int, experts: Sequence[int]) -> None:
        """They stay here."""


class MappedStore(WholeStore):
    """The expert file mapped into memory: the system reads pages when they are touched, and drops them when it needs room."""

    def __init__(self, path: Path, layers: Sequence[LayerLayout]) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        super().__init__(torch.frombuffer(self._map, dtype=torch.uint8), layers)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        layout = self._layers[layer]
        for expert in experts:
            start = layout.offset + expert * layout.stride
            begin = start // PAGE * PAGE
            self._map.madvise(mmap.MADV_WILLNEED, begin, min(start + layout.stride, len(self._map)) - begin)


def open_store(path: Path, layers: Sequence[LayerLayout]) -> ExpertStore:
    """The experts of a file: copied into huge pages where there is room, else mapped."""
    data = read_file(path)
    return MappedStore(path, layers) if data is None else WholeStore(data, layers)


def _views(data: Tensor, layer: LayerLayout, matrix: MatrixLayout) -> PackedExperts:
    """The matrices of all experts of a layer as strided views, the experts a record apart."""
    parts: dict[str, Tensor] = {}
    for name, extent in matrix.extents.items():
        dtype = DTYPES[extent.dtype]
        shape, stride = (layer.experts, *extent.shape), (layer.stride // dtype.itemsize, extent.shape[1], 1)
        whole = data.view(dtype)
        start = whole.storage_offset() + (layer.offset + extent.offset) // dtype.itemsize
        parts[name] = whole.as_strided(shape, stride, start)
    return PackedExperts(
        parts["values"], parts.get("scales"), parts.get("zeros"), matrix.channels, matrix.outputs, matrix.bits,
        matrix.group or matrix.channels,
    )

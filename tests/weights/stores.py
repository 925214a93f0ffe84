"""A store whose memory is too small for all experts, as one would be that reads them from flash."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from edgexpert.kernels import native
from edgexpert.weights.matrix import PackedExperts
from edgexpert.weights.store import ExpertStore

Expert = tuple[int, int]
"""Layer, and number within it."""


class SmallStore:
    """Copies experts into slots that all layers share. What is in no slot may not be read: free slots hold garbage.

    Attributes:
        in_use: how often each expert is in use.
        uses: calls of `use` so far; ``fails`` is raised by the one with the number ``fails_at``.
    """

    watches = True

    def __init__(self, whole: ExpertStore, layers: int, slots: int, delay: float = 0.0) -> None:
        self.in_use: Counter[Expert] = Counter()
        self.uses, self.fails_at, self.fails, self.evictions = 0, -1, Exception(), 0
        self._whole, self._delay, self._random = whole, delay, random.Random(0)
        self._free, self._held = list(range(slots)), dict[Expert, int]()
        self._rows = {name: [_rows(tensor, slots) for tensor in _tensors(matrix)] for name, matrix in whole.experts(0).items()}
        self._experts = [self._in_slots(layer) for layer in range(layers)]
        for slot in self._free:
            self._fill_with_garbage(slot)

    def experts(self, layer: int) -> dict[str, PackedExperts]:
        return self._experts[layer]

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """It waits for `use`."""

    def use(self, layer: int, experts: Sequence[int]) -> None:
        self.uses += 1
        if self.uses - 1 == self.fails_at:
            raise self.fails
        wanted = [(layer, expert) for expert in experts]
        assert len(set(wanted)) == len(wanted), "each expert once"
        for expert in wanted:
            if expert not in self._held:
                if not self._free:
                    self._evict(self._random.choice([e for e in self._held if not self.in_use[e] and e not in wanted]))
                self._load(expert)
        self.in_use.update(wanted)

    def release(self, layer: int, experts: Sequence[int]) -> None:
        for number in experts:
            expert = (layer, number)
            assert self.in_use[expert] > 0, "released once for each use"
            self.in_use[expert] -= 1
            if not self.in_use[expert]:
                del self.in_use[expert]
                if self._random.random() < 0.5:
                    self._evict(expert)

    def _load(self, expert: Expert) -> None:
        if self._delay:
            time.sleep(self._random.random() * self._delay)
        layer, number = expert
        slot = self._held[expert] = self._free.pop(self._random.randrange(len(self._free)))
        for name, matrix in self._whole.experts(layer).items():
            for rows, source in zip(self._rows[name], _tensors(matrix), strict=True):
                rows[slot] = source[number]
        self._place(expert, slot)

    def _evict(self, expert: Expert) -> None:
        assert not self.in_use[expert], "an expert in use stays where it is"
        self.evictions += 1
        slot = self._held.pop(expert)
        self._place(expert, -1)
        self._fill_with_garbage(slot)
        self._free.append(slot)

    def _place(self, expert: Expert, slot: int) -> None:
        layer, number = expert
        for matrix in self._experts[layer].values():
            native.place(matrix, number, slot)

    def _fill_with_garbage(self, slot: int) -> None:
        for tensors in self._rows.values():
            for rows in tensors:
                rows[slot] = torch.nan if rows.is_floating_point() else 85

    def _in_slots(self, layer: int) -> dict[str, PackedExperts]:
        slotted = {}
        for name, m in self._whole.experts(layer).items():
            values, scales, zeros = [*self._rows[name], None, None][:3]
            assert values is not None and (scales is None) == (m.scales is None) and (zeros is None) == (m.zeros is None)
            nowhere = torch.full((m.count,), -1)
            slotted[name] = PackedExperts(values, scales, zeros, m.channels, m.outputs, m.bits, m.group, nowhere)
        return slotted


def _tensors(matrix: PackedExperts) -> list[Tensor]:
    return [tensor for tensor in (matrix.values, matrix.scales, matrix.zeros) if tensor is not None]


def _rows(tensor: Tensor, slots: int) -> Tensor:
    return torch.empty(slots, *tensor.shape[1:], dtype=tensor.dtype)

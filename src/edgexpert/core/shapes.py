"""Sizes of experts and how their weights are stored: from a selection to the bytes that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from edgexpert.core.routing import ChannelSelection

Count = TypeVar("Count", float, NDArray[np.float64])
"""One number, or one for each of many experts."""


@dataclass(frozen=True)
class WeightFormat:
    """How expert weights are stored.

    Attributes:
        value: bytes of one weight; 0.5 for 4 bits.
        group: input channels that share a row of scales; 0 where there are none.
        scale: bytes of one scale, its zero point included.
        padding: a channel's row holds a multiple of this many outputs.
    """

    value: float
    group: int = 0
    scale: float = 0.0
    padding: int = 1

    def read(
        self, outputs: int, channels: Count, groups: Count, value_share: Count | float = 1.0, index_bits: float = 0.0
    ) -> Count:
        """Bytes of ``channels`` input channels of a matrix that touch ``groups`` rows of scales.

        Args:
            value_share, index_bits: as in `Storage`.
        """
        outputs = -(-outputs // self.padding) * self.padding
        return outputs * (channels * (self.value * value_share + index_bits / 8) + groups * self.scale)

    def groups(self, channels: int) -> int:
        """Rows of scales of a whole matrix."""
        return channels // self.group if self.group else 0


@dataclass(frozen=True, eq=False)
class Storage:
    """How a policy keeps the experts of one layer instead of the format that they are hosted in.

    Attributes:
        value: share of its usual value bytes that each expert takes, float64 [E]; scales stay as they are.
        index_bits: bits of index beside every weight, pruned ones included.
    """

    value: Tensor
    index_bits: float = 0.0


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert's two matrices. Gate and up are one matrix with 2I outputs (only up's I where there is no gate)."""

    hidden: int
    intermediate: int
    gate_up_outputs: int
    format: WeightFormat

    @cached_property
    def expert(self) -> float:
        """Bytes of a whole expert."""
        return self._whole(self.hidden, self.gate_up_outputs) + self._whole(self.intermediate, self.hidden)

    def gate_up(self, selection: ChannelSelection | None, experts: int) -> float:
        """Bytes of the selected channels of gate/up; of all channels of ``experts`` experts where nothing is selected."""
        return self._selected(selection, experts, self.hidden, self.gate_up_outputs)

    def down(self, selection: ChannelSelection | None, experts: int) -> float:
        """The same of down."""
        return self._selected(selection, experts, self.intermediate, self.hidden)

    def counted(self, gate_up_channels: int, gate_up_groups: int, down_channels: int, down_groups: int) -> float:
        """Bytes of so many channels of each matrix that touch so many rows of scales."""
        gate_up = self.format.read(self.gate_up_outputs, gate_up_channels, gate_up_groups)
        return gate_up + self.format.read(self.hidden, down_channels, down_groups)

    def stored(self, storage: Storage, experts: Tensor) -> float:
        """Bytes of whole experts, int64 [n], that are stored otherwise."""
        return sum(
            self._whole(self.hidden, self.gate_up_outputs, share, storage.index_bits)
            + self._whole(self.intermediate, self.hidden, share, storage.index_bits)
            for share in storage.value[experts.cpu()].tolist()
        )

    def _whole(self, channels: int, outputs: int, value_share: float = 1.0, index_bits: float = 0.0) -> float:
        return self.format.read(outputs, channels, self.format.groups(channels), value_share, index_bits)

    def _selected(self, selection: ChannelSelection | None, experts: int, channels: int, outputs: int) -> float:
        if selection is None:
            return experts * self._whole(channels, outputs)
        groups = selection.groups(self.format.group) if self.format.group else 0
        return self.format.read(outputs, selection.channels, groups)

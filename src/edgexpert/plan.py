"""The decision as data: which experts, and which input channels of each, one layer loads for one stage.

The runtime executes a `LayerPlan`, the ledger counts its bytes, the simulator costs it. Nothing else decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Count = TypeVar("Count", float, NDArray[np.float64])
"""One number, or one for each of many experts."""


@dataclass(frozen=True, eq=False)
class Scores:
    """A router's opinion of every expert, in the form that all policies see.

    Attributes:
        choice: what the router ranks experts by, float32 [T, E]; -inf where its rules forbid an expert (group limits).
        gate: weight of each expert before renormalisation, float32 [T, E], never negative.
        normalise: whether the weights of a token's experts are divided by their sum.
        scale: factor on the weights after that.
    """

    choice: Tensor
    gate: Tensor
    normalise: bool
    scale: float = 1.0

    def weights(self, experts: Tensor) -> Tensor:
        """Routing weights of chosen experts as the model itself would compute them, [T, k]; 0 where there is no expert.

        Args:
            experts: int64 [T, k]; E or above stands for no expert.
        """
        chosen = experts < self.gate.shape[1]
        weights = self.gate.gather(1, experts.clamp(max=self.gate.shape[1] - 1)) * chosen
        if self.normalise:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        return weights * self.scale


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token computes with.

    Attributes:
        experts: int64 [T, k]; ``num_experts`` stands for no expert.
        weights: [T, k]; 0 where there is no expert.
        complete: known to have no gaps, as every router's own.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    complete: bool = False

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some token lacks some of its k experts."""
        return not self.complete and int(self.experts.max()) >= self.num_experts

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The (token, slot) of every routed expert, sorted by token: two int64 tensors [P]."""
        token, slot = torch.nonzero(self.experts < self.num_experts, as_tuple=True)
        return token, slot

    @cached_property
    def pair_token(self) -> Tensor:
        """Token of each pair, ascending, int64 [P]."""
        if self.has_gaps:
            return self.pairs[0]
        tokens, k = self.experts.shape
        return torch.arange(tokens * k, device=self.experts.device) // k

    @cached_property
    def pair_expert(self) -> Tensor:
        """Expert of each pair, int64 [P]."""
        return self.experts[self.pairs] if self.has_gaps else self.experts.flatten()

    @cached_property
    def pair_weight(self) -> Tensor:
        """Routing weight of each pair, [P]."""
        return self.weights[self.pairs] if self.has_gaps else self.weights.flatten()

    @cached_property
    def count(self) -> int:
        """How many experts are loaded."""
        return self.experts.shape[1] if self.complete and len(self.experts) == 1 else len(self.loaded)

    @cached_property
    def loaded(self) -> Tensor:
        """Experts that some token computes with, ascending, int64 [U]."""
        experts: Tensor = torch.unique(self.pair_expert)
        return experts


@dataclass(frozen=True, eq=False)
class ChannelSelection:
    """Which input channels of one matrix (gate/up, or down) are loaded, and which of them a token computes on.

    Attributes:
        loaded: bool [E, C]; rows of experts that are not routed are False.
        compute: bool [P, C], for each pair of the routing; None where every pair computes on all that its expert loads.
    """

    loaded: Tensor
    compute: Tensor | None

    @cached_property
    def channels(self) -> int:
        """Loaded channels of all experts."""
        return int(self.loaded.sum())

    def groups(self, size: int) -> int:
        """Groups of ``size`` channels that hold a loaded one: each needs its row of scales. Counted once."""
        known: dict[int, int] = vars(self).setdefault("_groups", {})
        if size not in known:
            known[size] = int(self.loaded.view(len(self.loaded), -1, size).any(2).sum())
        return known[size]


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


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The whole decision of one MoE layer for one stage. ``None`` for a matrix means all of its channels.

    Attributes:
        storage: how the experts are kept, if not as hosted; such a plan selects no channels.
    """

    layer: int
    routing: Routing
    gate_up: ChannelSelection | None = None
    down: ChannelSelection | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        assert self.storage is None or (self.gate_up is None and self.down is None), "stored otherwise, loaded whole"

    def bytes(self, shape: ExpertShape) -> float:
        """Expert weight bytes that this plan loads, each expert once."""
        if self.storage is not None:
            return shape.stored(self.storage, self.routing.loaded)
        experts = self.routing.count
        return shape.gate_up(self.gate_up, experts) + shape.down(self.down, experts)

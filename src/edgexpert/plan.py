"""The decision as data: which experts, and which input channels of each, one layer loads for one stage.

The runtime executes a `LayerPlan`, the ledger counts its bytes, the simulator costs it. Nothing else decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
    """

    experts: Tensor
    weights: Tensor
    num_experts: int

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The (token, slot) of every routed expert, sorted by token: two int64 tensors [P]."""
        token, slot = torch.nonzero(self.experts < self.num_experts, as_tuple=True)
        return token, slot

    @cached_property
    def pair_expert(self) -> Tensor:
        """Expert of each pair, int64 [P]."""
        return self.experts[self.pairs]

    @cached_property
    def pair_weight(self) -> Tensor:
        """Routing weight of each pair, [P]."""
        return self.weights[self.pairs]

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


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert's two matrices. Gate and up are one matrix with 2I outputs (only up's I where there is no gate).

    Attributes:
        bytes_per_value: stored size of one weight in bytes, scales included; may be a fraction.
    """

    hidden: int
    intermediate: int
    gate_up_outputs: int
    bytes_per_value: float

    @property
    def gate_up_channel(self) -> float:
        """Bytes of one input channel of gate/up."""
        return self.gate_up_outputs * self.bytes_per_value

    @property
    def down_channel(self) -> float:
        """Bytes of one input channel of down."""
        return self.hidden * self.bytes_per_value

    @property
    def expert(self) -> float:
        """Bytes of a whole expert."""
        return self.hidden * self.gate_up_channel + self.intermediate * self.down_channel


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """The whole decision of one MoE layer for one stage. ``None`` for a matrix means all of its channels."""

    layer: int
    routing: Routing
    gate_up: ChannelSelection | None = None
    down: ChannelSelection | None = None

    def bytes(self, shape: ExpertShape) -> float:
        """Expert weight bytes that this plan loads, each expert once."""
        experts = len(self.routing.loaded)
        gate_up = int(self.gate_up.loaded.sum()) if self.gate_up else experts * shape.hidden
        down = int(self.down.loaded.sum()) if self.down else experts * shape.intermediate
        return gate_up * shape.gate_up_channel + down * shape.down_channel

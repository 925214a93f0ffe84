"""What the simulator is driven by: the plans of every stage, counted per layer and expert.

A `LayerPlan` of one verify stage of a large model holds masks of a megabyte; a `PlannedLayer` holds what the chip's program
depends on in a few kilobytes, and loses nothing that costs time or energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from edgexpert.plan import ChannelSelection, LayerPlan, Routing
from edgexpert.stage import Stage

Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlannedMatrix:
    """The selected input channels of one matrix (gate/up, or down) of every loaded expert.

    Attributes:
        total: channels that the matrix has, C.
        packed: which of them are loaded, a bit each, the first channel in the lowest bit, uint8 [U, ceil(C / 8)].
        computed: channels that an expert's tokens compute on, summed over its tokens, [U].
    """

    total: int
    packed: NDArray[np.uint8]
    computed: Counts

    @classmethod
    def of(cls, selection: ChannelSelection, routing: Routing) -> PlannedMatrix:
        loaded = selection.loaded[routing.loaded]  # [U, C]
        if selection.compute is None:
            per_pair = selection.loaded.sum(1)[routing.pair_expert]
        else:
            per_pair = selection.compute.sum(1)
        computed = torch.zeros(routing.num_experts, dtype=torch.long, device=per_pair.device)
        computed.index_add_(0, routing.pair_expert, per_pair)
        packed = np.packbits(loaded.cpu().numpy(), axis=1, bitorder="little")
        return cls(loaded.shape[1], packed, computed[routing.loaded].cpu().numpy())

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which channels are loaded, [U, C]."""
        return np.unpackbits(self.packed, axis=1, count=self.total, bitorder="little").astype(bool)

    @cached_property
    def channels(self) -> Counts:
        """Loaded channels of each expert, [U]."""
        return np.bitwise_count(self.packed).sum(1, dtype=np.int64)

    def touched(self, group: int) -> NDArray[np.bool_]:
        """Which groups of ``group`` neighbouring channels have a loaded one, [U, C / group]."""
        return self.mask.reshape(len(self.packed), -1, group).any(2)


@dataclass(frozen=True, eq=False)
class PlannedLayer:
    """What one MoE layer loads and computes in one stage, for each loaded expert. None for a matrix: all of its channels.

    Attributes:
        experts: ids of the loaded experts, ascending, [U].
        rows: tokens routed to each, [U].
        depths: distinct depths among those tokens, [U].
    """

    layer: int
    experts: Counts
    rows: Counts
    depths: Counts
    gate_up: PlannedMatrix | None = None
    down: PlannedMatrix | None = None

    @classmethod
    def of(cls, plan: LayerPlan, stage: Stage) -> PlannedLayer:
        routing = plan.routing
        experts = routing.loaded.cpu().numpy()
        pair_expert = routing.pair_expert.cpu().numpy()
        pair_depth = stage.depth.numpy()[routing.pairs[0].cpu().numpy()]
        of_a_depth = np.unique(pair_expert * (pair_depth.max(initial=0) + 1) + pair_depth) // (pair_depth.max(initial=0) + 1)
        count = routing.num_experts
        return cls(
            plan.layer, experts,
            rows=np.bincount(pair_expert, minlength=count)[experts],
            depths=np.bincount(of_a_depth, minlength=count)[experts],
            gate_up=plan.gate_up and PlannedMatrix.of(plan.gate_up, routing),
            down=plan.down and PlannedMatrix.of(plan.down, routing),
        )


@dataclass(frozen=True, eq=False)
class PlannedStage:
    """One pass through the target with its decisions.

    Attributes:
        plans: one for each MoE layer, in order.
        emitted: tokens that the stage gave: 1 for prefill, accepted candidates + 1 for verify.
        draft_steps: passes through the draft before the stage; 0 without a draft that has weights.
    """

    stage: Stage
    plans: Sequence[LayerPlan] | Sequence[PlannedLayer]
    emitted: int
    draft_steps: int = 0

    def layers(self) -> list[PlannedLayer]:
        """The plans, counted."""
        return [plan if isinstance(plan, PlannedLayer) else PlannedLayer.of(plan, self.stage) for plan in self.plans]

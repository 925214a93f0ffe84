"""What the simulator is driven by: the plans of every stage, counted per layer and expert.

A `LayerPlan` of one verify stage of a large model holds masks of a megabyte; a `PlannedLayer` holds what the chip's program
depends on in a few kilobytes, and loses nothing that costs time or energy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor

import numpy as np
import torch
from numpy.typing import NDArray

from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.simulator.shapes import ModelShape

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
        compute = selection.compute  # None: every token of an expert computes on all that is loaded
        per_pair = selection.loaded.sum(1)[routing.pair_expert] if compute is None else compute.sum(1)
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
        return np.asarray(self.mask.reshape(len(self.packed), -1, group).any(2))


@dataclass(frozen=True, eq=False)
class PlannedLayer:
    """What one MoE layer loads and computes in one stage, for each loaded expert. None for a matrix: all of its channels.

    Attributes:
        experts: ids of the loaded experts, ascending, [U].
        rows: tokens routed to each, [U].
        depths: distinct depths among those tokens, [U].
        value_share, index_bits: how each expert is stored, [U] and for all, as in `Storage`; None for the device's format.
    """

    layer: int
    experts: Counts
    rows: Counts
    depths: Counts
    gate_up: PlannedMatrix | None = None
    down: PlannedMatrix | None = None
    value_share: NDArray[np.float64] | None = None
    index_bits: float = 0.0

    @classmethod
    def of(cls, plan: LayerPlan, stage: Stage) -> PlannedLayer:
        routing = plan.routing
        experts = routing.loaded.cpu().numpy()
        pair_expert = routing.pair_expert.cpu().numpy()
        pair_depth = stage.depth.numpy()[routing.pairs[0].cpu().numpy()]
        count, depths, storage = routing.num_experts, int(pair_depth.max(initial=0)) + 1, plan.storage
        of_a_depth = np.unique(pair_expert * depths + pair_depth) // depths
        return cls(
            plan.layer, experts,
            rows=np.bincount(pair_expert, minlength=count)[experts],
            depths=np.bincount(of_a_depth, minlength=count)[experts],
            gate_up=PlannedMatrix.of(plan.gate_up, routing) if plan.gate_up else None,
            down=PlannedMatrix.of(plan.down, routing) if plan.down else None,
            value_share=storage.value.numpy()[experts] if storage else None,
            index_bits=storage.index_bits if storage else 0.0,
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

    @cached_property
    def layers(self) -> list[PlannedLayer]:
        """The plans, counted."""
        return [plan if isinstance(plan, PlannedLayer) else PlannedLayer.of(plan, self.stage) for plan in self.plans]


def dense_decode(
    model: ModelShape, *, stages: int = 1, candidates: int = 0, experts: float | None = None, prefix: int = 512,
    acceptance_length: float = 1.0, draft_steps: int = 0,
) -> Iterator[PlannedStage]:
    """Synthetic decoding in which every token routes to top-k experts and all of an expert is loaded.

    Args:
        candidates: drafted tokens of each stage, spread evenly over six depths; 0 for plain decoding.
        experts: distinct experts that a layer loads, on average over layers; top-k unless given.
        acceptance_length: tokens that a stage gives, on average over stages.
    """
    tree = _even_tree(candidates, depth=6)
    experts = model.top_k if experts is None else experts
    for number in range(stages):
        emitted = _share(acceptance_length, number)
        yield PlannedStage(Stage.verify(tree, prefix), _dense_layers(model, len(tree), experts), emitted, draft_steps)


def dense_prefill(model: ModelShape, tokens: int, experts: float | None = None) -> PlannedStage:
    """A synthetic prompt that loads ``experts`` whole experts in every layer; all of them unless given."""
    experts = model.experts if experts is None else experts
    return PlannedStage(Stage.prefill(torch.zeros(tokens, dtype=torch.long)), _dense_layers(model, tokens, experts), 1)


def _dense_layers(model: ModelShape, tokens: int, experts: float) -> list[PlannedLayer]:
    return [_dense_layer(model, layer, tokens, _share(experts, number)) for number, layer in enumerate(model.moe_layers)]


def _dense_layer(model: ModelShape, layer: int, tokens: int, experts: int) -> PlannedLayer:
    """Tokens spread evenly over the experts."""
    if not min(model.top_k, tokens * model.top_k) <= experts <= min(model.experts, tokens * model.top_k):
        raise UserError(f"a stage of {tokens} tokens with {model.top_k} experts each cannot load {experts} distinct ones "
                        f"of {model.experts} in a layer; give another number of experts or candidates")
    rows = np.full(experts, tokens * model.top_k // experts)
    rows[: tokens * model.top_k % experts] += 1
    return PlannedLayer(layer, np.arange(experts), rows, depths=np.minimum(rows, 7 if tokens > 1 else 1))


def _share(mean: float, number: int) -> int:
    """Whole numbers whose mean is ``mean``: the one at place ``number``."""
    return floor(mean * (number + 1) + 1e-9) - floor(mean * number + 1e-9)


def _even_tree(candidates: int, depth: int) -> TokenTree:
    """As many candidates at every depth as at any other, give or take one; each below the first of the depth before."""
    parents, above = [-1], 0
    for level in range(depth):
        here = candidates // depth + (level < candidates % depth)
        parents += [above] * here
        above = len(parents) - here if here else above
    count = len(parents)
    return TokenTree(torch.zeros(count, dtype=torch.long), torch.tensor(parents), torch.zeros(count))

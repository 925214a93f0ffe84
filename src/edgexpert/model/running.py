"""What is going through a hosted model, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.shapes import ExpertShape
from edgexpert.core.stage import Stage
from edgexpert.core.traffic import Part
from edgexpert.kernels.layers import Decisions, Observation, StageRule
from edgexpert.model.blocks import MoeBlock
from edgexpert.model.recorder import LayerRecord, Recorder
from edgexpert.policy import Policy


@dataclass(eq=False)
class StageChoices:
    """What some or all MoE layers chose for a stage, in native calls. Plans are made of it when somebody reads them.

    Attributes:
        layers: numbers of the layers.
        experts, weights: what the router gave each token, int64 and float32 [layers, T, k].
        loaded: how many experts each layer loaded.
        decided: what the policy made of it; None where it left the stage to the router.
        observed: what went through the layers; None where nobody watches.
    """

    layers: Sequence[int]
    experts: Tensor
    weights: Tensor
    num_experts: int
    loaded: list[int] = field(default_factory=list)
    decided: Decisions | None = None
    observed: Observation | None = None

    @classmethod
    def empty(
        cls, blocks: Sequence[MoeBlock], size: tuple[int, int, int], rule: StageRule | None, observes: bool
    ) -> StageChoices:
        """To be filled in by native calls; ``size`` is the number of layers, T and k."""
        shape, count = blocks[0].shape, blocks[0].num_experts
        channels = shape.hidden, shape.intermediate
        return cls(
            [block.layer for block in blocks], torch.empty(size, dtype=torch.int64), torch.empty(size), count,
            decided=None if rule is None else Decisions.empty(rule, size, count, channels),
            observed=Observation.empty(size, count, channels) if observes else None,
        )

    def records(self, stage: Stage, blocks: Sequence[MoeBlock]) -> Iterator[LayerRecord]:
        """What a recorder is told of each layer."""
        assert self.observed is not None
        for i, (block, plan, exact) in enumerate(zip(blocks, self.plans, self.exact, strict=True)):
            assert block.form is not None, "native layers have routers of known forms"
            inputs = self.observed.down_inputs[i, : len(plan.routing.pair_expert)]
            scores = block.form.scores(self.observed.logits[i])
            yield LayerRecord(stage, plan, exact, scores, self.observed.inputs[i], lambda inputs=inputs: inputs)  # type: ignore[misc]

    def bytes(self, shapes: Sequence[ExpertShape]) -> float:
        """Expert weight bytes that were loaded; the sizes of each layer's experts are given."""
        if self.decided is None:
            return sum(count * shape.expert for count, shape in zip(self.loaded, shapes, strict=True))
        return sum(shape.counted(*read) for read, shape in zip(self.decided.read.tolist(), shapes, strict=True))

    @cached_property
    def exact(self) -> list[Routing]:
        """The router's own routing of each layer."""
        pairs = zip(self.experts, self.weights, strict=True)
        return [Routing(experts, weights, self.num_experts, complete=True) for experts, weights in pairs]

    @cached_property
    def plans(self) -> list[LayerPlan]:
        """The plan of each layer."""
        return [self._plan(i, layer) for i, layer in enumerate(self.layers)]

    def _plan(self, i: int, layer: int) -> LayerPlan:
        decided, routing = self.decided, self.exact[i]
        if decided is None:
            return LayerPlan(layer, routing)
        if not torch.equal(decided.experts[i], routing.experts):
            routing = Routing(decided.experts[i], decided.weights[i], self.num_experts)
        return LayerPlan(
            layer, routing, _selection(decided.gate_up, decided.gate_up_compute, i, routing),
            _selection(decided.down, decided.down_compute, i, routing),
        )


def _selection(loaded: Tensor | None, compute: Tensor | None, i: int, routing: Routing) -> ChannelSelection | None:
    if loaded is None:
        return None
    return ChannelSelection(loaded[i], None if compute is None else compute[i, : len(routing.pair_expert)])


@dataclass(eq=False)
class Pass:
    """What is going through the model right now: one stage, or one for each sequence of a batch, in their order.

    Attributes:
        policy: decides all of them.
        recorder: is told of every layer; None for nobody.
        rule: what the policy does to the one stage, for native calls; None where it leaves it to the router, or has none.
        choices: of all layers, where they ran in one piece; else each layer adds to the attributes below.
        plans: the decision of each MoE layer, by layer.
        exact: the routing that the router alone gives.
    """

    stages: list[Stage]
    policy: Policy
    recorder: Recorder | None = None
    rule: StageRule | None = None
    choices: StageChoices | None = None
    plans: dict[int, LayerPlan] = field(default_factory=dict)
    exact: dict[int, Routing] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)
    routings: dict[int, Routing] = field(default_factory=dict)
    fused: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    expert_bytes: float = 0.0

    @cached_property
    def acts(self) -> bool:
        """Whether the policy decides some of the stages; else all are the router's own business."""
        return any(self.policy.acts_on(stage) for stage in self.stages)

    @property
    def is_native(self) -> bool:
        """Whether native calls can do all that the policy does."""
        return len(self.stages) == 1 and (self.rule is not None or not self.acts)


@dataclass(eq=False)
class StageOutput:
    """What one stage gave.

    Attributes:
        logits: float [T, V]; of a prefill stage only the last token's, [1, V].
        features: inputs of the fused layers, concatenated, [T, n * H]; None when none were asked for.
        traffic: bytes that the stage read and wrote, by what they were for.
    """

    logits: Tensor
    features: Tensor | None
    traffic: dict[Part, float]
    finished: Pass

    @property
    def plans(self) -> list[LayerPlan]:
        """The decision of every MoE layer, by layer."""
        choices = self.finished.choices
        return list(self.finished.plans.values()) if choices is None else choices.plans

    @property
    def exact(self) -> list[Routing]:
        """The routing that the router alone gives, of every MoE layer."""
        choices = self.finished.choices
        return list(self.finished.exact.values()) if choices is None else choices.exact

    @property
    def experts_loaded(self) -> int:
        """Experts that the MoE layers loaded, all together."""
        choices = self.finished.choices
        return sum(plan.routing.count for plan in self.plans) if choices is None else sum(choices.loaded)

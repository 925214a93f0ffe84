"""What is going through a hosted model, and what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from edgexpert.plan import LayerPlan, Routing, Scores
from edgexpert.stage import Stage


@dataclass(frozen=True, eq=False)
class RouterChoices:
    """What the routers of all MoE layers chose for a stage that ran in one piece.

    Attributes:
        layers: numbers of the layers.
        experts, weights: of each token, int64 and float32 [layers, T, k].
        loaded: how many experts each layer loaded.
    """

    layers: Sequence[int]
    experts: Tensor
    weights: Tensor
    num_experts: int
    loaded: list[int]


@dataclass(eq=False)
class Pass:
    """What is going through the model right now: one stage, or one for each sequence of a batch, in their order.

    Attributes:
        choices: of all layers, where they ran in one piece; else each layer adds to the attributes below.
        plans: the decision of each MoE layer, by layer.
        exact: the routing that the router alone gives.
    """

    stages: list[Stage]
    choices: RouterChoices | None = None
    plans: dict[int, LayerPlan] = field(default_factory=dict)
    exact: dict[int, Routing] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)
    routings: dict[int, Routing] = field(default_factory=dict)
    fused: dict[int, Tensor] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    expert_bytes: float = 0.0


@dataclass(eq=False)
class StageOutput:
    """What one stage gave.

    Attributes:
        logits: float [T, V]; of a prefill stage only the last token's, [1, V].
        features: inputs of the fused layers, concatenated, [T, n * H]; None when none were asked for.
    """

    logits: Tensor
    features: Tensor | None
    finished: Pass

    @cached_property
    def plans(self) -> list[LayerPlan]:
        """The decision of every MoE layer, by layer."""
        choices = self.finished.choices
        if choices is None:
            return list(self.finished.plans.values())
        return [LayerPlan(layer, routing) for layer, routing in zip(choices.layers, self.exact, strict=True)]

    @cached_property
    def exact(self) -> list[Routing]:
        """The routing that the router alone gives, of every MoE layer."""
        choices = self.finished.choices
        if choices is None:
            return list(self.finished.exact.values())
        pairs = zip(choices.experts, choices.weights, strict=True)
        return [Routing(experts, weights, choices.num_experts, complete=True) for experts, weights in pairs]

    @property
    def experts_loaded(self) -> int:
        """Experts that the MoE layers loaded, all together."""
        choices = self.finished.choices
        return sum(plan.routing.count for plan in self.plans) if choices is None else sum(choices.loaded)

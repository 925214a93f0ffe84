"""What an observer of a hosted model gets to see: every finished MoE layer, and every finished stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """One MoE layer of the running stage.

    Attributes:
        plan: what was decided and executed.
        exact: the router's own routing.
        scores: the router's scores; None where its form is not known.
        inputs: what goes into gate/up, for each token, [T, H].
        down_inputs: gives what goes into down, for each pair of the plan's routing, [P, I]. Where the library's own
            implementation ran, they are computed anew.
    """

    stage: Stage
    plan: LayerPlan
    exact: Routing
    scores: Scores | None
    inputs: Tensor
    down_inputs: Callable[[], Tensor]


class Recorder(Protocol):
    """Told of every layer as it finishes, then of the stage."""

    def layer(self, record: LayerRecord) -> None:
        """An MoE layer has finished."""

    def stage(self, stage: Stage, path: Sequence[int], emitted: int, draft_steps: int) -> None:
        """A stage has finished.

        Args:
            path: nodes of the tree that were accepted, the root first; empty for a prefill stage.
            emitted: tokens that it gave.
            draft_steps: passes through the draft's weights that made its tree.
        """

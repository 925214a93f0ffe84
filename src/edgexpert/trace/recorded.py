"""A recorded stage: what ran, what the routers said, and what went into the experts' matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage


class ChannelInputs(Protocol):
    """Magnitudes of what goes into the experts' matrices, for the pairs of any routing."""

    def gate_up(self, routing: Routing) -> Tensor:
        """Of gate/up, float32 [P, H]."""

    def down(self, routing: Routing) -> Tensor:
        """Of down, float32 [P, I]."""


@dataclass(frozen=True, eq=False)
class RecordedChannels:
    """Channel inputs of a layer of a run.

    Attributes:
        input: |input| of gate/up, one for all experts of a token, [T, H].
        ran: the routing that ran, int64 [T, k].
        down_input: |input| of down for each pair of it, [P, I].
    """

    input: Tensor
    ran: Tensor
    down_input: Tensor

    def gate_up(self, routing: Routing) -> Tensor:
        return self.input[routing.pairs[0]]

    def down(self, routing: Routing) -> Tensor:
        """Raises UserError for a pair that never ran: its input of down does not exist."""
        ran = Routing(self.ran, torch.ones_like(self.ran), routing.num_experts)
        pair = torch.full((len(self.ran), routing.num_experts), -1)
        pair[ran.pairs[0], ran.pair_expert] = torch.arange(len(ran.pair_expert))
        found = pair[routing.pairs[0], routing.pair_expert]
        if bool((found < 0).any()):
            raise UserError("the policy sends a token to an expert that did not compute it in the recorded run, so the trace "
                            "lacks the inputs of its down matrix; record the run under that `policy`")
        return self.down_input[found]


@dataclass(frozen=True, eq=False)
class RecordedLayer:
    """One MoE layer of a recorded stage; without channels where none were recorded."""

    layer: int
    exact: Routing
    scores: Scores
    channels: ChannelInputs | None


@dataclass(frozen=True, eq=False)
class RecordedStage:
    """One stage of a trace.

    Attributes:
        text: number of the prompt that it belongs to.
        accepted: nodes of the tree that were accepted, the root first; empty for a prefill stage.
    """

    index: int
    text: int
    stage: Stage
    accepted: list[int]
    emitted: int
    draft_steps: int
    layers: list[RecordedLayer]

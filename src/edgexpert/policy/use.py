"""How a run used the experts: what policies that prepare weights decide by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgexpert.core.routing import Routing


@dataclass(frozen=True, eq=False)
class ExpertUse:
    """How much each expert was used in the MoE layers of a run.

    Attributes:
        loads: stages that loaded it, float64 [L, E].
        weight: sum of the routing weights of its tokens, float64 [L, E].
    """

    loads: Tensor
    weight: Tensor

    def add(self, row: int, routing: Routing) -> None:
        """Counts one stage of the layer in ``row``."""
        self.loads[row, routing.loaded.cpu()] += 1
        self.weight[row].index_add_(0, routing.pair_expert.cpu(), routing.pair_weight.double().cpu())

"""The decision as data: which experts, and which input channels of each, one layer loads for one stage.

The runtime executes a `LayerPlan`, the ledger counts its bytes, the simulator costs it. Nothing else decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.core.shapes import ExpertShape, Storage


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

"""The bytes of a plan where weights are stored in groups of channels that share a row of scales."""

from __future__ import annotations

import pytest
import torch

from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.core.shapes import ExpertShape, WeightFormat

FOUR_BITS = WeightFormat(value=0.5, group=32, scale=2)
SHAPE = ExpertShape(hidden=2048, intermediate=768, gate_up_outputs=2 * 768, format=FOUR_BITS)
ROUTING = Routing(torch.tensor([[0]]), torch.ones(1, 1), num_experts=1)


def test_a_whole_expert_of_four_bits_in_groups_of_32_takes_four_and_a_half_bits_a_weight() -> None:
    assert SHAPE.expert == 3 * 2048 * 768 * 4.5 / 8
    assert LayerPlan(0, ROUTING).bytes(SHAPE) == SHAPE.expert


@pytest.mark.parametrize(("keep", "share"), [(1.0, 1.0), (0.5, 0.556), (0.25, 0.333)])
def test_scales_of_touched_groups_are_read_whole(keep: float, share: float) -> None:
    kept = torch.rand(2048, generator=torch.Generator().manual_seed(0)).argsort() < keep * 2048
    nothing = ChannelSelection(torch.zeros(1, 768, dtype=torch.bool), None)
    read = LayerPlan(0, ROUTING, ChannelSelection(kept[None], None), nothing).bytes(SHAPE)
    assert read / SHAPE.gate_up(None, 1) == pytest.approx(share, abs=0.001)


def test_a_group_without_a_loaded_channel_costs_nothing() -> None:
    loaded = torch.zeros(1, 2048, dtype=torch.bool)
    loaded[0, 40] = True
    assert SHAPE.gate_up(ChannelSelection(loaded, None), 1) == 2 * 768 * (0.5 + 2)

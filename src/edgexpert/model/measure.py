"""How calibration text uses a model's experts, for policies that prepare weights by it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import torch

from edgexpert.core.stage import Stage
from edgexpert.model.host import HostedModel
from edgexpert.model.recorder import LayerRecord
from edgexpert.model.storage import ExpertStatistics
from edgexpert.policy.use import ExpertUse


def calibration_text() -> list[str]:
    """Short texts that come with the package."""
    return files("edgexpert.model").joinpath("calibration.txt").read_text(encoding="utf-8").strip().split("\n\n")


def measure_experts(host: HostedModel, texts: Sequence[Sequence[int]]) -> ExpertStatistics:
    """Statistics of texts (token ids) that run through the model under the exact policy."""
    sums = _Sums([(block.num_experts, block.shape.hidden, block.shape.intermediate) for block in host.blocks],
                 [block.layer for block in host.blocks])
    for ids in texts:
        ids = ids[: host.max_context]
        host.run(Stage.prefill(torch.tensor(ids)), host.new_cache(len(ids)), recorder=sums)
    return ExpertStatistics(sums.use, [s.sqrt() for s in sums.gate_up], [s.sqrt() for s in sums.down])


class _Sums:
    """Adds up what `ExpertStatistics` holds, as a `Recorder`."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]], layers: Sequence[int]) -> None:
        self._index = {layer: i for i, layer in enumerate(layers)}
        self.use = ExpertUse(*torch.zeros(2, len(sizes), sizes[0][0], dtype=torch.float64))
        self.gate_up = [torch.zeros(experts, hidden) for experts, hidden, _ in sizes]
        self.down = [torch.zeros(experts, intermediate) for experts, _, intermediate in sizes]

    def layer(self, record: LayerRecord) -> None:
        routing, i = record.plan.routing, self._index[record.plan.layer]
        expert, weight = routing.pair_expert.cpu(), routing.pair_weight.float().cpu()
        self.use.add(i, routing)
        for total, inputs in ((self.gate_up[i], record.inputs[routing.pairs[0]]), (self.down[i], record.down_inputs())):
            total.index_add_(0, expert, (weight[:, None] * inputs.float().cpu()) ** 2)

    def stage(self, stage: Stage, path: Sequence[int], emitted: int, draft_steps: int) -> None:
        """Nothing to add up."""

"""Policies that prepare the experts' weights once, from their use on sample text: MoE-Pruner and EdgeMoE.

The prepared weights stand in for the hosted ones, which are kept and come back with the next policy: memory for the experts
doubles meanwhile. They are computed with in the model's own dtype; only the ledger counts the smaller form. It counts shares
of the hosted format, so that policies compare at one base precision, whatever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgexpert.core.shapes import Storage
from edgexpert.core.stage import Stage
from edgexpert.core.traffic import Ledger
from edgexpert.kernels.experts import ExpertWeights
from edgexpert.model.blocks import MoeBlock
from edgexpert.model.recorder import LayerRecord
from edgexpert.policy import Policy
from edgexpert.policy.baselines import HIGH_BITS, LOW_BITS, ExpertUse, fake_quantised, kept_weights

if TYPE_CHECKING:
    from edgexpert.model.host import HostedModel


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """How sample text used the experts.

    Attributes:
        gate_up_norm: for each MoE layer, the L2 norm over tokens of routing weight x input of gate/up, float32 [E, H].
        down_norm: the same of down, [E, I].
    """

    use: ExpertUse
    gate_up_norm: list[Tensor]
    down_norm: list[Tensor]


def calibration_text() -> list[str]:
    """Short texts for measuring how experts are used."""
    return files("edgexpert.model").joinpath("calibration.txt").read_text(encoding="utf-8").strip().split("\n\n")


def measure_experts(host: HostedModel, texts: Sequence[Sequence[int]]) -> ExpertStatistics:
    """Statistics of texts (token ids) that run through the model under the exact policy; the host's policy comes back after."""
    sums = _Sums([(block.num_experts, block.shape.hidden, block.shape.intermediate) for block in host.blocks],
                 [block.layer for block in host.blocks])
    policy, ledger, recorder = host.policy, host.ledger, host.recorder
    host.set_policy(Policy())
    host.ledger, host.recorder = Ledger(), sums
    try:
        for ids in texts:
            ids = ids[: host.max_context]
            host.run(Stage.prefill(torch.tensor(ids)), host.new_cache(len(ids)))
    finally:
        host.ledger, host.recorder = ledger, recorder
        host.set_policy(policy)
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


@torch.no_grad()
def store_experts(blocks: Sequence[MoeBlock], policy: Policy, statistics: ExpertStatistics | None) -> dict[int, Storage]:
    """Prepares every block's weights as the policy keeps them; {} for a policy that keeps them as they are."""
    storages = policy.storages(statistics.use) if statistics is not None else None
    if storages is None or statistics is None:
        return {}
    for block, storage, *norms in zip(blocks, storages, statistics.gate_up_norm, statistics.down_norm, strict=True):
        block.lend_copies()
        weights = block.weights()
        assert isinstance(weights, ExpertWeights), "packed weights stay as they are"
        for matrix, norm in zip((weights.gate_up, weights.down), norms, strict=True):
            for expert in range(len(matrix)):
                weight = matrix[expert]  # [C, out], a view that is written in place
                if policy.weight_sparsity:
                    weight *= kept_weights(weight, norm[expert].to(weight.device), policy.weight_sparsity)
                else:
                    weight.copy_(fake_quantised(weight, LOW_BITS if storage.value[expert] < 1 else HIGH_BITS))
    return {block.layer: storage for block, storage in zip(blocks, storages, strict=True)}

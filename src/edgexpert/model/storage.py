"""Policies that prepare the experts' weights once, from their use on calibration text, as MoE-Pruner and EdgeMoE do.

The prepared weights stand in for the hosted ones, which are kept and come back with the next policy: memory for the experts
doubles meanwhile. They are computed with in the model's own dtype; only the ledger counts the smaller form. It counts shares
of the hosted format, so that policies compare at one base precision, whatever that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgexpert.core.shapes import Storage
from edgexpert.kernels.experts import ExpertWeights
from edgexpert.model.blocks import MoeBlock
from edgexpert.policy import Policy
from edgexpert.policy.use import ExpertUse


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """How calibration text used the experts.

    Attributes:
        gate_up_norm: for each MoE layer, the L2 norm over tokens of routing weight x input of gate/up, float32 [E, H].
        down_norm: the same of down, [E, I].
    """

    use: ExpertUse
    gate_up_norm: list[Tensor]
    down_norm: list[Tensor]


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
                weight.copy_(policy.prepared(weight, norm[expert].to(weight.device), float(storage.value[expert])))
    return {block.layer: storage for block, storage in zip(blocks, storages, strict=True)}

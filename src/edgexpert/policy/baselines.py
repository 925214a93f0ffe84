"""Two policies of other work that decide before inference and load experts whole: MoE-Pruner and EdgeMoE (section V-A, Table II).

MoE-Pruner (arXiv 2410.12013) zeroes single weights. EdgeMoE (arXiv 2308.14352) keeps unimportant experts at 2 bits and the
others at 4. Both are measured on calibration text under the exact policy, and neither is fine-tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.shapes import Storage
from edgexpert.policy.hyperparameters import Hyperparameters
from edgexpert.policy.protocol import Policy
from edgexpert.policy.use import ExpertUse

LOW_BITS, HIGH_BITS = 2, 4
GROUP = 32  # input channels that share a scale and a zero point
BITMAP_BITS = 1.0  # unstructured zeros need an index: one bit says whether a weight is there


@dataclass(frozen=True)
class MoePruner(Policy):
    """Attributes:
        weight_sparsity: share of the expert weights that are zeroed.
    """

    weight_sparsity: float = 0.5
    name: str = "moe-pruner"

    def resolved(
        self, *, model_type: str, num_experts: int, top_k: int, calibrated: Hyperparameters | None = None
    ) -> Self:
        if not 0 < self.weight_sparsity < 1:
            raise UserError(f"`weight_sparsity` ({self.weight_sparsity}) must be above 0 and below 1")
        return self

    def storages(self, use: ExpertUse) -> list[Storage]:
        kept = torch.full_like(use.weight, 1 - self.weight_sparsity)  # float64 [L, E]
        return [Storage(row, BITMAP_BITS) for row in kept]

    def prepared(self, weight: Tensor, input_norm: Tensor, value_share: float) -> Tensor:
        return weight * kept_weights(weight, input_norm, self.weight_sparsity)

    def approximations(self) -> list[str]:
        return [f"static weight pruning: {self.weight_sparsity} of each expert's weights are zero, by |weight| x norm of the "
                "router-weighted inputs on calibration text; the others are loaded with a bitmap"]


@dataclass(frozen=True)
class EdgeMoe(Policy):
    """Attributes:
        low_bit_saving: share of the experts' value bytes that mixed precision saves. The paper gives 30-35 %: 35 % of the value
            bytes are 31 % of all where 4-bit weights have a scale of 16 bits for each 32.
    """

    low_bit_saving: float = 0.35
    name: str = "edgemoe"

    def resolved(
        self, *, model_type: str, num_experts: int, top_k: int, calibrated: Hyperparameters | None = None
    ) -> Self:
        most = 1 - LOW_BITS / HIGH_BITS
        if not 0 < self.low_bit_saving <= most:
            raise UserError(f"`low_bit_saving` ({self.low_bit_saving}) must be above 0 and at most {most}: what {LOW_BITS} bits "
                            f"save against {HIGH_BITS}")
        return self

    def storages(self, use: ExpertUse) -> list[Storage]:
        return [Storage(1 - low.double() * (1 - LOW_BITS / HIGH_BITS)) for low in low_bit_experts(use, self.low_bit_saving)]

    def prepared(self, weight: Tensor, input_norm: Tensor, value_share: float) -> Tensor:
        return fake_quantised(weight, LOW_BITS if value_share < 1 else HIGH_BITS)

    def approximations(self) -> list[str]:
        return [f"mixed precision: the least important experts keep {LOW_BITS} bits and the others {HIGH_BITS}, to save "
                f"{self.low_bit_saving} of the value bytes on calibration text"]


def kept_weights(weight: Tensor, input_norm: Tensor, sparsity: float) -> Tensor:
    """MoE-Pruner's mask: of every output neuron, the weights with the smallest |W| x norm go.

    Args:
        weight: one matrix of one expert, channel-major, [C, out].
        input_norm: for each input channel, the L2 norm over tokens of input x routing weight, [C].
        sparsity: share of the weights that go.

    Returns:
        bool [C, out].
    """
    score = weight.float().abs() * input_norm.float().clamp(min=1e-20)[:, None]  # an expert nobody used: by |W| alone
    gone = score.t().contiguous().topk(round(sparsity * len(weight)), largest=False, sorted=False).indices  # [out, gone]
    mask: Tensor = torch.ones_like(weight, dtype=torch.bool).scatter_(0, gone.t(), False)
    return mask


def fake_quantised(weight: Tensor, bits: int) -> Tensor:
    """What is left of a channel-major matrix [C, out] after rounding to ``bits``, from minimum to maximum of each group.

    A group is 32 input channels of one output; all of them where 32 does not divide their number.
    """
    group = GROUP if len(weight) % GROUP == 0 else len(weight)
    grouped = weight.float().view(-1, group, weight.shape[1])  # [C / group, group, out]
    low = grouped.amin(1, keepdim=True)
    step = (grouped.amax(1, keepdim=True) - low).clamp(min=1e-12) / (2**bits - 1)
    rounded: Tensor = ((grouped - low) / step).round() * step + low
    return rounded.view_as(weight).to(weight.dtype)


def low_bit_experts(use: ExpertUse, saving: float) -> Tensor:
    """EdgeMoE's choice over all layers: the least important experts, until ``saving`` of the value bytes are saved.

    EdgeMoE measures importance as the loss of accuracy when an expert is quantised; here it is the expert's summed routing
    weight, which needs one pass over the calibration text instead of one for each expert. Bytes are those that the stages of this
    pass load.

    Returns:
        bool [L, E].
    """
    order = use.weight.flatten().argsort(stable=True)
    saved = use.loads.flatten()[order].cumsum(0) * (1 - LOW_BITS / HIGH_BITS) / use.loads.sum()
    low = torch.zeros(len(order), dtype=torch.bool)
    low[order[: int((saved < saving).sum()) + 1]] = True
    return low.view_as(use.weight)

"""Two rivals that decide before inference and load experts whole: MoE-Pruner and EdgeMoE (section V-A, Table II).

MoE-Pruner (arXiv 2410.12013) zeroes single weights. EdgeMoE (arXiv 2308.14352) keeps unimportant experts at 2 bits and the
others at 4. Both are measured on sample text under the exact policy, and neither is fine-tuned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from edgexpert.core.routing import Routing

LOW_BITS, HIGH_BITS = 2, 4
GROUP = 32  # input channels that share a scale and a zero point
BITMAP_BITS = 1.0  # unstructured zeros need an index: one bit says whether a weight is there


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
    weight, which needs one pass over the sample text instead of one for each expert. Bytes are those that the stages of this
    pass load.

    Returns:
        bool [L, E].
    """
    order = use.weight.flatten().argsort(stable=True)
    saved = use.loads.flatten()[order].cumsum(0) * (1 - LOW_BITS / HIGH_BITS) / use.loads.sum()
    low = torch.zeros(len(order), dtype=torch.bool)
    low[order[: int((saved < saving).sum()) + 1]] = True
    return low.view_as(use.weight)

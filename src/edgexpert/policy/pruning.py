"""Coarse-to-fine pruning of a verify stage, the paper's Baseline after SMoLPU (section II-C).

SMoLPU's predictor and thresholds are not public. Ours: a candidate's chance to be accepted is its path probability, and a
channel matters to a token as |activation| x routing weight.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import TokenTree
from edgexpert.kernels import native
from edgexpert.kernels.layers import StageRule, choose_experts


def expected_candidates(tree: TokenTree, keep_mass: float) -> Tensor:
    """The keep-set: the fewest nodes, closed under ancestors, that hold ``keep_mass`` of the tree's path probability.

    The sum of path probabilities, the root's 1 included, is the acceptance length that the draft expects; the set gives up
    at most ``1 - keep_mass`` of it. The root always belongs to the set.

    Returns:
        bool [N].
    """
    # No path is likelier than its beginning; taking the minimum makes that hold against rounding, too.
    log_prob = torch.where(tree.mask, tree.path_log_prob[None, :], torch.inf).amin(1)
    prob, order = log_prob.double().exp().sort(descending=True, stable=True)  # a parent before a child as likely as itself
    before = prob.cumsum(0) - prob
    keep = torch.empty(len(tree), dtype=torch.bool)
    keep[order] = before < keep_mass * prob.sum()
    keep[0] = True
    return keep


def prune_experts(routing: Routing, scores: Scores, keep: Tensor) -> Routing:
    """Coarse pruning: drops each expert that no token of the keep-set routes to.

    A token that loses experts shares their weight among the ones it still has exactly where the model itself normalises.

    Args:
        keep: tokens expected to be accepted, bool [T].
    """
    if native.computes(scores.choice) and routing.weights.dtype == torch.float32:
        return choose_experts(StageRule(torch.zeros(len(keep), dtype=torch.int64), keep=keep), routing, scores)
    wanted = torch.zeros(routing.num_experts + 1, dtype=torch.bool, device=routing.experts.device)
    wanted[routing.experts[keep.to(routing.experts.device)].flatten()] = True
    wanted[routing.num_experts] = True
    dropped = ~wanted[routing.experts]  # [T, k]
    if not dropped.any():
        return routing
    experts = routing.experts.masked_fill(dropped, routing.num_experts)
    weights = torch.where(
        dropped.any(1, keepdim=True), scores.weights(experts).to(routing.weights.dtype), routing.weights
    )
    return Routing(experts, weights, routing.num_experts)


def needed_channels(activations: Tensor, routing: Routing, keep_channels: float) -> Tensor:
    """Fine pruning: the input channels of one matrix that each pair needs.

    All (expert, channel) of a token are ranked together by |activation| x routing weight, and the fewest are kept that hold
    ``keep_channels`` of the token's sum (ties alike); so an expert of small weight keeps fewer. Every pair keeps at least
    its own largest channel.

    Args:
        activations: input of the matrix for each pair, [P, C].

    Returns:
        bool [P, C].
    """
    if native.computes(activations):
        return native.needed_channels(activations, routing, keep_channels)
    token, slot = routing.pairs
    importance = activations.float().abs() * routing.pair_weight.float().abs()[:, None]  # [P, C]
    by_token = importance.new_zeros(*routing.experts.shape, importance.shape[1])  # [T, k, C]
    by_token[token, slot] = importance
    ranked = _descending(by_token.flatten(1))  # [T, k * C]
    total = ranked.double().cumsum(1)
    kept = (total - ranked < keep_channels * total[:, -1:]).sum(1, keepdim=True)  # a sum that starts below the share
    least = ranked.gather(1, (kept - 1).clamp(min=0))  # [T, 1]
    mask = importance >= least[token]
    mask[torch.arange(len(mask), device=mask.device), importance.argmax(1)] = True
    return mask


def _descending(values: Tensor) -> Tensor:
    """Each row sorted. On a CPU by numpy, whose sort of numbers alone is three times as fast as PyTorch's sort with indices."""
    if values.device.type != "cpu":
        return values.sort(1, descending=True).values
    return torch.from_numpy(np.sort(values.detach().numpy(), axis=1)).flip(1)


def union_by_expert(mask: Tensor, pair_expert: Tensor, num_experts: int) -> Tensor:
    """Channels that some pair of the expert needs, bool [E, C]."""
    count = torch.zeros(num_experts, mask.shape[1], dtype=torch.int32, device=mask.device)
    return count.index_add_(0, pair_expert, mask.int()) > 0

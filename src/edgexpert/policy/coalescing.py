"""Depth-aware channel coalescing (section IV-C): at most one candidate of a depth survives, so not every wish is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.kernels import native


def salient_channels(
    score: Tensor, mask: Tensor, pair_expert: Tensor, pair_depth: Tensor, num_experts: int, selection_ratio: float
) -> Tensor:
    """Channels of each expert that are worth loading.

    For an expert and the tokens of one depth routed to it, the channel score S_c sums |IA| x A_t over all of them, the
    salience score S_s over those whose own mask needs the channel. The channel is loaded where S_s > sr x S_c; what several
    depths load adds up.

    Args:
        score: |IA| x A_t of each pair and channel, [P, C].
        mask: channels that each pair needs after fine pruning, bool [P, C].
        pair_expert, pair_depth: int64 [P].
        selection_ratio: sr; 0 loads whatever somebody needs.

    Returns:
        bool [E, C].
    """
    if native.computes(score):
        return native.salient_channels(score, mask, pair_expert, pair_depth, num_experts, selection_ratio)
    depths = int(pair_depth.max()) + 1
    group = pair_expert * depths + pair_depth
    channel_score = score.new_zeros(num_experts * depths, score.shape[1]).index_add_(0, group, score)
    salience = torch.zeros_like(channel_score).index_add_(0, group, score * mask)
    load = salience > selection_ratio * channel_score  # [E * D, C]
    return load.view(num_experts, depths, -1).any(1)

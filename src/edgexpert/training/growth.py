"""Splitting experts: a trained model goes on with twice as many finer ones, from the same function."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

ROUTER_NOISE = 0.6
"""Of the router weights' deviation. Two halves of an expert that score alike would be chosen together for ever; so much lets them
part, and costs `stories` 0.05 nats, which it wins back in some fifty steps."""


def split_experts(model: PreTrainedModel, width: int, noise: float = ROUTER_NOISE) -> PreTrainedModel:
    """A model of twice as many experts of ``width`` channels (at least half of the present ones), with twice the top-k.

    The first half of an expert takes its first ``width`` channels, the second the rest and fresh channels that contribute
    nothing yet. Routing weights are renormalised (`norm_topk_prob`), so that a half weighs half: ``down`` is doubled. Without
    noise the function is the same.
    """
    config = copy.deepcopy(model.config)
    experts, before = config.num_experts, config.moe_intermediate_size
    if not config.norm_topk_prob or not before <= 2 * width <= 2 * before:
        raise ValueError(f"experts of width {before} cannot be split into halves of width {width}")
    config.update({
        "num_experts": 2 * experts, "num_local_experts": 2 * experts, "moe_intermediate_size": width,
        "num_experts_per_tok": 2 * config.num_experts_per_tok,
    })  # fmt: skip
    generator = torch.Generator().manual_seed(before)
    fresh = 2 * width - before

    def halves(matrix: Tensor) -> Tensor:
        """[E, before, H] to [2 E, width, H]."""
        new = torch.randn(experts, fresh, matrix.shape[2], generator=generator) * matrix.std()
        return torch.cat([matrix, new], dim=1).reshape(2 * experts, width, -1)

    weights = dict(model.state_dict())
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):  # [E, 2 before, H]
            weights[name] = torch.cat([halves(part) for part in weight.split(before, dim=1)], dim=1)
        elif name.endswith("experts.down_proj"):  # [E, H, before]
            silent = weight.new_zeros(experts, weight.shape[1], fresh)
            both = torch.cat([2 * weight, silent], dim=2).unflatten(2, (2, width))  # [E, H, 2, width]
            weights[name] = both.transpose(1, 2).flatten(0, 1).contiguous()
        elif name.endswith("mlp.gate.weight"):  # [E, H]
            rows = weight.repeat_interleave(2, dim=0)
            weights[name] = rows + noise * weight.std() * torch.randn(rows.shape, generator=generator)
    grown: PreTrainedModel = type(model)(config)
    grown.load_state_dict(weights)
    return grown

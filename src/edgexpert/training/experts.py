"""Expert execution for training: every expert in one batched matrix product.

The library's own loop over experts is far too slow to train with, and CPUs have no grouped kernel. Tokens are sorted by
expert and padded to the busiest expert's count, so that a layer is three batched products, whatever the number of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "edgexpert_training"


class _Dispatch(torch.autograd.Function):
    """Copies tokens into their experts' slots. Both directions are gathers (an index_put backward takes a third of a step)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_slot: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, token_of_slot)  # the last row pads

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        tokens, k = slot.shape
        return grad.index_select(0, slot.reshape(-1)).view(tokens, k, -1).sum(1), None, None


class _Collect(torch.autograd.Function):
    """Takes each (token, choice) result out of its slot; the reverse of `_Dispatch`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, choice_of_slot: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(choice_of_slot)
        return out.index_select(0, slot.reshape(-1)).view(*slot.shape, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (choice_of_slot,) = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        return torch.cat([flat, flat.new_zeros(1, flat.shape[1])]).index_select(0, choice_of_slot), None, None


def batched_experts(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weighted sum of the routed experts of each token: ``x`` [T, H], ``top_k_*`` [T, k] -> [T, H]."""
    tokens, k = top_k_index.shape
    experts = self.gate_up_proj.shape[0]
    with torch.no_grad():
        expert_of = top_k_index.reshape(-1)  # [T*k]
        order = torch.argsort(expert_of, stable=True)
        counts = torch.bincount(expert_of, minlength=experts)
        starts = counts.cumsum(0) - counts
        capacity = -(-int(counts.max()) // 32) * 32  # a multiple of the matrix unit's rows
        sorted_expert = expert_of[order]
        sorted_slot = torch.arange(tokens * k, device=x.device) - starts[sorted_expert] + sorted_expert * capacity
        slot = torch.empty_like(order).scatter_(0, order, sorted_slot).view(tokens, k)
        choice_of_slot = torch.full((experts * capacity,), tokens * k, device=x.device).scatter_(0, sorted_slot, order)

    padded = _Dispatch.apply(x, choice_of_slot // k, slot).view(experts, capacity, -1)  # [E, C, H]
    gate, up = torch.bmm(padded, self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    out = torch.bmm(self.act_fn(gate) * up, self.down_proj.transpose(1, 2))  # [E, C, H]
    routed = _Collect.apply(out.view(experts * capacity, -1), choice_of_slot, slot)  # [T, k, H]
    return torch.bmm(top_k_weights.to(routed.dtype).unsqueeze(1), routed).squeeze(1)


ALL_EXPERTS_FUNCTIONS.register(NAME, batched_experts)

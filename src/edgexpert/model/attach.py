"""Putting the techniques onto a transformers model that the user already has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgexpert.core.stage import Stage, TokenTree
from edgexpert.model.host import HostedModel
from edgexpert.model.running import Pass
from edgexpert.policy import Hyperparameters, Policy

Weigh = Callable[[Sequence[int]], Tensor]


def attach_policy(
    model: PreTrainedModel, policy: Policy, weigh: Weigh, calibrated: Hyperparameters | None = None
) -> HostedModel:
    """From now on every forward pass of ``model`` runs under ``policy``, `model.generate` and evaluation harnesses included.

    Several new tokens a sequence make a prefill stage, a single one makes a verify stage (a tree of one token). Sequences of
    a batch are decided one by one.

    Args:
        weigh: importance weight of each token of a prompt.

    Returns the host, whose ``ledger`` counts; its ``detach()`` undoes everything.
    """
    host = HostedModel(model, policy, calibrated)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return  # embeddings were given: no tokens to decide by
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        prefix = int(cache.get_seq_length()) if cache is not None else 0
        mask = kwargs.get("attention_mask")
        host.running = Pass([_stage(row, prefix, None if mask is None else mask[i], host.policy, weigh)
                             for i, row in enumerate(ids)])

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running, host.running = host.running, None
        if running is not None and len(running.plans) == len(host.blocks):
            host.count(running, getattr(output, "cache", None) or getattr(output, "past_key_values", None))

    host.keep_hook(model.register_forward_pre_hook(begin, with_kwargs=True))
    host.keep_hook(model.register_forward_hook(end, with_kwargs=True, always_call=True))
    return host


def _stage(row: Tensor, prefix: int, mask: Tensor | None, policy: Policy, weigh: Weigh) -> Stage:
    row = row.cpu()
    if len(row) == 1:
        return Stage.verify(TokenTree.of_root(int(row[0])), prefix)
    importance = None
    if policy.prompt_wise_expert_reuse:
        real = torch.ones_like(row, dtype=torch.bool) if mask is None or mask.dim() != 1 else mask[-len(row) :].cpu().bool()
        importance = torch.zeros(len(row))
        importance[real] = weigh(row[real].tolist())
    return Stage.prefill(row, prefix, importance)

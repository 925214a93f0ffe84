"""Putting the techniques onto a transformers model that the user already has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import cache_of
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.core.traffic import Ledger, Phase
from edgexpert.model.host import HostedModel
from edgexpert.model.running import Pass
from edgexpert.policy import Policy

Weigh = Callable[[Sequence[int]], Tensor]
"""Importance of each token of a prompt, float32 [T]."""


class AttachedPolicy:
    """A policy on a model that the user drives: every forward pass runs under it, also those of
    `model.generate` and of evaluation harnesses.

    Several new tokens a sequence make a prefill stage, a single one makes a verify stage (a tree of one token). Sequences of
    a batch are decided one by one.

    Attributes:
        ledger: counts the traffic since the policy was attached.
    """

    def __init__(self, host: HostedModel, policy: Policy, weigh: Weigh) -> None:
        self.host, self.ledger = host, Ledger()
        try:
            self.policy = host.resolve(policy)
            if policy.needs_received_attention:
                raise UserError(f"policy {policy.name} needs the attention that tokens receive, which is measured in EdgeXpert's "
                                "own stages alone; use edgexpert.load, or a `token_weight` of routing or path")
        except UserError:
            host.detach()
            raise
        self._weigh = weigh
        host.keep_hook(host.model.register_forward_pre_hook(self._begin, with_kwargs=True))
        host.keep_hook(host.model.register_forward_hook(self._end, with_kwargs=True, always_call=True))

    def detach(self) -> PreTrainedModel:
        """Gives the model back as it was."""
        return self.host.detach()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.host.lock.acquire()
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            return  # embeddings were given: no tokens to decide by
        cache = cache_of(kwargs)
        prefix = int(cache.get_seq_length()) if cache is not None else 0
        mask = kwargs.get("attention_mask")
        stages = [self._stage(row, prefix, None if mask is None else mask[i]) for i, row in enumerate(ids)]
        self.host.begin(Pass(stages, self.policy))

    def _end(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        running = self.host.end()
        self.host.lock.release()
        if running is None or len(running.plans) < len(self.host.blocks):
            return  # no tokens, or an error in mid-pass
        phase: Phase = "prefill" if running.stages[0].kind == "prefill" else "decode"
        self.ledger.add_all(phase, self.host.traffic(running, cache_of(output)))

    def _stage(self, row: Tensor, prefix: int, mask: Tensor | None) -> Stage:
        row = row.cpu()
        if len(row) == 1:
            return Stage.verify(TokenTree.of_root(int(row[0])), prefix)
        importance = None
        if self.policy.needs_importance:
            real = torch.ones_like(row, dtype=torch.bool) if mask is None or mask.dim() != 1 else mask[-len(row) :].cpu().bool()
            importance = torch.zeros(len(row))
            importance[real] = self._weigh(row[real].tolist())
        return Stage.prefill(row, prefix, importance)

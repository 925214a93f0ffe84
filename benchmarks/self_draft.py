"""An MoE model, the target itself in few bits for one, as draft for another, with its traffic counted honestly."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import edgexpert
from edgexpert.core.errors import UserError
from edgexpert.core.traffic import PARTS, Ledger, Part
from edgexpert.model.blocks import decoder_layers, find_blocks
from edgexpert.speculation.causal import CausalDraft

GROUP = 32  # weights that share a float16 scale and a zero point
ROUNDED: tuple[Part, ...] = ("experts", "shared_experts", "attention")  # norms, a fraction of a percent, count with them
NOT_WEIGHTS: tuple[Part, ...] = ("kv_cache", "draft", "encoder")


def weight_bytes(read: Mapping[Part, float]) -> float:
    """The model's own weights among bytes by part."""
    return sum(count for part, count in read.items() if part not in NOT_WEIGHTS)


def stored_bits(bits: int) -> float:
    """Bits of a weight in storage, its share of the scale and the zero point included."""
    return bits + (16 + bits) / GROUP


def round_to(weight: Tensor, bits: int) -> Tensor:
    """Nearest values [..., C] of an asymmetric grid of 2^bits points, 0 among them, for each group of 32."""
    if weight.shape[-1] % GROUP:
        raise UserError(f"a weight with rows of {weight.shape[-1]} values has no groups of {GROUP}; choose another --model")
    groups = weight.float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    steps = 2**bits - 1
    scale = ((high - low) / steps).half().float().clamp(min=torch.finfo(torch.float16).tiny)
    zero = (-low / scale).round()
    return (((groups / scale + zero).round().clamp(0, steps) - zero) * scale).flatten(-2).to(weight.dtype)


def round_layers(model: PreTrainedModel, bits: int) -> None:
    """Rounds the matrices of all decoder layers in place, but for the routers."""
    routers = {id(weight) for block in find_blocks(model) for weight in block.router.parameters()}
    for weight in decoder_layers(model).parameters():
        if weight.dim() >= 2 and id(weight) not in routers:
            weight.data = round_to(weight.data, bits)


class MoeDraft(CausalDraft):
    """An MoE model as draft: of its experts, only those that a pass activates count.

    Args:
        bits: rounds the model's layers to so many bits, and counts them so; None leaves them.

    Attributes:
        low_bit_bytes: the part of the bytes read that is stored in ``bits`` bits.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, bits: int | None = None) -> None:
        super().__init__(model, vocab_size)
        self.low_bit_bytes = 0.0
        self._rounded = ROUNDED if bits is not None else ()
        self._share = stored_bits(bits) / (8 * model.dtype.itemsize) if bits is not None else 1.0
        if bits is not None:
            round_layers(model, bits)
        self._attached = edgexpert.attach(model, "exact")

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, float]:
        self._attached.ledger = ledger = Ledger()
        logits, _ = super().forward(tokens, positions, mask, cache)
        read = {part: ledger.total(part) for part in PARTS}
        rounded = sum(read[part] for part in self._rounded)
        self.low_bit_bytes += rounded * self._share
        return logits, rounded * self._share + weight_bytes(read) - rounded

"""Float operations around the weights: RMSNorm, the router's linear layer, attention over a token tree, likeliest tokens.

A token's result is bit for bit the same whatever else shares the call, which PyTorch's own products do not promise; so a
candidate in a tree gives what it would give in plain decoding. Without native kernels PyTorch computes them, see `rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.kernels import native, rows
from edgexpert.kernels.native import array


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., n] over its root mean square, times ``weight`` [n]."""
    if native.path() == "torch":
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(flat.shape)
    native._native.rms_norm(array(flat), array(weight), eps, array(out))
    return out.view(x.shape)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [..., n] times ``weight`` [outputs, n] transposed."""
    if native.path() == "torch":
        return rows.product(x.reshape(-1, x.shape[-1]), weight.T).view(*x.shape[:-1], len(weight))
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = flat.new_empty(len(flat), len(weight))
    native._native.float_linear(array(flat), array(weight), array(out))
    return out.view(*x.shape[:-1], len(weight))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of a stage's tokens.

    Args:
        query: [heads, T, D]; the last dimension of all three is contiguous.
        key, value: [kv heads, n, D] and [kv heads, n, Dv]; the last T keys are the stage's own.
        mask: who attends to whom, bool [T, n]; None for a text.

    Returns:
        [T, heads, Dv]
    """
    if native.path() == "torch":
        return rows.attention(query, key, value, mask, scale)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    native._native.attention(
        query=array(query), key=array(key), value=array(value), mask=array(mask), scale=scale, out=array(out))
    return out


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens [n, k] of logits [n, V], or all of fewer, and their log-probabilities, float32 [n, k]."""
    logits, k = logits.float(), min(k, logits.shape[-1])
    if not native.computes(logits):
        log_probs, tokens = logits.log_softmax(-1).topk(k)
        return tokens, log_probs
    n, logits = len(logits), logits.contiguous()
    tokens, log_probs = torch.empty(n, k, dtype=torch.int64), torch.empty(n, k)
    native._native.top_log_probs(array(logits), array(tokens), array(log_probs))
    return tokens, log_probs

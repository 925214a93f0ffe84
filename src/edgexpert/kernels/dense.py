"""Float operations around the weights: RMSNorm, the router's linear layer, attention over a token tree, likeliest tokens.

A token's result is bit for bit the same whatever else shares the call, which PyTorch's own products do not promise; so a
candidate in a tree gives what it would give in plain decoding. Without the compiled module PyTorch computes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from edgexpert.kernels import native
from edgexpert.kernels.native import array


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., n] over its root mean square, times ``weight`` [n]."""
    if native.path() == "torch":
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(rows.shape)
    native._native.rms_norm(array(rows), array(weight), eps, array(out))
    return out.view(x.shape)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [..., n] times ``weight`` [outputs, n] transposed."""
    if native.path() == "torch":
        return F.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(len(rows), len(weight))
    native._native.float_linear(array(rows), array(weight), array(out))
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
        if mask is None:
            tokens, keys = query.shape[1], key.shape[1]
            mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
        out = F.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
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
    rows = len(logits)
    logits = logits.contiguous()
    tokens, log_probs = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
    native._native.top_log_probs(array(logits), array(tokens), array(log_probs))
    return tokens, log_probs

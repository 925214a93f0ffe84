"""Float operations around the weights: RMSNorm, the router's linear layer, attention over a token tree, likeliest tokens.

A token's result is bit for bit the same whatever else shares the call, which PyTorch's own products do not promise; so a
candidate in a tree gives what it would give in plain decoding. Without the compiled module PyTorch computes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from edgexpert.kernels import native


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [..., n] over its root mean square, times ``weight`` [n]."""
    if native.path() == "torch":
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    n = x.shape[-1]
    x = x.contiguous()
    arrays = native.address_of(x, torch.float32, *x.shape), native.address_of(weight, torch.float32, n)
    out = torch.empty_like(x)
    native._native.rms_norm(*arrays, out.data_ptr(), x.numel() // n, n, eps)
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [..., n] times ``weight`` [outputs, n] transposed."""
    if native.path() == "torch":
        return F.linear(x, weight)
    n, outputs = x.shape[-1], len(weight)
    x = x.contiguous()
    arrays = native.address_of(x, torch.float32, *x.shape), native.address_of(weight, torch.float32, outputs, n)
    out = x.new_empty(*x.shape[:-1], outputs)
    native._native.float_linear(*arrays, out.data_ptr(), x.numel() // n, n, outputs)
    return out


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
    heads, tokens, dim = query.shape
    kv_heads, keys, _ = key.shape
    fits = heads % kv_heads == 0 and key.shape[2] == dim and value.shape[:2] == key.shape[:2] and tokens <= keys
    if not fits or any(x.dtype != torch.float32 or x.stride(2) != 1 for x in (query, key, value)):
        raise ValueError(f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit")
    seen = native.address_of(mask, torch.bool, tokens, keys)
    out = query.new_empty(tokens, heads, value.shape[2])
    arrays = [number for x in (query, key, value) for number in (x.data_ptr(), *x.stride()[:2])]
    sizes = (heads, kv_heads, tokens, keys, dim, value.shape[2])
    native._native.attention(*arrays, seen, out.data_ptr(), *sizes, scale)
    return out


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens [n, k] of logits [n, V], or all of fewer, and their log-probabilities, float32 [n, k]."""
    logits, k = logits.float(), min(k, logits.shape[-1])
    if not native.computes(logits):
        log_probs, tokens = logits.log_softmax(-1).topk(k)
        return tokens, log_probs
    rows, size = logits.shape
    logits = logits.contiguous()
    tokens, log_probs = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
    native._native.top_log_probs(logits.data_ptr(), rows, size, k, tokens.data_ptr(), log_probs.data_ptr())
    return tokens, log_probs

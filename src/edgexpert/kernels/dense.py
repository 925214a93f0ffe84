"""Float operations around the weights: RMSNorm, the router's linear layer, attention over a token tree.

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
    if native.module is None:
        return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    x = x.contiguous()
    out = torch.empty_like(x)
    native.module.rms_norm(x.view(-1, x.shape[-1]), weight, out.view(-1, x.shape[-1]), eps)
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [..., n] times ``weight`` [outputs, n] transposed."""
    if native.module is None:
        return F.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(len(rows), len(weight))
    native.module.float_linear(rows, weight, out)
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
    if native.module is None:
        if mask is None:
            tokens, keys = query.shape[1], key.shape[1]
            mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
        out = F.scaled_dot_product_attention(query[None], key[None], value[None], mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
    native.module.attention(query, key, value, mask, out, scale)
    return out

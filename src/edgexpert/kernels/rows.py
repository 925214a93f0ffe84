"""PyTorch's operations so that a token gets the same bits whatever else shares the call, which they do not promise.

Its loops compute the last elements of a tensor in another way than the others, and its products add in an order that depends on
their size. Here elements are filled up to whole runs of such a loop, and products go row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LANES = 64
"""More elements than any processor's loop takes at once."""
GRAIN = 32768
"""Elements that one thread computes; more are split anywhere between threads, each with last elements of its own."""


def elementwise(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``function`` of each element of ``x``."""
    flat = F.pad(x.reshape(-1), (0, -x.numel() % LANES))
    pieces = [function(piece, *args, **kwargs) for piece in flat.split(GRAIN)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: x.numel()].view(x.shape)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x`` [n, C] times ``matrix`` [C, N]."""
    if not len(x):
        return x @ matrix
    return torch.stack([row.clone() @ matrix for row in x])  # a copy, for alignment decides about sums, too


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`dense.attention`: each token with the keys that it sees, as if there were no others."""
    tokens, keys = query.shape[1], key.shape[1]
    out = query.new_empty(tokens, query.shape[0], value.shape[2])
    for t in range(tokens):
        seen = torch.arange(keys - tokens + t + 1) if mask is None else mask[t].nonzero().squeeze(1)
        own = (query[:, t : t + 1].contiguous(), key[:, seen].contiguous(), value[:, seen].contiguous())
        q, k, v = (part[None] for part in own)
        out[t] = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)[0, :, 0]
    return out

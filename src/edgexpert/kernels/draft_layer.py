"""The decoder layer of an EAGLE-3 draft in one compiled call; see csrc/draft.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgexpert.kernels import native
from edgexpert.kernels.layers import attention_layer
from edgexpert.weights.matrix import PackedMatrix


class DraftLayer:
    """Attention over the embedding of a token and the state of the token before it, and a SwiGLU MLP.

    Args:
        attention: matrices of queries, keys, values (from 2 * H channels) and output; ``biases`` likewise.
        mlp: matrices of gate, up and down.
        norms: RMSNorm weights [H] of the embedding, of the state, and before the MLP.
        norm_before_residual: attention adds to the normed state.

    Raises:
        ValueError: the tensors do not fit each other.
    """

    def __init__(
        self, attention: Sequence[PackedMatrix], biases: Sequence[Tensor | None], mlp: Sequence[PackedMatrix],
        norms: Sequence[Tensor], *, norm_before_residual: bool, heads: int, kv_heads: int, dim: int, eps: float,
    ) -> None:
        hidden, inner = mlp[0].channels, mlp[0].outputs
        shapes = [(hidden, inner), (hidden, inner), (inner, hidden)]
        fits = (attention[0].channels, attention[3].outputs) == (2 * hidden, hidden)
        if [(matrix.channels, matrix.outputs) for matrix in mlp] != shapes or not fits or dim % 2:
            raise ValueError(f"expected matrices of {shapes} behind attention from {2 * hidden} to {hidden}")
        attending = attention_layer(
            attention, biases, None, (None, None), per_head=False, heads=heads, kv_heads=kv_heads, dim=dim, eps=eps,
            scale=dim**-0.5, residual=1.0, clip=0.0)
        weights = (native.address_of(norm, torch.float32, hidden) for norm in norms)
        bound = (native._bind(matrix) for matrix in mlp)
        self._native = native._native.DraftLayer(attending, *bound, *weights, norm_before_residual, eps)
        self._held = attention, biases, mlp, norms  # what it points into
        self._hidden, self._kv_heads, self._dim = hidden, kv_heads, dim

    def __call__(
        self, embeddings: Tensor, states: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int,
        mask: Tensor | None,
    ) -> Tensor:
        """New states [n, H]; appends to the cache ``keys`` and ``values`` [kv heads, capacity, dim] behind ``length`` tokens.

        Args:
            embeddings, states: of the tokens, and of the tokens before them, [n, H].
            cos, sin: [n, dim], of both halves of a head.
            mask: who attends to whom, bool [n, length + n]; None for a text.
        """
        tokens, capacity = len(states), keys.shape[1]
        if length + tokens > capacity:
            raise ValueError(f"{length} + {tokens} tokens in a cache for {capacity}")
        inputs, rotary, cache = (tokens, self._hidden), (tokens, self._dim), (self._kv_heads, capacity, self._dim)
        arrays = ((embeddings, inputs), (states, inputs), (cos, rotary), (sin, rotary), (keys, cache), (values, cache))
        x, before, *others = (native.address_of(tensor, torch.float32, *shape) for tensor, shape in arrays)
        seen = native.address_of(mask, torch.bool, tokens, length + tokens)
        out = torch.empty_like(states)
        native._native.DraftLayer.run(self._native, x, before, tokens, *others, capacity, length, seen, out.data_ptr())
        return out

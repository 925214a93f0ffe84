"""The decoder layer of an EAGLE-3 draft in one native call; see csrc/draft.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgexpert.kernels import native
from edgexpert.kernels.layers import attention_layer
from edgexpert.kernels.native import array
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
        attending = attention_layer(
            attention, biases, None, (None, None), heads=heads, kv_heads=kv_heads, dim=dim, eps=eps, scale=dim**-0.5,
            residual=1.0, clip=0.0)
        gate, up, down = (native.bound(matrix) for matrix in mlp)
        embedding_norm, state_norm, mlp_norm = (array(norm) for norm in norms)
        self._native = native._native.DraftLayer(
            attention=attending, gate=gate, up=up, down=down, embedding_norm=embedding_norm, state_norm=state_norm,
            mlp_norm=mlp_norm, norm_before_residual=norm_before_residual, eps=eps)

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
        out = torch.empty_like(states)
        context = native._native.Context(cos=array(cos), sin=array(sin), keys=array(keys[None]), values=array(values[None]),
                                         length=length, mask=array(mask))
        self._native.run(embeddings=array(embeddings), states=array(states), context=context, out=array(out))
        return out

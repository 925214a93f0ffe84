"""Decoder layers in two native calls, their attention and their experts, where their form is known.

A layer is known if it computes what the native one does, which is tried on random inputs when a packed checkpoint is loaded.
Other layers run as the library has them, on packed linear layers all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgexpert.kernels import layers, native
from edgexpert.kernels.modules import ATTENTION, PackedLinear, RowNorm, attention_interface
from edgexpert.model.blocks import MoeBlock, decoder_layers
from edgexpert.model.cache import TreeCache, TreeLayer

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class NativeLayer:
    """Takes the place of a decoder layer's ``forward``."""

    def __init__(self, layer: Any, config: Any) -> None:
        attention = layer.self_attn
        self.library, self.index = layer.forward, int(attention.layer_idx)
        self.norm, self.mlp = layer.post_attention_layernorm, getattr(layer, "mlp", None) or layer.block_sparse_moe
        self.residual = float(getattr(layer, "residual_multiplier", 1.0))
        projections = [getattr(attention, name) for name in PROJECTIONS]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        dim = int(attention.head_dim)
        heads, kv_heads = (projections[i].matrix.outputs // dim for i in (0, 1))
        self._held = [projections, norms, layer.input_layernorm]  # what the native layer points into
        self.native = layers.attention_layer(
            [p.matrix for p in projections], [p.bias for p in projections], layer.input_layernorm.weight,
            [None if norm is None else norm.weight for norm in norms],
            per_head=norms[0] is not None and len(norms[0].weight) == dim, heads=heads, kv_heads=kv_heads, dim=dim,
            eps=layer.input_layernorm.eps, scale=float(attention.scaling), residual=self.residual,
            clip=float(getattr(config, "clip_qkv", None) or 0.0),
        )
        self.kv_heads, self.dim = kv_heads, dim
        self.experts: Any = None

    def take_experts(self, block: MoeBlock) -> None:
        """Runs the experts natively, too, whenever a stage leaves them to the router: if it chooses by its logits alone."""
        weights, form = block.packed, block.form
        has_shared_experts = len(list(self.mlp.children())) > 2
        if weights is None or form is None or form.bias is not None or form.groups is not None or has_shared_experts:
            return
        self.block, self.router = block, block.router.weight.as_subclass(Tensor)
        self.experts = layers.expert_layer(
            self.norm.weight, self.router, weights.gate_up, weights.down, (weights.gate_up_bias, weights.down_bias),
            top_k=block.top_k, sigmoid=form.sigmoid, normalise=form.normalise, eps=self.norm.eps, router_scale=form.scale,
            residual=self.residual, activation=weights.activation, gated=weights.gated,
        )

    def __call__(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The layer: [1, T, H] -> [1, T, H]. Goes back to the library's where it is asked for more than a stage."""
        cache = kwargs.get("cache")
        watched = ALL_ATTENTION_FUNCTIONS[ATTENTION] is not attention_interface
        if not isinstance(cache, TreeCache) or len(hidden_states) != 1 or watched:
            return self.library(hidden_states, attention_mask=attention_mask, **kwargs)
        between = self.attend(hidden_states.contiguous(), attention_mask, cache, *kwargs["position_embeddings"])
        host = self.block.experts._edgexpert[0] if self.experts is not None else None
        if host is None or not host.decides_nothing:
            out = self.mlp(self.norm(between))
            return between + (out if self.residual == 1.0 else out * self.residual)
        out, tokens = torch.empty_like(between), between.shape[1]
        experts = torch.empty(tokens, self.block.top_k, dtype=torch.int64)
        weights = torch.empty(tokens, self.block.top_k)
        layers.run_expert_layer(self.experts, between, out, experts, weights)
        host.ran_exactly(self.block, experts, weights)
        return out

    def attend(self, hidden: Tensor, mask: Tensor | None, cache: TreeCache, cos: Tensor, sin: Tensor) -> Tensor:
        """``hidden`` [1, T, H] and its attention, added."""
        states: TreeLayer = cache.tree_layers[self.index]
        if not states.is_initialized:
            shape = hidden.new_empty(1, self.kv_heads, 0, self.dim)
            states.lazy_initialization(shape, shape)
        out = torch.empty_like(hidden)
        start = states.append(hidden.shape[1])
        layers.run_attention_layer(self.native, hidden, cos, sin, states.keys, states.values, start, mask, out)
        return out


def use_native_layers(model: PreTrainedModel, blocks: Sequence[MoeBlock]) -> int:
    """Puts native layers in the place of those whose form is known, and returns how many."""
    if native.path() == "torch":
        return 0
    replaced, block_of = 0, {block.layer: block for block in blocks}
    for layer in decoder_layers(model):
        if not _has_the_parts(layer):
            continue
        candidate = NativeLayer(layer, model.config.get_text_config())
        if _same(model, layer, candidate):
            if candidate.index in block_of:
                candidate.take_experts(block_of[candidate.index])
            layer.forward = candidate  # type: ignore[method-assign, assignment]
            replaced += 1
    return replaced


def _has_the_parts(layer: nn.Module) -> bool:
    attention = getattr(layer, "self_attn", None)
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    moe = getattr(layer, "mlp", None) or getattr(layer, "block_sparse_moe", None)
    return (
        moe is not None
        and all(isinstance(norm, RowNorm) for norm in norms)
        and all(isinstance(getattr(attention, name, None), PackedLinear) for name in PROJECTIONS)
        and hasattr(attention, "head_dim")
        and hasattr(attention, "scaling")
    )


@torch.no_grad()
def _same(model: PreTrainedModel, layer: Any, candidate: NativeLayer) -> bool:
    """Whether both halves give the same on three random tokens behind each other."""
    config = model.config.get_text_config()
    x = torch.randn(1, 3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3)[None]
    rotary = model.base_model.rotary_emb(x, position_ids=positions)
    if not isinstance(rotary, tuple):
        return False
    ours, theirs = (TreeCache(len(decoder_layers(model)), 3) for _ in range(2))
    normed = layer.input_layernorm(x)
    added, *_ = layer.self_attn(hidden_states=normed, position_embeddings=rotary, attention_mask=None, cache=theirs)
    expected = x + candidate.residual * added
    return torch.allclose(candidate.attend(x, None, ours, *rotary), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))

"""Decoder layers in two native calls, their attention and their experts, where their form is known.

A layer is known if all that its ``forward`` computes is what the native one computes, which is tried on random inputs when a
packed checkpoint is loaded. Other layers run as the library has them, on packed linear layers all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgexpert.core.stage import TokenTree
from edgexpert.kernels import layers, native
from edgexpert.kernels.layers import StageRule
from edgexpert.kernels.modules import PackedLinear, RowNorm
from edgexpert.model.attention import is_attention_watched
from edgexpert.model.blocks import MoeBlock, decoder_layers
from edgexpert.model.cache import TreeCache, TreeLayer
from edgexpert.model.running import StageChoices

ARGUMENTS = {"attention_mask", "position_ids", "position_embeddings", "cache", "use_cache", "output_router_logits"}
"""What a model may tell its layers without telling them more than the native ones know."""
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
        self.native = layers.attention_layer(
            [p.matrix for p in projections], [p.bias for p in projections], layer.input_layernorm.weight,
            [None if norm is None else norm.weight for norm in norms], heads=heads, kv_heads=kv_heads, dim=dim,
            eps=layer.input_layernorm.eps, scale=float(attention.scaling), residual=self.residual,
            clip=float(getattr(config, "clip_qkv", None) or 0.0),
        )
        self.kv_heads, self.dim = kv_heads, dim
        self.experts: Any = None

    def take_experts(self, block: MoeBlock) -> None:
        """Runs the experts natively, too, whenever the stage is `Pass.is_native`: if the router chooses by its logits alone."""
        weights, form = block.packed, block.form
        has_shared_experts = len(list(self.mlp.children())) > 2
        router = getattr(block.router, "weight", None)
        if weights is None or form is None or form.bias is not None or form.groups is not None or has_shared_experts:
            return
        if router is None or router.shape != (block.num_experts, block.shape.hidden):
            return
        self.block, self.router = block, router
        self.experts = layers.expert_layer(
            self.norm.weight, self.router, weights.gate_up, weights.down, (weights.gate_up_bias, weights.down_bias),
            top_k=block.top_k, sigmoid=form.sigmoid, normalise=form.normalise, eps=self.norm.eps, router_scale=form.scale,
            residual=self.residual, activation=weights.activation, gated=weights.gated, number=weights.layer,
            store=weights.store if weights.store is not None and weights.store.watches else None,
        )

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer: [1, T, H] -> [1, T, H]. Goes back to the library's where it is asked for more than a stage."""
        cache, rotary = kwargs.get("cache"), kwargs.get("position_embeddings")
        watched = is_attention_watched()
        more = args or any(value is not None for name, value in kwargs.items() if name not in ARGUMENTS)
        if not isinstance(cache, TreeCache) or len(hidden_states) != 1 or watched or rotary is None or more:
            return self.library(hidden_states, *args, **kwargs)
        between = self.attend(hidden_states.contiguous(), kwargs.get("attention_mask"), cache, *rotary)
        host = getattr(self.block.experts, "_edgexpert", (None,))[0] if self.experts is not None else None
        running = host.running if host is not None else None
        if host is None or running is None or not running.is_native:
            return self.feed_forward(between)
        out, choices = self.run_experts(between, running.rule, running.recorder is not None)
        host.ran_natively(self.block, choices)
        return out

    def run_experts(self, between: Tensor, rule: StageRule | None = None, observes: bool = False) -> tuple[Tensor, StageChoices]:
        """``between`` [1, T, H] and its experts, added, and what was chosen."""
        block, size = self.block, (1, between.shape[1], self.block.top_k)
        choices = StageChoices.empty([block], size, rule, observes)
        out = torch.empty_like(between)
        choices.loaded = [layers.run_expert_layer(
            self.experts, between, choices.experts, choices.weights, rule, choices.decided, choices.observed, out
        )]
        return out, choices

    def feed_forward(self, between: Tensor) -> Tensor:
        """``between`` [1, T, H] and what the library's module makes of it, added."""
        out: Tensor = self.mlp(self.norm(between))
        return between + (out if self.residual == 1.0 else out * self.residual)

    def attend(self, hidden: Tensor, mask: Tensor | None, cache: TreeCache, cos: Tensor, sin: Tensor) -> Tensor:
        """``hidden`` [1, T, H] and its attention, added."""
        states: TreeLayer = cache.tree_layers[self.index]
        if not states.is_initialized:
            shape = hidden.new_empty(1, self.kv_heads, 0, self.dim)
            states.lazy_initialization(shape, shape)
        out = torch.empty_like(hidden)
        start = states.append(hidden.shape[1])
        context = layers.context(cos, sin, states.keys, states.values, start, mask)
        layers.run_attention_layer(self.native, hidden, context, out)
        return out


def use_native_layers(model: PreTrainedModel, blocks: Sequence[MoeBlock]) -> int:
    """Puts native layers in the place of those whose form is known, and returns how many."""
    if native.path() == "torch":
        return 0
    replaced, block_of = 0, {block.layer: block for block in blocks}
    for index, layer in enumerate(decoder_layers(model)):
        candidate = _known(model, layer, block_of.get(index))
        if candidate is not None:
            layer.forward = candidate  # type: ignore[method-assign, assignment]
            replaced += 1
    return replaced


def _known(model: PreTrainedModel, layer: Any, block: MoeBlock | None) -> NativeLayer | None:
    """The native form of a layer; None where its form is another one."""
    if not _has_the_parts(layer):
        return None
    candidate = NativeLayer(layer, model.config.get_text_config())
    try:
        tried = _Trial(model, layer, candidate)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):
        return None  # its forward wants something else
    if not tried.holds(candidate.feed_forward):
        return None
    if block is not None:
        candidate.take_experts(block)
        if candidate.experts is not None and not tried.holds(lambda between: candidate.run_experts(between)[0]):
            candidate.experts = None
    return candidate


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


PREFIX = 3
TREE = TokenTree(torch.arange(4), torch.tensor([-1, 0, 0, 1]), torch.zeros(4))
"""What a layer is tried on: a text, and a tree behind it."""


class _Trial:
    """A layer of the library and its native candidate on the same random inputs."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, layer: Any, candidate: NativeLayer) -> None:
        hidden, count = model.config.get_text_config().hidden_size, len(decoder_layers(model))
        seen = torch.cat([torch.ones(len(TREE), PREFIX, dtype=torch.bool), TREE.mask], 1)[None, None]
        ours, theirs = (TreeCache(count, PREFIX + len(TREE)) for _ in range(2))
        self._between, self._expected = [], []
        generator = torch.Generator().manual_seed(0)
        for positions, mask in ((torch.arange(PREFIX), None), (PREFIX + TREE.depth, seen)):
            x = torch.randn(1, len(positions), hidden, generator=generator)
            rotary = model.base_model.rotary_emb(x, position_ids=positions[None])
            if not isinstance(rotary, tuple) or {part.shape for part in rotary} != {(1, len(positions), candidate.dim)}:
                raise ValueError("rotary embeddings of another form")
            expected = layer(x, attention_mask=mask, position_ids=positions[None], position_embeddings=rotary, cache=theirs)
            self._between.append(candidate.attend(x, mask, ours, *rotary))
            self._expected.append(expected)

    @torch.no_grad()
    def holds(self, rest: Callable[[Tensor], Tensor]) -> bool:
        """Whether ``rest``, behind the native attention, gives what the layer gives."""
        return all(same_states(rest(x), y) for x, y in zip(self._between, self._expected, strict=True))


def same_states(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two [1, T, N] are the same but for rounding, which activations of 8 bits carry on; token by token."""
    return isinstance(theirs, Tensor) and bool(((ours - theirs).norm(dim=-1) < 1e-2 * theirs.norm(dim=-1)).all())

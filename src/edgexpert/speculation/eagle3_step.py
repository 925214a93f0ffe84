"""A draft's layer on a cache that it appends to: native where its weights are packed, in PyTorch modules elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from edgexpert.kernels import native
from edgexpert.kernels.draft_layer import DraftLayer
from edgexpert.kernels.modules import PackedLinear, RowNorm
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model, MidLayer


class DraftCache:
    """Rotated keys and values of a draft's layer, [key/value heads, capacity, head_dim] each, of which ``length`` are in use.

    Args:
        like: gives dtype and device.
    """

    def __init__(self, config: Eagle3Config, like: Tensor) -> None:
        self.length = 0
        self.keys = self.values = like.new_empty(config.num_key_value_heads, 0, config.head_dim)

    def append(self, tokens: int) -> int:
        """Makes room for ``tokens`` behind the others, to be filled in by the caller; returns where they begin."""
        start, self.length = self.length, self.length + tokens
        if self.length > self.keys.shape[1]:
            self.keys, self.values = (self._grown(states, start) for states in (self.keys, self.values))
        return start

    def take(self, other: DraftCache, length: int) -> None:
        """Begins with the first ``length`` tokens of another cache."""
        start = self.append(length)
        self.keys[:, start : self.length], self.values[:, start : self.length] = other.keys[:, :length], other.values[:, :length]

    def _grown(self, states: Tensor, used: int) -> Tensor:
        grown = states.new_empty(len(states), 2 * self.length, states.shape[2])
        grown[:, :used] = states[:, :used]
        return grown


class Step(Protocol):
    """`Eagle3Model.step` for one text, which appends to its cache."""

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache, mask: Tensor | None) -> Tensor:
        """States [n, H] of tokens [n] at ascending ``positions`` [n]; ``hidden`` [n, H] are those of the tokens before them."""


class ModuleStep:
    """In PyTorch: the reference, for any weights and device."""

    def __init__(self, model: Eagle3Model) -> None:
        self.model = model

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache, mask: Tensor | None) -> Tensor:
        past = cache.keys[:, : cache.length], cache.values[:, : cache.length]
        states, (keys, values) = self.model.step(tokens, hidden, positions, past, mask)
        start = cache.append(len(tokens))
        cache.keys[:, start : cache.length], cache.values[:, start : cache.length] = keys, values
        return states


class NativeStep:
    """The whole layer in one native call."""

    def __init__(self, model: Eagle3Model) -> None:
        config, layer = model.config, model.midlayer
        linears, norms = _parts(layer)
        self.model, self.rotary = model, layer.self_attn.rotary
        self._tables = self._both_halves(torch.arange(1))  # of all positions so far
        self.layer = DraftLayer(
            [linear.matrix for linear in linears[:4]], [linear.bias for linear in linears[:4]],
            [linear.matrix for linear in linears[4:]], [norm.weight for norm in norms],
            norm_before_residual=config.norm_before_residual, heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads, dim=config.head_dim, eps=config.rms_norm_eps)

    @staticmethod
    def covers(model: Eagle3Model) -> bool:
        """Whether a model's layer has the form of the native one, and there is one."""
        linears, norms = _parts(model.midlayer)
        return (all(isinstance(linear, PackedLinear) for linear in linears) and all(isinstance(norm, RowNorm) for norm in norms)
                and native.computes(norms[0].weight))

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache, mask: Tensor | None) -> Tensor:
        start = cache.append(len(tokens))
        embeddings = self.model.embed_tokens(tokens)
        states = self.layer(embeddings, hidden, *self._rotary(positions), cache.keys, cache.values, start, mask)
        return self.model.norm(states) if self.model.config.norm_output else states

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`Rotary.tables`, looked up: PyTorch's cosine wakes its threads, which then take ours their time."""
        if self.rotary.grows:
            return self._both_halves(positions)
        length = int(positions[-1]) + 1
        if length > len(self._tables[0]):
            self._tables = self._both_halves(torch.arange(2 * length))
        cos, sin = (table.index_select(0, positions) for table in self._tables)
        return cos, sin

    def _both_halves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (torch.cat([half, half], -1) for half in self.rotary.tables(positions))  # [n, dim]
        return cos, sin


def _parts(layer: MidLayer) -> tuple[list[Any], list[Any]]:
    """Linear layers and norms, in the order of `DraftLayer`."""
    attention, mlp = layer.self_attn, layer.mlp
    return ([attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj],
            [layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm])


def step_of(model: Eagle3Model) -> Step:
    """The fastest step that a model's weights allow."""
    return NativeStep(model) if NativeStep.covers(model) else ModuleStep(model)

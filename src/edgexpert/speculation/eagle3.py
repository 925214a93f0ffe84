"""The EAGLE-3 draft network: one decoder layer that sees the target's features and the token that follows them.

Parameters are named as in the official checkpoints. Source: EAGLE-3 (arXiv 2503.01840), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from edgexpert.core.library import ROPE_INIT_FUNCTIONS

KeyValue = tuple[Tensor, Tensor]
"""Rotated keys and values, each [..., key/value heads, tokens, head_dim]."""


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and switches of a draft.

    Attributes:
        vocab_size: size of the target's vocabulary.
        draft_vocab_size: how many of its tokens the draft can propose.
        fused_layers: target layers whose inputs are the features, low to high.
        norm_before_residual: the residual is the normed feature, not the feature itself.
        norm_before_fc: one RMSNorm over the three joined features before ``fc``.
        fc_norm: an RMSNorm of its own for each of the three features before ``fc``.
        norm_output: the next step gets the normed state (EAGLE-3.1), not the state before the last norm.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    fused_layers: tuple[int, int, int]
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False


class Rotary:
    """Rotary position embedding, computed for the positions at hand: there is no table that a long text could outgrow.

    Frequencies stay float32 whatever the model's dtype, and exist on the meta device too: hence no module and no buffer.
    """

    def __init__(self, config: Eagle3Config) -> None:
        scaling = config.rope_scaling or {}
        self.kind: str = scaling.get("rope_type", scaling.get("type", "default"))
        self.grows = self.kind in ("dynamic", "longrope")  # the angle of a position depends on the text's length
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.config = LlamaConfig(
            hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads, head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={**scaling, "rope_type": self.kind, "rope_theta": config.rope_theta})

    @cached_property
    def _fixed(self) -> tuple[Tensor, float]:
        return self._frequencies(None)

    def _frequencies(self, length: int | None) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2] and the factor on sine and cosine, for a text of ``length`` tokens."""
        if self.kind == "default":
            return 1.0 / self.theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim), 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[self.kind](self.config, torch.device("cpu"), seq_len=length)
        return frequencies, factor

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of ``positions`` [..., n], float32 [..., n, head_dim / 2]."""
        frequencies, factor = self._frequencies(int(positions.max()) + 1) if self.grows else self._fixed
        angles = positions[..., None].float() * frequencies.to(positions.device)
        return torch.cos(angles) * factor, torch.sin(angles) * factor

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates ``x`` [..., heads, n, head_dim] by ``positions`` [..., n]."""
        cos, sin = (table.unsqueeze(-3).to(x.dtype) for table in self.tables(positions))
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Attention(nn.Module):
    """Grouped-query attention whose input is twice as wide as its output."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = Rotary(config)
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, queries, bias)
        self.k_proj = nn.Linear(width, keys, bias)
        self.v_proj = nn.Linear(width, keys, bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias)

    def forward(self, x: Tensor, positions: Tensor, past: KeyValue | None, mask: Tensor | None) -> tuple[Tensor, KeyValue]:
        q, k, v = (projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
                   for projection in (self.q_proj, self.k_proj, self.v_proj))  # [..., heads, n, head_dim]
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], -2), torch.cat([past[1], v], -2))
        if mask is None:
            n, total = k.shape[-2], keys.shape[-2]
            mask = torch.ones(n, total, dtype=torch.bool, device=x.device).tril(total - n)
        out = F.scaled_dot_product_attention(q, keys, values, mask.unsqueeze(-3), enable_gqa=True)
        return self.o_proj(out.transpose(-2, -3).flatten(-2)), (k, v)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer: attends over token embedding and feature side by side, adds to the feature alone."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, embedding: Tensor, hidden: Tensor, positions: Tensor, past: KeyValue | None,
                mask: Tensor | None) -> tuple[Tensor, KeyValue]:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, key_value = self.self_attn(torch.cat([self.input_layernorm(embedding), normed], -1), positions, past, mask)
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key_value


class Eagle3Model(nn.Module):
    """The draft network. All methods take tensors with or without leading batch dimensions.

    Args:
        embedding: the target's token embedding [vocab_size, hidden_size], shared and frozen; None makes one of its own.
    """

    d2t: Tensor | None
    """Offset from each draft id to its target id, int64 [draft_vocab_size]; None when the draft has the whole vocabulary."""

    t2d: Tensor | None
    """Which target ids the draft can propose, bool [vocab_size]; None when all."""

    def __init__(self, config: Eagle3Config, embedding: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.owns_embedding = embedding is None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=embedding,
                                         _freeze=not self.owns_embedding)
        features = config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(3 * features, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(features, config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(3 * features, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size == config.vocab_size:
            self.d2t = self.t2d = None
        else:  # the first ids, until a vocabulary map is set
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Chooses the target ids that the draft can propose, int64 [draft_vocab_size], ascending and distinct."""
        offsets = target_ids - torch.arange(len(target_ids), device=target_ids.device)
        assert len(offsets) == self.config.draft_vocab_size
        assert (offsets.diff() >= 0).all(), "ascending and distinct ids have offsets that never fall"
        self.d2t = offsets
        self.t2d = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=target_ids.device)
        self.t2d[target_ids] = True

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape: ``d2t`` holds offsets, not ids."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def fuse(self, features: Tensor) -> Tensor:
        """One state [..., H] from the three target features [..., 3 * Ht], low to high."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, features.chunk(3, -1), strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, past: KeyValue | None = None,
             mask: Tensor | None = None) -> tuple[Tensor, KeyValue]:
        """Runs the layer on tokens, each with the state of the position before it.

        Args:
            tokens: int64 [..., n].
            hidden: fused features or states of an earlier step, [..., n, H].
            positions: int64 [..., n].
            past: keys and values of earlier tokens, p of them.
            mask: who attends to whom, bool [..., n, p + n]; None for causal.

        Returns:
            The states [..., n, H], which are the ``hidden`` of the next step and the input of `logits`, and the keys and
            values of these n tokens alone.
        """
        hidden, key_value = self.midlayer(self.embed_tokens(tokens), hidden, positions, past, mask)
        return self.norm(hidden) if self.config.norm_output else hidden, key_value

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over draft ids [..., draft_vocab_size] of states that `step` gave."""
        logits: Tensor = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return logits

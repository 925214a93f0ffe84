"""Decoder layers in one native call, or their attention half alone; csrc/layer.h says what they compute.

There is no twin of these in PyTorch: without compiled kernels a model keeps the library's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgexpert.core.routing import Routing, Scores
from edgexpert.kernels import native
from edgexpert.kernels.native import address_of
from edgexpert.weights.matrix import PackedExperts, PackedMatrix


def attention_layer(
    matrices: Sequence[PackedMatrix],
    biases: Sequence[Tensor | None],
    norm: Tensor | None,
    head_norms: Sequence[Tensor | None],
    *,
    per_head: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    eps: float,
    scale: float,
    residual: float,
    clip: float,
) -> Any:
    """The attention half of a decoder layer, see csrc/layer.h. Its tensors must outlive it.

    Args:
        matrices: of queries, keys, values and output; ``biases`` likewise.
        norm: of what comes in, [H]; None where a draft's layer norms it itself.
        head_norms: RMSNorm of queries and of keys, for each head or (not ``per_head``) over all heads together.
    """
    hidden, width, kv_width = matrices[0].channels, heads * dim, kv_heads * dim
    out = hidden if norm is not None else matrices[3].outputs
    shapes = [(hidden, width), (hidden, kv_width), (hidden, kv_width), (width, out)]
    if [(matrix.channels, matrix.outputs) for matrix in matrices] != shapes or heads % kv_heads:
        raise ValueError(f"expected matrices of {shapes}")
    widths = [*(outputs for _, outputs in shapes), hidden, *((dim, dim) if per_head else (width, kv_width))]
    vectors = zip((*biases, norm, *head_norms), widths, strict=True)
    addresses = [address_of(vector, torch.float32, size) for vector, size in vectors]
    bound = [native._bind(matrix) for matrix in matrices]
    return native._native.AttentionLayer(*bound, *addresses, per_head, heads, kv_heads, dim, eps, scale, residual, clip)


def run_attention_layer(
    layer: Any, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int, mask: Tensor | None, out: Tensor
) -> None:
    """``out`` = ``x`` [1, T, H] + its attention; appends to the cache ``keys`` and ``values`` [1, kv heads, capacity, dim] behind
    ``length`` tokens. ``cos`` and ``sin`` are [1, T, dim]; ``mask`` is [1, 1, T, length + T], or None for a text."""
    stage, context = _of_stage(x, cos, sin, keys, length, mask)
    cache = [address_of(states, torch.float32, *keys.shape) for states in (keys, values)]
    native._native.AttentionLayer.run(layer, *stage, *cache, *context, address_of(out, torch.float32, *x.shape))


def _of_stage(
    x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, length: int, mask: Tensor | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Native arguments that all layers of a stage share: its states, and what they attend to."""
    (_, tokens, hidden), (_, _, capacity, dim) = x.shape, keys.shape
    if length + tokens > capacity:
        raise ValueError(f"{length} + {tokens} tokens in a cache for {capacity}")
    rotary = [address_of(tensor, torch.float32, 1, tokens, dim) for tensor in (cos, sin)]
    seen = address_of(mask, torch.bool, 1, 1, tokens, length + tokens)
    return (address_of(x, torch.float32, 1, tokens, hidden), tokens, *rotary), (capacity, length, seen)


def expert_layer(
    norm: Tensor, router: Tensor, gate_up: PackedExperts, down: PackedExperts, biases: Sequence[Tensor | None], *, top_k: int,
    sigmoid: bool, normalise: bool, eps: float, router_scale: float, residual: float, activation: str, gated: bool,
) -> Any:
    """The expert half of a decoder layer, see csrc/layer.h. Its tensors must outlive it."""
    matrices = (gate_up, down)
    shapes = [(len(matrix.values), matrix.outputs) for matrix in matrices]
    addresses = [address_of(bias, torch.float32, *shape) for bias, shape in zip(biases, shapes, strict=True)]
    bound = (*(native._bind(matrix) for matrix in matrices), *addresses)
    rule = (top_k, sigmoid, normalise, eps, router_scale, residual)
    hidden = gate_up.channels
    floats = (address_of(norm, torch.float32, hidden), address_of(router, torch.float32, len(gate_up.values), hidden))
    return native._native.ExpertLayer(*floats, *rule, *bound, native._ACTIVATIONS[activation], gated)


def run_expert_layer(layer: Any, x: Tensor, out: Tensor, experts: Tensor, weights: Tensor) -> None:
    """``out`` = ``x`` [1, T, H] + its experts; fills in the chosen ``experts`` int64 [T, k] and their ``weights`` [T, k]."""
    native._native.ExpertLayer.run(layer, x.data_ptr(), x.shape[1], out.data_ptr(), experts.data_ptr(), weights.data_ptr())


def layer_stack(layers: Sequence[tuple[Any, Any]]) -> Any:
    """Decoder layers behind each other: the `attention_layer` and the `expert_layer` of each, all of the same sizes."""
    stack = native._native.LayerStack()
    for attention, experts in layers:
        stack.add(attention, experts)
    return stack


@dataclass(frozen=True, eq=False)
class StageRule:
    """What a policy does to a stage of T tokens, for the compiled twin of its rules.

    Attributes:
        depth: of each token, int64 [T].
        tiers: prompt-wise expert reuse: `Tier` of each token, int64 [T]; None for no reuse.
        minor, trivial: (k, n): such a token takes n of its k best experts.
        keep: coarse pruning: tokens whose experts stay, bool [T]; None for all.
        keep_channels: fine pruning: share of a token's importance that its channels hold; None for all channels.
        selection_ratio: depth-aware coalescing; None for every channel that some candidate needs.
        calibrated: candidates compute on all channels that are loaded for their expert.
        token_weight: of the channel score, float32 [T]; None for the routing weights.
    """

    depth: Tensor
    tiers: Tensor | None = None
    minor: tuple[int, int] = (0, 0)
    trivial: tuple[int, int] = (0, 0)
    keep: Tensor | None = None
    keep_channels: float | None = None
    selection_ratio: float | None = None
    calibrated: bool = False
    token_weight: Tensor | None = None

    def bind(self) -> Any:
        """The native form; its tensors must outlive it."""
        tokens = len(self.depth)
        return native._native.StageRule(
            address_of(self.tiers, torch.int64, tokens), *self.minor, *self.trivial,
            address_of(self.keep, torch.bool, tokens), self.keep_channels is not None, self.keep_channels or 0.0,
            self.selection_ratio is not None, self.selection_ratio or 0.0,
            address_of(self.depth, torch.int64, tokens), address_of(self.token_weight, torch.float32, tokens),
        )


def choose_experts(rule: StageRule, routing: Routing, scores: Scores) -> Routing:
    """What a rule's reuse or coarse pruning makes of a routing: `edgexpert.policy.reuse` and `.pruning`, compiled."""
    (tokens, k), count = routing.experts.shape, routing.num_experts
    choice, gate = (tensor.contiguous() for tensor in (scores.choice, scores.gate))
    experts, weights = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (routing.experts, routing.weights))
    opinion = [address_of(tensor, torch.float32, tokens, count) for tensor in (choice, gate)]
    chosen = address_of(experts, torch.int64, tokens, k), address_of(weights, torch.float32, tokens, k)
    native._native.choose_experts(rule.bind(), *opinion, scores.normalise, scores.scale, tokens, k, count, *chosen)
    return routing if torch.equal(experts, routing.experts) else Routing(experts, weights, count)


@dataclass(frozen=True, eq=False)
class Decisions:
    """What a policy decided in L layers, for T tokens that choose k of E experts.

    Attributes:
        experts, weights: of each token, int64 and float32 [L, T, k]; E stands for no expert.
        gate_up, down: channels that are loaded, bool [L, E, C]; None where all are.
        gate_up_compute, down_compute: channels that each pair computes on, bool [L, T * k, C], of which the first rows are used;
            None where a pair computes on all that its expert loads.
        read: loaded channels of gate/up and the groups that they lie in, and the same of down, int64 [L, 4].
    """

    experts: Tensor
    weights: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    gate_up_compute: Tensor | None
    down_compute: Tensor | None
    read: Tensor

    @classmethod
    def empty(cls, rule: StageRule, choices: Sequence[int], experts: int, channels: tuple[int, int]) -> Decisions:
        """To be filled in.

        Args:
            choices: L, T and k.
            channels: of gate/up and of down.
        """
        layers, tokens, top_k = choices
        selects, of_pairs = rule.keep_channels is not None, rule.keep_channels is not None and not rule.calibrated
        loaded = [torch.empty(layers, experts, c, dtype=torch.bool) if selects else None for c in channels]
        compute = [torch.empty(layers, tokens * top_k, c, dtype=torch.bool) if of_pairs else None for c in channels]
        chosen, weights = torch.empty(*choices, dtype=torch.int64), torch.empty(*choices)
        return cls(chosen, weights, loaded[0], loaded[1], compute[0], compute[1], torch.empty(layers, 4, dtype=torch.int64))


def run_layer_stack(
    stack: Any, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int, mask: Tensor | None,
    fused: Sequence[int], features: Tensor, experts: Tensor, weights: Tensor, rule: StageRule | None, decided: Decisions | None,
) -> tuple[Tensor, list[int]]:
    """Runs ``x`` [1, T, H] through all layers of a stack; arguments as in `run_attention_layer`, with caches [layers, ...].

    Args:
        fused: layers whose inputs are wanted; the number of layers stands for what comes out.
        features: filled in with those inputs side by side, [T, len(fused) * H].
        experts, weights: filled in with what each layer's router chose, int64 and float32 [layers, T, k].
        rule: what a policy does; None for nothing.
        decided: filled in with what it decided, from `Decisions.empty`.

    Returns:
        The states [1, T, H], and how many experts each layer loaded.
    """
    count, _, *cache = keys.shape
    stage, context = _of_stage(x, cos, sin, keys[0], length, mask)
    caches = [address_of(states, torch.float32, count, 1, *cache) for states in (keys, values)]
    (_, tokens, hidden), top_k = x.shape, experts.shape[2]
    wanted = address_of(features, torch.float32, tokens, len(fused) * hidden)
    chosen = address_of(experts, torch.int64, count, tokens, top_k), address_of(weights, torch.float32, count, tokens, top_k)
    out = torch.empty_like(x)
    into = [0 if part is None else part.data_ptr() for part in vars(decided).values()] if decided is not None else []
    bound = None if rule is None else rule.bind()
    loaded = native._native.LayerStack.run(
        stack, *stage, *caches, *context, fused, wanted, out.data_ptr(), *chosen, bound, into
    )
    return out, loaded

"""Decoder layers in one native call, or their attention half alone; csrc/layer.h says what they compute.

There are no such calls in PyTorch: without native kernels a model keeps the library's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgexpert.core.routing import Routing, Scores
from edgexpert.kernels import native
from edgexpert.kernels.native import array
from edgexpert.weights.matrix import PackedExperts, PackedMatrix
from edgexpert.weights.store import ExpertStore


def attention_layer(
    matrices: Sequence[PackedMatrix],
    biases: Sequence[Tensor | None],
    norm: Tensor | None,
    head_norms: Sequence[Tensor | None],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    eps: float,
    scale: float,
    residual: float,
    clip: float,
) -> Any:
    """The attention half of a decoder layer, see csrc/layer.h.

    Args:
        matrices: of queries, keys, values and output; ``biases`` likewise.
        norm: of what comes in, [H]; None where a draft's layer norms it itself.
        head_norms: RMSNorm of queries and of keys, for each head [dim] or over all heads together.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    query, key, value, output = (native.bound(matrix) for matrix in matrices)
    query_bias, key_bias, value_bias, output_bias = (array(bias) for bias in biases)
    return native._native.AttentionLayer(
        query=query, key=key, value=value, output=output, query_bias=query_bias, key_bias=key_bias, value_bias=value_bias,
        output_bias=output_bias, norm=array(norm), query_norm=array(head_norms[0]), key_norm=array(head_norms[1]), heads=heads,
        kv_heads=kv_heads, dim=dim, eps=eps, scale=scale, residual=residual, clip=clip,
    )


def context(cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int, mask: Tensor | None) -> Any:
    """What the tokens of a stage attend to, the same in all layers.

    Args:
        cos, sin: [1, T, dim].
        keys, values: the cache, [1, kv heads, capacity, dim], or of all layers of a stack [layers, 1, ...]; it has ``length``
            tokens, behind which those of the stage are appended.
        mask: who attends to whom, bool [1, 1, T, length + T]; None for a text.
    """
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("a cache that is not contiguous would not be written to")
    cache = (-1, *keys.shape[-3:])
    return native._native.Context(
        cos=array(cos)[0], sin=array(sin)[0], keys=array(keys).reshape(cache), values=array(values).reshape(cache), length=length,
        mask=None if mask is None else array(mask)[0, 0],
    )


def run_attention_layer(layer: Any, x: Tensor, context: Any, out: Tensor) -> None:
    """``out`` = ``x`` [1, T, H] + its attention; appends to the cache of ``context``."""
    layer.run(x=array(x)[0], context=context, out=array(out)[0])


def expert_layer(
    norm: Tensor, router: Tensor, gate_up: PackedExperts, down: PackedExperts, biases: Sequence[Tensor | None], *, top_k: int,
    sigmoid: bool, normalise: bool, eps: float, router_scale: float, residual: float, activation: str, gated: bool, number: int,
    store: ExpertStore | None,
) -> Any:
    """The expert half of a decoder layer, see csrc/layer.h.

    Args:
        number: of the layer, as the store counts.
        store: is told which experts are used; None where all of them are in memory to stay.
    """
    return native._native.ExpertLayer(
        norm=array(norm), router=array(router), gate_up=native.bound(gate_up), down=native.bound(down),
        gate_up_bias=array(biases[0]), down_bias=array(biases[1]), top_k=top_k, sigmoid=sigmoid, normalise=normalise, eps=eps,
        router_scale=router_scale, residual=residual, activation=native.native_activation(activation), gated=gated, number=number,
        store=store,
    )


def run_expert_layer(
    layer: Any, x: Tensor, experts: Tensor, weights: Tensor, rule: StageRule | None, decided: Decisions | None,
    observed: Observation | None, out: Tensor,
) -> int:
    """``out`` = ``x`` [1, T, H] + its experts; returns how many were loaded. Arguments as in `run_layer_stack`, for one layer."""
    loaded: int = layer.run(
        x=array(x)[0], experts=array(experts), weights=array(weights), rule=None if rule is None else rule.bind(),
        decision=None if decided is None else decided.bind(), observation=None if observed is None else observed.bind(),
        out=array(out)[0],
    )
    return loaded


def layer_stack(layers: Sequence[tuple[Any, Any]]) -> Any:
    """Decoder layers behind each other: the `attention_layer` and the `expert_layer` of each, all of the same sizes."""
    stack = native._native.LayerStack()
    for attention, experts in layers:
        stack.add(attention, experts)
    return stack


@dataclass(frozen=True, eq=False)
class StageRule:
    """What a policy does to a stage of T tokens, for the native form of its rules.

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
        """The native form."""
        return native._native.StageRule(
            depth=array(self.depth), tiers=array(self.tiers), minor=self.minor, trivial=self.trivial, keep=array(self.keep),
            keep_channels=self.keep_channels, selection_ratio=self.selection_ratio, token_weight=array(self.token_weight),
        )


def choose_experts(rule: StageRule, routing: Routing, scores: Scores) -> Routing:
    """What a rule's reuse or coarse pruning makes of a routing: `edgexpert.policy.reuse` and `.pruning`, natively."""
    experts, weights = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (routing.experts, routing.weights))
    native._native.choose_experts(
        rule=rule.bind(), choice=array(scores.choice.contiguous()), gate=array(scores.gate.contiguous()),
        normalise=scores.normalise, scale=scores.scale, experts=array(experts), weights=array(weights),
    )
    return routing if torch.equal(experts, routing.experts) else Routing(experts, weights, routing.num_experts)


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

    def bind(self) -> Any:
        """The native form."""
        return native._native.Decision(
            experts=array(self.experts), weights=array(self.weights), gate_up=array(self.gate_up), down=array(self.down),
            gate_up_compute=array(self.gate_up_compute), down_compute=array(self.down_compute), read=array(self.read),
        )


@dataclass(frozen=True, eq=False)
class Observation:
    """What somebody who watches gets to see of L layers, for T tokens that choose k of E experts.

    Attributes:
        logits: of the router, float32 [L, T, E].
        inputs: of gate/up, [L, T, H].
        down_inputs: of down, for each pair token by token, [L, T * k, I], of which the first rows are used.
    """

    logits: Tensor
    inputs: Tensor
    down_inputs: Tensor

    @classmethod
    def empty(cls, choices: Sequence[int], experts: int, channels: tuple[int, int]) -> Observation:
        """To be filled in; arguments as in `Decisions.empty`."""
        layers, tokens, top_k = choices
        return cls(torch.empty(layers, tokens, experts), torch.empty(layers, tokens, channels[0]),
                   torch.empty(layers, tokens * top_k, channels[1]))

    def bind(self) -> Any:
        """The native form."""
        return native._native.Observation(
            logits=array(self.logits), inputs=array(self.inputs), down_inputs=array(self.down_inputs))


def run_layer_stack(
    stack: Any, x: Tensor, context: Any, fused: Sequence[int], features: Tensor, experts: Tensor, weights: Tensor,
    rule: StageRule | None, decided: Decisions | None, observed: Observation | None,
) -> tuple[Tensor, list[int]]:
    """Runs ``x`` [1, T, H] through all layers of a stack.

    Args:
        fused: layers whose inputs are wanted; the number of layers stands for what comes out.
        features: filled in with those inputs side by side, [T, len(fused) * H].
        experts, weights: filled in with what each layer's router chose, int64 and float32 [layers, T, k].
        rule: what a policy does; None for nothing.
        decided: filled in with what it decided, from `Decisions.empty`; None without a rule.
        observed: filled in with what went through, from `Observation.empty`; None if nobody watches.

    Returns:
        The states [1, T, H], and how many experts each layer loaded.
    """
    out = torch.empty_like(x)
    loaded = stack.run(
        x=array(x)[0], context=context, fused=fused, features=array(features), experts=array(experts), weights=array(weights),
        rule=None if rule is None else rule.bind(), decision=None if decided is None else decided.bind(),
        observation=None if observed is None else observed.bind(), out=array(out)[0],
    )
    return out, loaded

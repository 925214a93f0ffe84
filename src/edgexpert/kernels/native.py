"""The native kernels, and PyTorch where there are none.

Each function has the signature, the result and the shapes of its namesake in `edgexpert.kernels.reference`. All instruction sets
give the same bits; a token's result is the same whatever other tokens share the call and however many threads run. Against
PyTorch, 4- and 8-bit products are equal bit for bit; activation functions (and 16-bit products) differ in the last places.

``EDGEXPERT_KERNELS`` = auto | avx512 | avx2 | neon | portable | torch chooses; auto takes the best that this processor has.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from edgexpert.core.errors import UserError
from edgexpert.core.routing import Routing
from edgexpert.kernels import reference
from edgexpert.kernels.reference import Pairs
from edgexpert.weights.matrix import PackedExperts, PackedMatrix, TiledMatrix

try:
    from edgexpert.kernels import _native  # type: ignore[attr-defined]
except ImportError:  # installed without a compiler
    _native = None

PATHS = ("auto", "avx512", "avx2", "neon", "portable", "torch")
MAX_THREADS = 1024


@cache
def path() -> str:
    """What computes: "avx512", "avx2", "neon", "portable", or "torch" where the native kernels are absent or not wanted."""
    wanted = os.environ.get("EDGEXPERT_KERNELS", "auto")
    if wanted not in PATHS:
        raise UserError(f"EDGEXPERT_KERNELS is {wanted}; set it to one of {', '.join(PATHS)}")
    if wanted == "torch" or (_native is None and wanted == "auto"):
        return "torch"
    if _native is None:
        raise UserError(f"EDGEXPERT_KERNELS asks for {wanted}, but EdgeXpert was installed without a compiler; set it to torch")
    if not _native.select_isa(wanted):
        raise UserError(f"EDGEXPERT_KERNELS asks for {wanted}, which this processor lacks; set it to auto")
    return str(_native.isa())


def available() -> list[str]:
    """The paths that this installation and processor have, best first."""
    return [name for name in PATHS[1:] if name == "torch" or (_native is not None and _native.has_isa(name))]


def set_threads(threads: int) -> None:
    """How many threads the native kernels use (at first, one for each processor).

    Raises:
        UserError: the number is not from 1 to 1024.
    """
    if not 1 <= threads <= MAX_THREADS:
        raise UserError(f"`threads` must be from 1 to {MAX_THREADS}, not {threads}")
    if _native is not None:
        _native.set_threads(threads)


def get_threads() -> int:
    """How many threads compute, PyTorch's where that does."""
    return torch.get_num_threads() if path() == "torch" else int(_native.threads())


def array(tensor: Tensor | None) -> Any:
    """A tensor as the native side takes it. That checks type, shape and contiguity, and keeps alive what it points into."""
    return None if tensor is None else (tensor.detach() if tensor.requires_grad else tensor).numpy()


def bound(matrix: PackedMatrix) -> Any:
    """The native form of a matrix, made once."""
    known = matrix.__dict__.get("_native")
    if known is None:
        rows = [_stacked(matrix.values, _STORED[matrix.bits]), None, None]
        for i, (tensor, kind) in enumerate(((matrix.scales, torch.float16), (matrix.zeros, torch.uint8)), 1):
            rows[i] = None if tensor is None else _stacked(tensor, kind)
        known = _native.Weights(
            values=array(rows[0]), scales=array(rows[1]), zeros=array(rows[2]),
            slots=array(matrix.slots) if isinstance(matrix, PackedExperts) else None, channels=matrix.channels,
            outputs=matrix.outputs, bits=matrix.bits, group=matrix.group, tiled=isinstance(matrix, TiledMatrix),
        )
        matrix.__dict__["_native"] = known
    return known


def place(experts: PackedExperts, expert: int, slot: int) -> None:
    """From now on an expert lies in that row of the tensors; in none if ``slot`` is negative."""
    assert experts.slots is not None, "experts of which all have a place of their own"
    experts.slots[expert] = slot
    if path() != "torch":
        bound(experts).put(expert, slot)


_STORED = {4: torch.uint8, 8: torch.int8, 16: torch.bfloat16}


def _stacked(tensor: Tensor, kind: torch.dtype) -> Tensor:
    """Rows of one matrix or of many as bytes, or as 16-bit words, [matrices, C, n]."""
    if tensor.dtype != kind:
        raise ValueError(f"expected {kind}, not {tensor.dtype}")
    tensor = tensor[None] if tensor.dim() == 2 else tensor
    return tensor.view(torch.uint16 if kind == torch.float16 else torch.uint8)


def _float(x: Tensor, columns: int) -> Tensor:
    """x as the kernels read it."""
    if x.dtype != torch.float32 or x.shape[-1] != columns:
        raise ValueError(f"expected float32 [.., {columns}], not {x.dtype} {tuple(x.shape)}")
    return x if x.is_contiguous() else x.contiguous()


def _pairs(pairs: Pairs) -> Any:
    """The native form of pairs, made once: a layer's pairs serve gate/up and down."""
    known = pairs.__dict__.get("_native")
    if known is None:
        known = _native.Pairs(experts=array(pairs.experts), offsets=array(pairs.offsets), tokens=array(pairs.tokens))
        pairs.__dict__["_native"] = known
    return known


def group(routing: Routing) -> tuple[Pairs, Tensor]:
    """The pairs of a routing by expert, and the order [P] in which its own pairs, by token, now stand; see `Pairs.group`."""
    if path() == "torch":
        return Pairs.group(routing.pair_expert, routing.pair_token)
    expert, token, count = routing.pair_expert, routing.pair_token, routing.num_experts
    experts, offsets = expert.new_empty(count), expert.new_empty(count + 1)
    tokens, order = torch.empty_like(expert), torch.empty_like(expert)
    loaded = _native.group(
        expert=array(expert.contiguous()), token=array(token.contiguous()), experts=array(experts), offsets=array(offsets),
        tokens=array(tokens), order=array(order),
    )
    return Pairs(experts[:loaded], offsets[: loaded + 1], tokens), order


def computes(x: Tensor) -> bool:
    """Whether native code can work on a tensor: it is float32, on the CPU, and there is such code."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and path() != "torch"


def needed_channels(activations: Tensor, routing: Routing, keep_channels: float) -> Tensor:
    """`edgexpert.policy.pruning.needed_channels` without its sort."""
    weight, tokens = routing.pair_weight.float().contiguous(), len(routing.experts)
    offsets = F.pad(torch.bincount(routing.pair_token, minlength=tokens).cumsum(0), (1, 0))
    mask = torch.empty(activations.shape, dtype=torch.bool)
    _native.needed_channels(activations=array(activations.contiguous()), weights=array(weight), offsets=array(offsets),
                            share=keep_channels, mask=array(mask))
    return mask


def salient_channels(
    score: Tensor, mask: Tensor, pair_expert: Tensor, pair_depth: Tensor, num_experts: int, selection_ratio: float
) -> Tensor:
    """`edgexpert.policy.coalescing.salient_channels` in one pass."""
    loaded = torch.zeros(num_experts, score.shape[1], dtype=torch.bool)
    _native.salient_channels(
        scores=array(score.contiguous()), mask=array(mask.contiguous()), pair_expert=array(pair_expert.contiguous()),
        pair_depth=array(pair_depth.contiguous()), selection_ratio=selection_ratio, loaded=array(loaded),
    )
    return loaded


def linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """`reference.linear`."""
    if path() == "torch":
        return reference.linear(x, matrix, bias)
    x = _float(x, matrix.channels)
    out = x.new_empty(len(x), matrix.outputs)
    _native.linear(bound(matrix), array(x), array(bias), array(out))
    return out


def gate_up(
    x: Tensor,
    experts: PackedExperts,
    pairs: Pairs,
    loaded: Tensor | None = None,
    compute: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """`reference.gate_up`."""
    if path() == "torch":
        return reference.gate_up(x, experts, pairs, loaded, compute, bias, activation, gated)
    x = _float(x, experts.channels)
    out = x.new_empty(len(pairs.tokens), experts.outputs // 2 if gated else experts.outputs)
    _native.gate_up(
        weights=bound(experts), x=array(x), pairs=_pairs(pairs), loaded=array(loaded), compute=array(compute), bias=array(bias),
        activation=native_activation(activation), gated=gated, out=array(out),
    )
    return out


def down(
    activations: Tensor,
    experts: PackedExperts,
    pairs: Pairs,
    weights: Tensor,
    tokens: int,
    loaded: Tensor | None = None,
    compute: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`reference.down`."""
    if path() == "torch":
        return reference.down(activations, experts, pairs, weights, tokens, loaded, compute, bias)
    x = _float(activations, experts.channels)
    out = x.new_empty(tokens, experts.outputs)
    _native.down(
        weights=bound(experts), x=array(x), pairs=_pairs(pairs), loaded=array(loaded), compute=array(compute), bias=array(bias),
        pair_weights=array(weights), out=array(out),
    )
    return out


def native_activation(name: str) -> Any:
    return getattr(_native.Activation, name)

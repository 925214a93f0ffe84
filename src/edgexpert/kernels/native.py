"""The compiled kernels, and PyTorch where there are none.

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
from edgexpert.weights.matrix import ALIGNMENT, PackedExperts, PackedMatrix, TiledMatrix

try:
    from edgexpert.kernels import _native  # type: ignore[attr-defined]
except ImportError:  # installed without a compiler
    _native = None

PATHS = ("auto", "avx512", "avx2", "neon", "portable", "torch")
MAX_THREADS = 1024
_ACTIVATIONS = {name: i for i, name in enumerate(("silu", "gelu", "gelu_tanh", "relu", "identity"))}


@cache
def path() -> str:
    """What computes: "avx512", "avx2", "neon", "portable", or "torch" where the compiled kernels are absent or not wanted."""
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
    """How many threads the compiled kernels use (at first, one for each processor).

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


def _bind(matrix: PackedMatrix) -> Any:
    """The native view of a matrix, made once."""
    bound = matrix.__dict__.get("_native")
    if bound is None:
        row = matrix.values.shape[-1] * matrix.values.element_size()
        padded = row * 8 // matrix.bits
        kinds = {4: torch.uint8, 8: torch.int8, 16: torch.bfloat16}
        _check(matrix.values, kinds[matrix.bits], (matrix.channels, matrix.values.shape[-1]))
        count = len(matrix.values) if isinstance(matrix, PackedExperts) else 1
        tiles = len(matrix.values) if isinstance(matrix, TiledMatrix) else 1
        if padded % ALIGNMENT or padded * tiles < matrix.outputs or matrix.channels % 4:
            raise ValueError(f"{matrix.outputs} outputs in rows of {padded}, {matrix.channels} channels")
        addresses, strides = [matrix.values.data_ptr()], [matrix.values.stride(0) * matrix.values.element_size()]
        for tensor, kind in ((matrix.scales, torch.float16), (matrix.zeros, torch.uint8)):
            if tensor is not None:
                _check(tensor, kind, (matrix.channels // matrix.group, padded))
            addresses.append(0 if tensor is None else tensor.data_ptr())
            strides.append(0 if tensor is None else tensor.stride(0) * tensor.element_size())
        shape = (count, matrix.channels, matrix.outputs, padded, matrix.bits, matrix.group, tiles)
        bound = _native.Weights(*addresses, *strides, *shape)
        matrix.__dict__["_native"] = bound
    return bound


def _check(tensor: Tensor, kind: torch.dtype, shape: tuple[int, int]) -> None:
    last = tensor[0] if tensor.dim() == 3 else tensor
    if tensor.dtype != kind or tuple(last.shape) != shape or not last.is_contiguous():
        raise ValueError(f"expected contiguous {kind} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")


def _float(x: Tensor, columns: int) -> Tensor:
    """x as the kernels read it."""
    if x.dtype != torch.float32 or x.shape[-1] != columns:
        raise ValueError(f"expected float32 [.., {columns}], not {x.dtype} {tuple(x.shape)}")
    return x if x.is_contiguous() else x.contiguous()


def address_of(tensor: Tensor | None, kind: torch.dtype, *shape: int) -> int:
    """Where a tensor's values begin, 0 for None; ValueError unless it is contiguous, of this type and shape."""
    if tensor is None:
        return 0
    if tensor.dtype != kind or tensor.shape != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()}"
        raise ValueError(f"expected contiguous {kind} {shape}, not {found}")
    return tensor.data_ptr()


def _pairs(pairs: Pairs) -> tuple[int, ...]:
    """The native arguments of pairs, made once: a layer's pairs serve gate/up and down."""
    bound: tuple[int, ...] | None = pairs.__dict__.get("_native")
    if bound is None:
        loaded, count = len(pairs.experts), len(pairs.tokens)
        arrays = ((pairs.experts, loaded), (pairs.offsets, loaded + 1), (pairs.tokens, count))
        bound = (loaded, count, *(address_of(tensor, torch.int64, size) for tensor, size in arrays))
        pairs.__dict__["_native"] = bound
    return bound


def _selection(
    experts: PackedExperts, pairs: Pairs, loaded: Tensor | None, compute: Tensor | None, bias: Tensor | None
) -> tuple[int, int, int]:
    """The native arguments of a selection, and of a bias."""
    count = len(experts.values)
    return (
        address_of(loaded, torch.bool, count, experts.channels),
        address_of(compute, torch.bool, len(pairs.tokens), experts.channels),
        address_of(bias, torch.float32, count, experts.outputs),
    )


def group(routing: Routing) -> tuple[Pairs, Tensor]:
    """The pairs of a routing by expert, and the order [P] in which its own pairs, by token, now stand; see `Pairs.group`."""
    if path() == "torch":
        return Pairs.group(routing.pair_expert, routing.pair_token)
    expert, token, count = routing.pair_expert, routing.pair_token, routing.num_experts
    pairs = len(expert)
    experts, offsets = expert.new_empty(count), expert.new_empty(count + 1)
    tokens, order = torch.empty_like(expert), torch.empty_like(expert)
    addresses = [address_of(t, torch.int64, len(t)) for t in (expert, token, experts, offsets, tokens, order)]
    loaded = _native.group(pairs, count, *addresses)
    return Pairs(experts[:loaded], offsets[: loaded + 1], tokens), order


def computes(x: Tensor) -> bool:
    """Whether compiled code can work on a tensor: it is float32, on the CPU, and there is such code."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and path() != "torch"


def needed_channels(activations: Tensor, routing: Routing, keep_channels: float) -> Tensor:
    """`edgexpert.policy.pruning.needed_channels` without its sort."""
    pairs, channels = len(routing.pair_token), activations.shape[1]
    x = activations.contiguous()
    weight, tokens = routing.pair_weight.float().contiguous(), len(routing.experts)
    offsets = F.pad(torch.bincount(routing.pair_token, minlength=tokens).cumsum(0), (1, 0))
    mask = torch.empty(pairs, channels, dtype=torch.bool)
    arrays = (address_of(x, torch.float32, pairs, channels), weight.data_ptr(), offsets.data_ptr())
    _native.needed_channels(*arrays, tokens, channels, keep_channels, mask.data_ptr())
    return mask


def salient_channels(
    score: Tensor, mask: Tensor, pair_expert: Tensor, pair_depth: Tensor, num_experts: int, selection_ratio: float
) -> Tensor:
    """`edgexpert.policy.coalescing.salient_channels` in one pass."""
    pairs, channels = score.shape
    loaded = torch.zeros(num_experts, channels, dtype=torch.bool)
    matrices = [tensor.contiguous() for tensor in (score, mask)]
    of_pairs = [tensor.contiguous() for tensor in (pair_expert, pair_depth)]
    arrays = [
        *(address_of(tensor, kind, pairs, channels) for tensor, kind in zip(matrices, (torch.float32, torch.bool), strict=True)),
        *(address_of(tensor, torch.int64, pairs) for tensor in of_pairs),
    ]
    _native.salient_channels(*arrays, pairs, channels, selection_ratio, num_experts, loaded.data_ptr())
    return loaded


def linear(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """`reference.linear`."""
    if path() == "torch":
        return reference.linear(x, matrix, bias)
    x = _float(x, matrix.channels)
    out = x.new_empty(len(x), matrix.outputs)
    _native.linear(_bind(matrix), x.data_ptr(), len(x), address_of(bias, torch.float32, matrix.outputs), out.data_ptr())
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
    selection = _selection(experts, pairs, loaded, compute, bias)
    _native.gate_up(
        _bind(experts), x.data_ptr(), len(x), *_pairs(pairs), *selection, _ACTIVATIONS[activation], gated, out.data_ptr()
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
    if len(x) != len(pairs.tokens):
        raise ValueError(f"expected a row for each of {len(pairs.tokens)} pairs, not {len(x)}")
    out = x.new_empty(tokens, experts.outputs)
    selection = _selection(experts, pairs, loaded, compute, bias)
    weight = address_of(weights, torch.float32, len(pairs.tokens))
    _native.down(_bind(experts), x.data_ptr(), tokens, *_pairs(pairs), *selection, weight, out.data_ptr())
    return out


def run_experts(
    x: Tensor,
    gate_up_experts: PackedExperts,
    down_experts: PackedExperts,
    pairs: Pairs,
    weights: Tensor,
    loaded: Tensor | None = None,
    compute: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """`gate_up` (with its selection) and `down` (on all channels) in one call: x [T, H] -> [T, H]."""
    if path() == "torch":
        inner = reference.gate_up(x, gate_up_experts, pairs, loaded, compute, gate_up_bias, activation, gated)
        return reference.down(inner, down_experts, pairs, weights, len(x), bias=down_bias)
    x = _float(x, gate_up_experts.channels)
    width, count = gate_up_experts.outputs // (2 if gated else 1), len(gate_up_experts.values)
    if width != down_experts.channels or count != len(down_experts.values):
        raise ValueError(f"gate/up of {count} x {width} outputs, down of {len(down_experts.values)} x {down_experts.channels}")
    out = x.new_empty(len(x), down_experts.outputs)
    _native.experts(
        _bind(gate_up_experts),
        _bind(down_experts),
        x.data_ptr(),
        len(x),
        *_pairs(pairs),
        *_selection(gate_up_experts, pairs, loaded, compute, gate_up_bias),
        address_of(down_bias, torch.float32, count, down_experts.outputs),
        _ACTIVATIONS[activation],
        gated,
        address_of(weights, torch.float32, len(pairs.tokens)),
        out.data_ptr(),
    )
    return out

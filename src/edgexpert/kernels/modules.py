"""The modules of a transformers model that our kernels take the place of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgexpert.core.errors import UserError
from edgexpert.core.library import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from edgexpert.kernels import dense, native, rows
from edgexpert.weights.matrix import PackedMatrix

ATTENTION = "edgexpert"


class PackedLinear(nn.Module):
    """A linear layer on a packed matrix."""

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = native.linear(x.reshape(-1, x.shape[-1]), self.matrix).view(*x.shape[:-1], self.matrix.outputs)
        return out if self.bias is None else out + self.bias


class RowNorm(nn.Module):
    """RMSNorm in the place of the library's."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        return dense.rms_norm(x, self.weight, self.eps)


class FloatEmbedding(nn.Embedding):
    """An embedding stored in 16 bits whose look-ups are float32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


_ELEMENTWISE = {
    function for name in ("sigmoid", "silu", "softplus", "tanh", "exp", "gelu", "log", "sqrt", "rsqrt", "mish", "logsigmoid")
    for owner in (torch, Tensor, F) if (function := getattr(owner, name, None)) is not None
}


class SteadyRows(TorchFunctionMode):
    """While open, the library's own elementwise functions and float products give a token the same bits whatever else shares
    the call, as our kernels do."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ELEMENTWISE and args and isinstance(args[0], Tensor):
            return rows.elementwise(func, *args, **kwargs)
        if func is F.linear and len(args) >= 2 and not args[1].is_meta and args[0].dtype == args[1].dtype == torch.float32:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            out = dense.linear(args[0], args[1])
            return out if bias is None else out + bias
        return func(*args, **kwargs)


def attention_interface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's attention interface: [1, heads, T, D] -> [1, T, heads, D]."""
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise UserError("attention sinks and soft caps are not supported on packed checkpoints; use the original checkpoint")
    if query.is_meta:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None
    mask = None if attention_mask is None else attention_mask[0, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return dense.attention(query[0], key[0], value[0], mask, scale)[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention_interface)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every stored weight tensor of a module by its parameter's name, packed ones included."""
    yield from module.named_parameters()
    for name, part in module.named_modules():
        if isinstance(part, PackedLinear):
            for stored in (part.matrix.values, part.matrix.scales, part.matrix.zeros):
                if stored is not None:
                    yield f"{name}.weight" if name else "weight", stored

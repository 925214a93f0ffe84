"""The 8-bit form of the weights that come with the package: int8 rows, each with one float32 scale (largest magnitude / 127)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".scale"
"""Suffix of the tensor [..., 1] that holds a matrix's scales."""


def quantise_rows(tensors: Mapping[str, Tensor], smallest: int = 0) -> dict[str, Tensor]:
    """Int8 for every floating-point tensor of two or more dimensions and at least ``smallest`` values; others as they are."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() >= 2 and tensor.numel() >= smallest and tensor.is_floating_point():
            scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
            stored[name + SCALE] = scale
            tensor = (tensor.float() / scale).round().to(torch.int8)
        stored[name] = tensor.contiguous()
    return stored


def dequantise_rows(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The float32 weights of what `quantise_rows` gave."""
    return {
        name: tensor * stored[name + SCALE] if name + SCALE in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }

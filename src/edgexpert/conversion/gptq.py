"""GPTQ (Frantar et al., 2022): rounding that makes up for the error of one channel in the channels after it.

Matrices are channel-major here, so the algorithm's columns are rows. Channels are rounded in their stored order, so that
groups stay contiguous; a group's scales are chosen when its first channel is reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.weights.rounding import PackedMatrix, choose_scales, pack_codes, quantise, round_to_codes, weights_of_codes

DAMPING = 0.05
"""Part of the Hessian's mean diagonal that is added to its diagonal; usually 0.01, but an expert sees few tokens."""
BLOCK = 128
"""Channels whose corrections to later ones are applied together."""


def gptq(weights: Tensor, hessians: Tensor, bits: int, group: int, zero_point: bool = False) -> list[PackedMatrix]:
    """Packs float matrices [B, C, N] side by side, so that their products with typical inputs change least.

    Args:
        hessians: float32 [B, C, C]; of each matrix the sum over its inputs x [C] of x x^T.
    """
    if bits == 16:
        return [quantise(weight, bits, group) for weight in weights]
    _, channels, outputs = weights.shape
    rest = weights.float().clone()  # what is still to be rounded, with the corrections so far
    corrections = torch.stack([_correction(hessian) for hessian in hessians])
    step = max(BLOCK // group, 1) * group  # whole groups
    codes = torch.empty(rest.shape, dtype=torch.int8 if bits == 8 else torch.uint8)
    chosen: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, channels, step):
        end = min(start + step, channels)
        errors = torch.empty(len(rest), end - start, outputs)
        for c in range(start, end):
            if c % group == 0:
                chosen.append(choose_scales(rest[:, c : c + group], bits, group, zero_point))
            row = rest[:, c : c + 1]
            code = round_to_codes(row, *chosen[-1], bits)
            error = (row - weights_of_codes(code, *chosen[-1], bits)) / corrections[:, c, c, None, None]
            codes[:, c : c + 1] = code
            errors[:, c - start : c - start + 1] = error
            rest[:, c + 1 : end].baddbmm_(corrections[:, c, c + 1 : end, None], error, alpha=-1)
        rest[:, end:].baddbmm_(corrections[:, start:end, end:].transpose(1, 2), errors, alpha=-1)
    scales = torch.cat([scale for scale, _ in chosen], dim=1)
    zeros = [zero for _, zero in chosen if zero is not None]
    all_zeros = torch.cat(zeros, dim=1) if zeros else [None] * len(codes)
    return [pack_codes(*parts, bits) for parts in zip(codes, scales, all_zeros, strict=True)]


def _correction(hessian: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian."""
    diagonal = hessian.diagonal()
    damping = DAMPING * float(diagonal.mean()) or 1.0
    while True:
        damped = hessian + damping * torch.eye(len(hessian))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
        damping *= 10

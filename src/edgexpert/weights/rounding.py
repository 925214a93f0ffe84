"""One weight matrix in packed form: channel-major integers with a scale for each output and group of channels.

A matrix has C input channels and N outputs. Outputs are padded to Np, a multiple of 32, with zero weights. The values of
one channel are one contiguous row:

    bits 4   uint8 [C, Np / 2]; byte j holds output 2j in its low and 2j + 1 in its high half; weight = (q - zero) * scale
    bits 8   int8 [C, Np], -127 to 127; weight = q * scale
    bits 16  bfloat16 [C, Np]; the weight itself

Scales are float16 [C / group, Np] and may be negative. Zero points are uint8 [C / group, Np]; without them zero is 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.weights.matrix import ALIGNMENT as PADDING
from edgexpert.weights.matrix import PackedMatrix, dequantise

SYMMETRIC_ZERO = 8
BITS = (4, 8, 16)
OUTPUTS_AT_ONCE = 256
"""Columns that are worked on together: few enough that the float copies stay in the cache, which is three times as fast."""
LEVELS = (8.0, 8.5, 7.5, 9.0, 7.0)
"""Codes that the largest magnitude of a group may become, of which the one with the least squared error is taken. The first
gives back exactly what Q4_0 stored."""


def padded(outputs: int) -> int:
    return -(-outputs // PADDING) * PADDING


def quantise(weight: Tensor, bits: int, group: int, zero_point: bool = False) -> PackedMatrix:
    """Rounds a matrix [C, N] to nearest, group by group.

    Raises:
        UserError: a weight is not finite, or too large for a float16 scale.
    """
    channels, outputs = weight.shape
    if bits == 16:
        rows = torch.zeros(channels, padded(outputs), dtype=torch.bfloat16)
        rows[:, :outputs] = weight
        return PackedMatrix(rows, None, None, channels, outputs, bits, group)
    assert channels % group == 0, "checked before anything is read"
    values: list[Tensor] = []
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    for columns in weight.split(OUTPUTS_AT_ONCE, dim=1):
        block = torch.zeros(channels, padded(columns.shape[1]))
        block[:, : columns.shape[1]] = columns
        scale, zero = choose_scales(block, bits, group, zero_point)
        values.append(encode(round_to_codes(block, scale, zero, bits), bits))
        scales.append(scale)
        if zero is not None:
            zeros.append(zero)
    joined = torch.cat(zeros, 1) if zeros else None
    return PackedMatrix(torch.cat(values, 1), torch.cat(scales, 1), joined, channels, outputs, bits, group)


def choose_scales(weight: Tensor, bits: int, group: int, zero_point: bool) -> tuple[Tensor, Tensor | None]:
    """Scales [.., C / group, N] in float16, and zero points, for float32 weights [.., C, N]."""
    grouped = weight.unflatten(-2, (-1, group))  # [.., C / group, group, N]
    high, low = grouped.amax(-2), grouped.amin(-2)
    zeros = None
    if zero_point and bits == 4:
        high, low = high.clamp(min=0), low.clamp(max=0)  # zero stays a code
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).nan_to_num(0).round().clamp(0, 15).to(torch.uint8)
    elif bits == 8:
        scales = (torch.maximum(high, -low) / 127).half()
    else:
        scales = _least_error(grouped, torch.where(high > -low, high, low))
    if not scales.isfinite().all():
        raise UserError("a weight is not a finite number, or too large for a 16-bit scale; the checkpoint cannot be quantised")
    return scales + 0.0, zeros  # so that zero has one sign


def _least_error(grouped: Tensor, extreme: Tensor) -> Tensor:
    """The best of a few scales for each group; ``extreme`` is the signed weight of the largest magnitude."""
    best, least = torch.empty(0), torch.empty(0)
    for level in LEVELS:
        scales = (-extreme / level).half()
        error = (_rounded(grouped, scales.float()).clamp_(-8, 7).mul_(scales.float().unsqueeze(-2)) - grouped).square_().sum(-2)
        if level == LEVELS[0]:
            best, least = scales, error
        else:
            best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return best


def _rounded(grouped: Tensor, scales: Tensor) -> Tensor:
    inverse = torch.where(scales == 0, 0, 1 / scales)  # a group of zeros has scale 0
    return (grouped * inverse.unsqueeze(-2)).round_()


def round_to_codes(weight: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """Codes [.., C, N] of float32 weights: int8 for 8 bits, uint8 from 0 to 15 for 4 bits."""
    codes = _rounded(weight.unflatten(-2, (scales.shape[-2], -1)), scales.float())
    if bits == 8:
        return codes.clamp_(-127, 127).to(torch.int8).flatten(-3, -2)
    codes += SYMMETRIC_ZERO if zeros is None else zeros.float().unsqueeze(-2)
    return codes.clamp_(0, 15).to(torch.uint8).flatten(-3, -2)


def encode(codes: Tensor, bits: int) -> Tensor:
    """Codes [C, Np] as stored values: two to a byte for 4 bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes


def pack_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> PackedMatrix:
    """A packed matrix of codes [C, N] with scales, and zero points, [C / group, N]."""
    channels, outputs = codes.shape
    more = (0, padded(outputs) - outputs)
    pad = torch.nn.functional.pad
    return PackedMatrix(
        encode(pad(codes, more, value=SYMMETRIC_ZERO if bits == 4 and zeros is None else 0), bits).contiguous(),
        pad(scales, more), None if zeros is None else pad(zeros, more), channels, outputs, bits, channels // len(scales),
    )


def decode(matrix: PackedMatrix) -> Tensor:
    """Codes [C, N] of a packed matrix: uint8 from 0 to 15, int8, or the bfloat16 weights."""
    values = matrix.values
    if matrix.bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(1)
    return values[:, : matrix.outputs]


def columns(matrix: PackedMatrix, start: int, stop: int) -> PackedMatrix:
    """Outputs from ``start``, a multiple of 32, up to ``stop``, as views."""
    stop, width = min(stop, matrix.outputs), padded(min(stop, matrix.outputs))
    values = matrix.values[:, start // 2 : width // 2] if matrix.bits == 4 else matrix.values[:, start:width]
    scales, zeros = (None if part is None else part[:, start:width] for part in (matrix.scales, matrix.zeros))
    return PackedMatrix(values, scales, zeros, matrix.channels, stop - start, matrix.bits, matrix.group)


def relative_error(weight: Tensor, packed: PackedMatrix) -> float:
    """Frobenius norm of what packing changed in a matrix [C, N], over that of the matrix."""
    changed = whole = 0.0
    for start in range(0, packed.outputs, OUTPUTS_AT_ONCE):
        block = columns(packed, start, start + OUTPUTS_AT_ONCE)
        exact = weight[:, start : start + OUTPUTS_AT_ONCE].float()
        changed += float((exact - dequantise(block)).square_().sum())
        whole += float(exact.square().sum())
    return (changed / whole) ** 0.5 if whole else 0.0


def weights_of_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """The float32 weights [.., C, N] of codes with scales, and zero points, [.., C / group, N]."""
    grouped = codes.float().unflatten(-2, (scales.shape[-2], -1))
    if bits == 4:
        grouped = grouped - (SYMMETRIC_ZERO if zeros is None else zeros.unsqueeze(-2).float())
    return (grouped * scales.unsqueeze(-2).float()).flatten(-3, -2)

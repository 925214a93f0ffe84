"""The conversion itself: one parameter after the other from the source, through rounding, into the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgexpert.conversion.layout import Layout, plan_layout
from edgexpert.conversion.options import Options
from edgexpert.conversion.sources.source import Source
from edgexpert.conversion.writer import Writer
from edgexpert.errors import UserError
from edgexpert.packing.format import Manifest
from edgexpert.packing.matrix import PackedMatrix, dequantise, quantise

Advance = Callable[[int, int], None]
"""Told after each parameter: bytes written so far, and bytes in all."""


@torch.no_grad()
def convert(source: Source, destination: Path, options: Options, advance: Advance = lambda done, total: None) -> Manifest:
    """Writes a packed checkpoint, rounding to nearest, or goes on where an interrupted conversion stopped.

    At any time one parameter of the model is in memory: all experts' gate/up or down weights of one layer at most.

    Raises:
        UserError: the source lacks a tensor, the destination exists, or the disk is full.
    """
    layout = plan_layout(source, options)
    writer = Writer(destination, layout, source, request_of(source, options))
    names = [*layout.linears, *layout.floats, *layout.experts]
    sizes = {name: bytes_of(layout, name) for name in names}
    total = sum(sizes.values())
    for name in names:
        if name not in writer.finished:
            _convert_one(source, writer, layout, name, options)
        advance(sum(sizes[name] for name in writer.finished), total)
    return writer.complete(source, options)


def request_of(source: Source, options: Options) -> dict[str, Any]:
    """What an interrupted conversion must be given again."""
    return {"source": source.origin, "fingerprint": source.fingerprint, "options": asdict(options)}


def bytes_of(layout: Layout, name: str) -> int:
    """Bytes that a parameter takes in the packed checkpoint."""
    if name in layout.experts:
        layer, part = layout.experts[name]
        return layer.experts * sum(extent.bytes for extent in getattr(layer, part).extents.values())
    keys = (name, f"{name}.values", f"{name}.scales", f"{name}.zeros")
    return sum(layout.dense[key].bytes for key in keys if key in layout.dense)


def _convert_one(source: Source, writer: Writer, layout: Layout, name: str, options: Options) -> None:
    if name in layout.floats:
        writer.write_float(name, source.read(name))
        return
    facts: dict[str, Any] = {}
    matrices = _matrices(source, layout, name, options, facts)
    if name in layout.experts:
        writer.write_experts(name, matrices, facts)
    else:
        writer.write_linear(name, next(matrices), facts)


def _matrices(
    source: Source, layout: Layout, name: str, options: Options, facts: dict[str, Any]
) -> Iterator[PackedMatrix]:
    """The packed matrices of a parameter, one for each expert. ``facts`` gains the relative error of each."""
    matrix = layout.matrix(name)
    facts["errors"] = []
    count = layout.experts[name][0].experts if name in layout.experts else 1
    ready = source.packed(name, matrix, count, options.zero_point)
    if ready is not None:
        facts["errors"] = [] if source.dummy else [0.0] * count  # taken over as they are
        yield from ready
        return
    parameter = channel_major(layout, name, source.read(name))
    for weight in parameter:
        try:
            packed = quantise(weight, matrix.bits, options.group_size, options.zero_point)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        facts["errors"].append(relative_error(weight, packed))
        yield packed


def channel_major(layout: Layout, name: str, parameter: Tensor) -> Tensor:
    """A parameter's matrices as a view [E or 1, C, N]."""
    if name not in layout.experts:
        return parameter.t()[None]
    return parameter if layout.experts[name][0].transposed else parameter.transpose(1, 2)


def relative_error(weight: Tensor, packed: PackedMatrix) -> float:
    """Frobenius norm of what rounding changed, over that of the weights."""
    weight = weight.float()
    norm = weight.norm()
    return float((weight - dequantise(packed)).norm() / norm) if norm > 0 else 0.0

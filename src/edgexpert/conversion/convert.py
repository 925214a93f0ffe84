"""The conversion itself: one parameter after the other from the source, through rounding, into the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgexpert.conversion.calibration import calibration_tokens, round_layers
from edgexpert.conversion.layout import Layout, plan_layout
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.source import Source
from edgexpert.conversion.writer import Writer
from edgexpert.core.errors import UserError
from edgexpert.core.output import new_folder
from edgexpert.weights.files import sha256
from edgexpert.weights.manifest import Manifest
from edgexpert.weights.rounding import PackedMatrix, quantise, relative_error

Advance = Callable[[int, int], None]
"""Told after each parameter: bytes written so far, and bytes in all."""


@torch.no_grad()
def convert(
    source: Source,
    destination: Path,
    options: PackOptions,
    advance: Advance = lambda done, total: None,
    calibration: Path | None = None,
) -> Manifest:
    """Writes a packed checkpoint, or goes on where an interrupted conversion stopped.

    Rounding to nearest has one parameter in memory at a time: all experts' gate/up or down weights of one layer at most. GPTQ
    has one layer and its inputs, and on resuming calculates again what is on disk already.

    Args:
        calibration: the text that GPTQ learns from.

    Raises:
        UserError: the source lacks a tensor, the destination exists, another process writes it, or the disk is full.
    """
    if (options.method == "gptq") != (calibration is not None):
        raise UserError("--method gptq and --calibration FILE belong together: GPTQ learns from a text, rtn needs none")
    if options.method == "gptq" and source.dummy:
        raise UserError("random weights cannot be calibrated; leave --method out for a dummy")
    layout = plan_layout(source, options)
    request = {
        "source": source.origin, "fingerprint": source.fingerprint, "options": asdict(options),
        "calibration": None if calibration is None else sha256(calibration),
    }
    sequences = None if calibration is None else calibration_tokens(source, calibration)
    with new_folder(destination):
        return _convert_all(source, Writer(destination, layout, source, request), options, sequences, advance)


def _convert_all(
    source: Source, writer: Writer, options: PackOptions, sequences: list[Tensor] | None, advance: Advance
) -> Manifest:
    layout = writer.layout
    names = [*layout.linears, *layout.floats, *layout.experts]
    sizes = {name: bytes_of(layout, name) for name in names}

    def report() -> None:
        advance(sum(sizes[name] for name in writer.finished), sum(sizes.values()))

    report()
    if sequences is not None:
        for name, matrices, facts in round_layers(source, layout, options, sequences):
            if name not in writer.finished:
                _write(writer, layout, name, iter(matrices), facts)
            report()
    for name in names:
        if name not in writer.finished:
            _convert_one(source, writer, layout, name, options)
            report()
    return writer.complete(source, options)


def bytes_of(layout: Layout, name: str) -> int:
    """Bytes that a parameter takes in the packed checkpoint."""
    if name in layout.experts:
        layer, part = layout.experts[name]
        return layer.experts * sum(extent.bytes for extent in getattr(layer, part).extents.values())
    keys = (name, f"{name}.values", f"{name}.scales", f"{name}.zeros")
    return sum(layout.dense[key].bytes for key in keys if key in layout.dense)


def _convert_one(source: Source, writer: Writer, layout: Layout, name: str, options: PackOptions) -> None:
    if name in layout.floats:
        writer.write_float(name, source.read(name))
        return
    facts: dict[str, Any] = {}
    _write(writer, layout, name, _matrices(source, layout, name, options, facts), facts)


def _write(writer: Writer, layout: Layout, name: str, matrices: Iterator[PackedMatrix], facts: dict[str, Any]) -> None:
    if name in layout.experts:
        writer.write_experts(name, matrices, facts)
    else:
        writer.write_linear(name, next(matrices), facts)


def _matrices(
    source: Source, layout: Layout, name: str, options: PackOptions, facts: dict[str, Any]
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
    parameter = layout.channel_major(name, source.read(name))
    for weight in parameter:
        try:
            packed = quantise(weight, matrix.bits, options.group_size, options.zero_point)
        except UserError as error:
            raise UserError(f"the tensor {name} cannot be packed: {error}") from error
        facts["errors"].append(relative_error(weight, packed))
        yield packed

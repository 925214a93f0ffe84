"""The folder of a packed checkpoint: its manifest, and where in its files each matrix stands.

The layout follows from the model's shapes and the options alone, so that a file can be filled in any order. `docs/format.md`
describes it byte by byte.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from edgexpert.core.errors import UserError
from edgexpert.weights.rounding import PADDING, padded

FORMAT = "edgexpert"
VERSION = 1
MANIFEST = "manifest.json"
EXPERTS = "experts.pack"
DENSE = "dense.safetensors"
PART_ALIGNMENT = 64
RECORD_ALIGNMENT = 4096
DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "float16": torch.float16, "bfloat16": torch.bfloat16}
VALUES = {4: "uint8", 8: "int8", 16: "bfloat16"}


@dataclass(frozen=True)
class Extent:
    """An array in a file: its first byte (in an expert: counted from the record's first byte), element type and shape."""

    offset: int
    dtype: str
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class MatrixLayout:
    """A packed matrix in a record: C channels, N outputs, and its arrays."""

    channels: int
    outputs: int
    bits: int
    group: int | None
    values: Extent
    scales: Extent | None
    zeros: Extent | None

    @property
    def extents(self) -> dict[str, Extent]:
        """The arrays that this matrix has, by name, in their order in the file."""
        return {name: e for name in ("values", "scales", "zeros") if (e := getattr(self, name)) is not None}


@dataclass(frozen=True)
class LayerLayout:
    """The experts of one layer: expert e's record begins at byte ``offset + e * stride`` of the file.

    Attributes:
        gate: whether gate_up holds a gate; without one its outputs are those of up alone.
        interleaved: gate and up alternate output by output, instead of gate first and then up.
        parameters: names of the two parameters in the transformers model.
        transposed: the transformers model stores its parameters as [E, C, N] instead of [E, N, C].
        errors: relative error of gate_up and down of every expert, ||W - W'|| / ||W||.
    """

    layer: int
    experts: int
    offset: int
    stride: int
    gate_up: MatrixLayout
    down: MatrixLayout
    gate: bool
    interleaved: bool
    transposed: bool
    parameters: dict[str, str]
    errors: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Linear:
    """A quantised linear layer in dense.safetensors: tensors NAME.values, NAME.scales and NAME.zeros."""

    channels: int
    outputs: int
    bits: int
    group: int | None
    error: float = 0.0


@dataclass(frozen=True)
class Manifest:
    """Everything about a packed checkpoint but its weights.

    Attributes:
        source: where the weights came from.
        bits: by part: experts, attention, shared_experts, lm_head.
        rtn_fallbacks: experts that GPTQ rounded to nearest, since too few calibration tokens reached them.
        linears: quantised linear layers by parameter name.
        files: bytes and SHA-256 of every other file of the folder.
    """

    source: dict[str, Any]
    method: str
    dummy: bool
    bits: dict[str, int]
    group_size: int
    zero_point: bool
    layers: list[LayerLayout]
    linears: dict[str, Linear]
    rtn_fallbacks: list[dict[str, int]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    edgexpert: str = ""
    format: str = FORMAT
    format_version: int = VERSION

    def save(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a packed checkpoint.

    Raises:
        UserError: there is none, it is damaged, or a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_text())
        if stored.get("format") != FORMAT:
            raise UserError(f"the file {path} is not the manifest of a packed checkpoint; make one with edgexpert convert")
        if stored["format_version"] > VERSION:
            raise UserError(
                f"the folder {folder} has format version {stored['format_version']}, and this edgexpert reads up to {VERSION}; "
                "install a newer edgexpert"
            )
        stored["layers"] = [
            LayerLayout(**{**layer, "gate_up": _matrix(layer["gate_up"]), "down": _matrix(layer["down"])})
            for layer in stored["layers"]
        ]
        stored["linears"] = {name: Linear(**linear) for name, linear in stored["linears"].items()}
        return Manifest(**stored)
    except FileNotFoundError:
        raise UserError(f"the folder {folder} has no {MANIFEST}; make a packed checkpoint with edgexpert convert") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the file {path} is damaged ({error}); convert the checkpoint again") from error


def _matrix(stored: dict[str, Any]) -> MatrixLayout:
    extents = {
        name: None if stored[name] is None else Extent(**{**stored[name], "shape": tuple(stored[name]["shape"])})
        for name in ("values", "scales", "zeros")
    }
    return MatrixLayout(**{**stored, **extents})


def matrix_layout(channels: int, outputs: int, bits: int, group: int, zero_point: bool, offset: int = 0) -> MatrixLayout:
    """Where the arrays of a matrix stand, beginning at ``offset``."""
    width = padded(outputs)
    assert width % PADDING == 0
    values = Extent(offset, VALUES[bits], (channels, width // 2 if bits == 4 else width))
    if bits == 16:
        return MatrixLayout(channels, outputs, bits, None, values, None, None)
    rows = (channels // group, width)
    scales = Extent(align(values.offset + values.bytes, PART_ALIGNMENT), "float16", rows)
    zeros = None
    if zero_point and bits == 4:
        zeros = Extent(align(scales.offset + scales.bytes, PART_ALIGNMENT), "uint8", rows)
    return MatrixLayout(channels, outputs, bits, group, values, scales, zeros)


def end_of(matrix: MatrixLayout) -> int:
    last = list(matrix.extents.values())[-1]
    return last.offset + last.bytes


def align(offset: int, to: int) -> int:
    return -(-offset // to) * to

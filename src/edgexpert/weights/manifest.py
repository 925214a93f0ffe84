"""The folder of a packed checkpoint: its manifest, and where in its files each matrix stands.

The layout follows from the model's shapes and the options alone, so that a file can be filled in any order. `docs/format.md`
describes it byte by byte.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from edgexpert.core.checked import Range, checked
from edgexpert.core.errors import UserError
from edgexpert.core.output import synced
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

Count = Annotated[int, Range(1, 2**31 - 1)]
Place = Annotated[int, Range(0, 2**63 - 1)]


@dataclass(frozen=True)
class Extent:
    """An array in a file: its first byte (in an expert: counted from the record's first byte), element type and shape."""

    offset: Place
    dtype: str
    shape: tuple[Count, ...]

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class MatrixLayout:
    """A packed matrix in a record: C channels, N outputs, and its arrays."""

    channels: Count
    outputs: Count
    bits: Count
    group: Count | None
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

    layer: Place
    experts: Count
    offset: Place
    stride: Count
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

    channels: Count
    outputs: Count
    bits: Count
    group: Count | None
    error: float = 0.0

    def tensors(self, zero_point: bool) -> dict[str, Extent]:
        """Type and shape of NAME.values, NAME.scales and NAME.zeros."""
        return matrix_layout(self.channels, self.outputs, self.bits, self.group or self.channels, zero_point).extents


@dataclass(frozen=True)
class Manifest:
    """Everything about a packed checkpoint but its weights.

    Attributes:
        source: where the weights came from.
        bits: by part: experts, attention, shared_experts, lm_head.
        rtn_fallbacks: experts that GPTQ rounded to nearest, since too few calibration tokens reached them.
        linears: quantised linear layers by parameter name.
        files: bytes and SHA-256 of every other file of the folder.
        sha256: of the manifest itself, see `content_hash`.
    """

    source: dict[str, Any]
    method: str
    dummy: bool
    bits: dict[str, int]
    group_size: Count
    zero_point: bool
    layers: list[LayerLayout]
    linears: dict[str, Linear]
    rtn_fallbacks: list[dict[str, int]] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    edgexpert: str = ""
    format: str = FORMAT
    format_version: int = VERSION
    sha256: str = ""

    @property
    def experts_bytes(self) -> int:
        """Length of the experts' file."""
        return self.layers[-1].offset + self.layers[-1].experts * self.layers[-1].stride

    @property
    def content_hash(self) -> str:
        """SHA-256 of everything in it but ``sha256``, as JSON with its keys in order."""
        content = {key: value for key, value in asdict(self).items() if key != "sha256"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Writes it, and waits until it is on the disk."""
        path = folder / MANIFEST
        path.write_text(json.dumps(asdict(replace(self, sha256=self.content_hash)), indent=1) + "\n")
        synced(path)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a packed checkpoint.

    Raises:
        UserError: there is none, it is damaged, or a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_text())
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise UserError(f"the file {path} is not the manifest of a packed checkpoint; make one with edgexpert convert")
        version = stored.get("format_version")
        if isinstance(version, int) and version > VERSION:
            raise UserError(
                f"the folder {folder} has format version {version}, and this edgexpert reads up to {VERSION}; "
                "install a newer edgexpert"
            )
    except FileNotFoundError:
        raise UserError(f"the folder {folder} has no {MANIFEST}; make a packed checkpoint with edgexpert convert") from None
    except PermissionError:
        raise UserError(f"permission to read the file {path} is denied; allow it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the file {path} is damaged ({error}); convert the checkpoint again") from error
    manifest = checked(Manifest, stored, f"the damaged file {path}")
    wrong = _first_contradiction(manifest)
    if not wrong and manifest.sha256 not in ("", manifest.content_hash):
        wrong = "its own SHA-256 differs"
    if wrong:
        raise UserError(f"the file {path} is damaged ({wrong}); convert the checkpoint again")
    return manifest


def _first_contradiction(manifest: Manifest) -> str | None:
    """What in a manifest does not follow from its shapes, so that no number of a file is an address that nobody computed."""
    if not manifest.layers:
        return "it has no layers"
    if any(matrix.channels % 4 or (matrix.bits < 16 and matrix.channels % manifest.group_size)
           for layer in manifest.layers for matrix in (layer.gate_up, layer.down)):
        return "its groups do not divide the channels"
    offset, latest = 0, -1
    for layer in manifest.layers:
        name, gate_up, down = f"layer {layer.layer}", layer.gate_up, layer.down
        if layer.layer <= latest:
            return f"{name} comes after layer {latest}"
        if set(layer.parameters) != {"gate_up", "down"} or not all(isinstance(one, str) for one in layer.parameters.values()):
            return f"the parameters of {name} are not gate_up and down"
        if down.outputs != gate_up.channels or down.channels * (2 if layer.gate else 1) != gate_up.outputs:
            return f"gate_up and down of {name} have shapes that do not go together"
        if gate_up.bits not in VALUES:
            return f"{name} has {gate_up.bits} bits"
        computed = layer_layout(
            layer.layer, layer.experts, offset, (gate_up.channels, gate_up.outputs), (down.channels, down.outputs),
            gate_up.bits, manifest.group_size, manifest.zero_point, gate=layer.gate, interleaved=layer.interleaved and layer.gate,
            transposed=layer.transposed, parameters=layer.parameters,
        )
        if replace(layer, errors={}) != computed:
            return f"{name} lies elsewhere than its shapes say"
        offset, latest = offset + layer.experts * layer.stride, layer.layer
    for name, linear in manifest.linears.items():
        if linear.bits not in VALUES or linear.channels % (linear.group or 1) or (linear.group is None) != (linear.bits == 16):
            return f"bits and group of {name} do not go together"
    return None


def layer_layout(
    layer: int, experts: int, offset: int, gate_up: tuple[int, int], down: tuple[int, int], bits: int, group: int,
    zero_point: bool, *, gate: bool, interleaved: bool, transposed: bool, parameters: dict[str, str],
) -> LayerLayout:
    """Where the experts of a layer stand, beginning at ``offset``. Both matrices are given as (channels, outputs)."""
    first = matrix_layout(*gate_up, bits, group, zero_point)
    second = matrix_layout(*down, bits, group, zero_point, align(end_of(first), PART_ALIGNMENT))
    stride = align(align(end_of(second), PART_ALIGNMENT), RECORD_ALIGNMENT)
    return LayerLayout(layer, experts, offset, stride, first, second, gate, interleaved, transposed, parameters)


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

"""Reading a packed checkpoint: views of its files in memory."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from edgexpert.core.errors import UserError
from edgexpert.weights.manifest import DENSE, DTYPES, EXPERTS, MANIFEST, LayerLayout, Manifest, MatrixLayout, read_manifest
from edgexpert.weights.matrix import PackedExperts, PackedMatrix
from edgexpert.weights.memory import map_file, read_file


def is_pack(folder: Path) -> bool:
    """Whether a folder holds a packed checkpoint, be it a damaged one."""
    return (folder / MANIFEST).is_file()


class Pack:
    """A packed checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        for name in (EXPERTS, DENSE):
            known, path = self.manifest.files.get(name), folder / name
            size = path.stat().st_size if path.is_file() else None
            if known is not None and size != known["bytes"]:
                raise UserError(
                    f"the file {path} should have {known['bytes']} bytes and has {size or 0}; "
                    "convert the checkpoint again"
                )

    @cached_property
    def config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.folder)

    @cached_property
    def _bytes(self) -> Tensor:
        path = self.folder / EXPERTS
        memory = read_file(path)
        return map_file(path) if memory is None else memory

    def experts(self, layer: LayerLayout) -> dict[str, PackedExperts]:
        """``gate_up`` and ``down`` of all experts of a layer: strided views, the experts a record apart."""
        return {name: self._stacked(layer, getattr(layer, name)) for name in ("gate_up", "down")}

    def _stacked(self, layer: LayerLayout, matrix: MatrixLayout) -> PackedExperts:
        parts: dict[str, Tensor] = {}
        for name, extent in matrix.extents.items():
            dtype = DTYPES[extent.dtype]
            shape, stride = (layer.experts, *extent.shape), (layer.stride // dtype.itemsize, extent.shape[1], 1)
            start = (layer.offset + extent.offset) // dtype.itemsize
            whole = self._bytes.view(dtype)
            parts[name] = whole.as_strided(shape, stride, whole.storage_offset() + start)
        return PackedExperts(
            parts["values"], parts.get("scales"), parts.get("zeros"), matrix.channels, matrix.outputs, matrix.bits,
            matrix.group or matrix.channels,
        )

    def dense(self) -> dict[str, Tensor | PackedMatrix]:
        """Everything but the experts, by parameter name: float tensors, and packed linear layers."""
        try:
            with safe_open(self.folder / DENSE, "pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the file {self.folder / DENSE} is damaged ({error}); convert the checkpoint again") from error
        tensors: dict[str, Tensor | PackedMatrix] = {}
        for name, linear in self.manifest.linears.items():
            values, scales, zeros = (stored.pop(f"{name}.{part}", None) for part in ("values", "scales", "zeros"))
            if values is None:
                raise UserError(f"the file {self.folder / DENSE} lacks {name}; convert the checkpoint again")
            tensors[name] = PackedMatrix(
                values, scales, zeros, linear.channels, linear.outputs, linear.bits, linear.group or linear.channels
            )
        return {**tensors, **stored}


def verify(folder: Path) -> list[str]:
    """Checks every file of a packed checkpoint against its hash in the manifest, and returns their names.

    Raises:
        UserError: a file is missing or has changed.
    """
    files = read_manifest(folder).files
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"the file {path} is missing; convert the checkpoint again")
        if sha256(path) != known["sha256"]:
            raise UserError(f"the file {path} is not what was written (its SHA-256 differs); convert the checkpoint again")
    return list(files)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

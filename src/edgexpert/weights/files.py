"""Reading a packed checkpoint: views of its files in memory."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from edgexpert.core.errors import UserError
from edgexpert.weights.manifest import DENSE, DTYPES, EXPERTS, MANIFEST, LayerLayout, Manifest, read_manifest
from edgexpert.weights.matrix import PackedExperts, PackedMatrix, dequantise
from edgexpert.weights.store import ExpertStore, open_store


def is_pack(folder: Path) -> bool:
    """Whether a folder holds a packed checkpoint, be it a damaged one."""
    return (folder / MANIFEST).is_file()


class Pack:
    """A packed checkpoint on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        known = {EXPERTS: self.manifest.experts_bytes, DENSE: self.manifest.files.get(DENSE, {}).get("bytes")}
        for name, expected in known.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size is None or (expected is not None and size != expected):
                raise UserError(f"the file {path} should have {expected} bytes and has {size or 0}; convert the checkpoint again")
            if not os.access(path, os.R_OK):
                raise UserError(f"permission to read the file {path} is denied; allow it")

    @cached_property
    def config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.folder)

    @cached_property
    def store(self) -> ExpertStore:
        """Where the experts lie."""
        return open_store(self.folder / EXPERTS, self.manifest.layers)

    def experts(self, layer: LayerLayout) -> dict[str, PackedExperts]:
        """``gate_up`` and ``down`` of all experts of a layer."""
        return self.store.experts(self.manifest.layers.index(layer))

    @cached_property
    def _dense(self) -> dict[str, Tensor | PackedMatrix]:
        return self.dense()

    @cached_property
    def _of_experts(self) -> dict[str, tuple[LayerLayout, str]]:
        """Layer and part of the experts' parameters, by name."""
        return {name: (layer, part) for layer in self.manifest.layers for part, name in layer.parameters.items()}

    @property
    def parameters(self) -> list[str]:
        """Names of all parameters that it holds, as transformers has them."""
        return [*self._dense, *self._of_experts]

    def float_dtype(self, name: str) -> torch.dtype:
        """The type of a parameter that keeps its floats, float32 for one that is packed.

        Raises:
            UserError: it has no such parameter.
        """
        stored = None if name in self._of_experts else self._dense.get(name)
        if stored is None and name not in self._of_experts:
            raise UserError(f"the packed checkpoint {self.folder} lacks the tensor {name}; convert the checkpoint again")
        return stored.dtype if isinstance(stored, Tensor) else torch.float32

    def read_float(self, name: str) -> Tensor:
        """A parameter in the shape that transformers has for it; of what is packed the float32 weights."""
        if name in self._of_experts:
            layer, part = self._of_experts[name]
            matrices = self.experts(layer)[part]
            weight = torch.stack([dequantise(matrices[expert]) for expert in range(layer.experts)])  # [E, C, N]
            return weight if layer.transposed else weight.transpose(1, 2).contiguous()
        stored = self._dense[name]
        return stored if isinstance(stored, Tensor) else dequantise(stored).t().contiguous()

    def dense(self) -> dict[str, Tensor | PackedMatrix]:
        """Everything but the experts, by parameter name: float tensors, and packed linear layers."""
        try:
            with safe_open(self.folder / DENSE, "pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the file {self.folder / DENSE} is damaged ({error}); convert the checkpoint again") from error
        tensors: dict[str, Tensor | PackedMatrix] = {}
        for name, linear in self.manifest.linears.items():
            arrays: dict[str, Tensor | None] = {"values": None, "scales": None, "zeros": None}
            for part, extent in linear.tensors(self.manifest.zero_point).items():
                array = arrays[part] = stored.pop(f"{name}.{part}", None)
                if array is None:
                    raise UserError(f"the file {self.folder / DENSE} lacks {name}.{part}; convert the checkpoint again")
                if array.dtype != DTYPES[extent.dtype] or tuple(array.shape) != extent.shape:
                    raise UserError(f"the tensor {name}.{part} in the file {self.folder / DENSE} has another type or shape than "
                                    f"{MANIFEST} says; convert the checkpoint again")
            assert arrays["values"] is not None
            tensors[name] = PackedMatrix(
                arrays["values"], arrays["scales"], arrays["zeros"], linear.channels, linear.outputs, linear.bits,
                linear.group or linear.channels,
            )
        return {**tensors, **stored}


def verify(folder: Path) -> list[str]:
    """Checks every file of a packed checkpoint against its hash in the manifest, and returns their names.

    Raises:
        UserError: a file is missing or has changed.
    """
    manifest = read_manifest(folder)
    if not manifest.sha256:
        raise UserError(f"the file {folder / MANIFEST} has no hash of its own; convert the checkpoint again")
    for name, known in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"the file {path} is missing; convert the checkpoint again")
        if sha256(path) != known["sha256"]:
            raise UserError(f"the file {path} is not what was written (its SHA-256 differs); convert the checkpoint again")
    return [MANIFEST, *manifest.files]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

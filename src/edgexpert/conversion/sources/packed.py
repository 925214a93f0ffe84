"""Packed checkpoints, the bundled model among them: their weights are read as floats, to be rounded anew."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from edgexpert.conversion.sources.huggingface import copy_extras
from edgexpert.conversion.sources.source import Source, file_fingerprint, meta_model
from edgexpert.weights.files import Pack
from edgexpert.weights.manifest import DENSE, EXPERTS


class PackedSource(Source):
    """A packed checkpoint."""

    kind = "packed"

    def __init__(self, folder: Path, name: str) -> None:
        self.pack = Pack(folder)
        self.config, self.model = self.pack.config, meta_model(self.pack.config)
        self.origin = {"kind": self.kind, "name": name, "bits": self.pack.manifest.bits}
        self.fingerprint = [file_fingerprint(folder / file) for file in (EXPERTS, DENSE)]

    def dtype(self, name: str) -> torch.dtype:
        return self.pack.float_dtype(name)

    def read(self, name: str) -> Tensor:
        return self.pack.read_float(name)

    def save_extras(self, folder: Path) -> None:
        copy_extras(self.pack.folder, folder)

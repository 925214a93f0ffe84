"""The models that come with the package, whose weights are stored as 8-bit rows; they are small, so they are in memory whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from edgexpert.conversion.sources.huggingface import copy_extras
from edgexpert.conversion.sources.source import Source, file_fingerprint, meta_model
from edgexpert.model.bundled import WEIGHTS, load_packed


class BundledSource(Source):
    """A folder with 8-bit rows."""

    kind = "bundled"

    def __init__(self, folder: Path, config: PreTrainedConfig, name: str) -> None:
        self.folder, self.config, self.model = folder, config, meta_model(config)
        self.origin = {"kind": self.kind, "name": name}
        self.fingerprint = [file_fingerprint(folder / WEIGHTS)]
        self._state = load_packed(folder, config, torch.float32).state_dict()

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def read(self, name: str) -> Tensor:
        return self._state[name]

    def save_extras(self, folder: Path) -> None:
        copy_extras(self.folder, folder)

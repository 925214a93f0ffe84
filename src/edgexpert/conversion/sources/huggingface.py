"""Safetensors checkpoints, in one file or many, with a tensor for each expert or for all of a layer.

transformers knows how the names and shapes of a checkpoint become those of its model. Its tables are used here one parameter
at a time, so that no more than one parameter is in memory.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from edgexpert.conversion.sources.source import Source, file_fingerprint, meta_model
from edgexpert.core.errors import UserError
from edgexpert.core.library import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
    tied_weights,
)
from edgexpert.speculation.loading import BESIDE_MODEL

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EXTRAS = (
    "edgexpert.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)
FLOATS = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class HuggingFaceSource(Source):
    """A folder with config.json and safetensors files."""

    kind = "huggingface"

    def __init__(self, folder: Path, config: PreTrainedConfig, name: str) -> None:
        self.folder, self.config = folder, config
        self.model = meta_model(config)
        self._files = self._stored(checkpoint_files(folder))
        self.origin = {"kind": self.kind, "name": name}
        self.fingerprint = [file_fingerprint(folder / file) for file in sorted(set(self._files.values()))]
        self._shapes = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        self._tied = tied_weights(self.model)
        self._mapping = [
            entry for entry in get_model_conversion_mapping(self.model) if isinstance(entry, WeightRenaming | WeightConverter)
        ]
        self._keys, self._converters = self._match(sorted(self._files, key=dot_natural_key))

    def _stored(self, files: dict[str, str]) -> dict[str, str]:
        """The weights that the checkpoint offers, with the file of each."""
        return files

    def _match(self, keys: list[str]) -> tuple[dict[str, list[tuple[str, str]]], dict[str, WeightConverter]]:
        """For each parameter of the model the checkpoint's keys that it is made from, each with the pattern that it matched,
        and the converter that makes it."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        state = self.model.state_dict()
        matched: dict[str, list[tuple[str, str]]] = {}
        used: dict[str, WeightConverter] = {}
        for key in keys:
            name, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            first = by_pattern[pattern].target_patterns[0] if pattern is not None else ""
            targets = by_pattern[pattern].target_patterns if pattern is not None else [""]
            for target in targets:
                made = name.replace(first, target) if first else name
                if made in state:
                    matched.setdefault(made, []).append((key, pattern or key))
                    if pattern is not None:
                        used[made] = by_pattern[pattern]
        return matched, used

    def _made_from(self, name: str) -> tuple[str, list[tuple[str, str]]]:
        if name not in self._keys and name in self._tied:
            name = self._tied[name]
        if name not in self._keys:
            raise UserError(f"the checkpoint {self.folder} lacks the tensor {name}; download it again")
        for pattern in {pattern for _, pattern in self._keys[name] if "*" in pattern}:
            found = sum(pattern == other for _, other in self._keys[name])
            expected = self._shapes[name][0]
            if found != expected:
                raise UserError(
                    f"the checkpoint {self.folder} has {found} of the {expected} tensors {pattern} of {name}; download it again"
                )
        return name, self._keys[name]

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor_dtype(self._made_from(name)[1][0][0])

    def tensor_dtype(self, key: str) -> torch.dtype:
        """The float type of a tensor under the checkpoint's own name."""
        stored = self.open(key, lambda file: file.get_slice(key).get_dtype())
        if stored not in FLOATS:
            raise UserError(f"the tensor {key} has the type {stored}; give a checkpoint in float32, float16 or bfloat16")
        return FLOATS[stored]

    def read(self, name: str) -> Tensor:
        name, keys = self._made_from(name)
        self.dtype(name)
        if name not in self._converters:
            return self._checked(name, self.tensor(keys[0][0]))
        converter = deepcopy(self._converters[name])
        own = next((target for target in converter.target_patterns if target in name), converter.target_patterns[0])
        first = name.replace(own, converter.target_patterns[0])  # converters go by the name of their first target
        for key, pattern in keys:
            converter.add_tensor(first, key, pattern, partial(self.tensor, key))
        made = converter.convert(first, model=self.model, config=self.config)[name]
        return self._checked(name, made[0] if isinstance(made, list) else made)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.shape != self._shapes[name]:
            raise UserError(
                f"the tensor {name} has the shape {list(tensor.shape)} in {self.folder}, "
                f"and its config.json says {list(self._shapes[name])}"
            )
        return tensor

    def tensor(self, key: str) -> Tensor:
        """A tensor under the checkpoint's own name."""
        return self.open(key, lambda file: file.get_tensor(key))

    def open(self, key: str, use: Any) -> Any:
        """What ``use`` makes of the open file that holds a key."""
        path = self.folder / self._files[key]
        try:
            with safe_open(path, "pt") as file:
                return use(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"the file {path} is damaged or truncated ({error}); download the checkpoint again") from error

    def save_extras(self, folder: Path) -> None:
        copy_extras(self.folder, folder)


def copy_extras(source: Path, folder: Path) -> None:
    """Tokenizer, generation defaults, calibrated hyperparameters, and an EAGLE-3 draft that lies beside the checkpoint."""
    for name in EXTRAS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / BESIDE_MODEL / "config.json").is_file():
        shutil.copytree(source / BESIDE_MODEL, folder / BESIDE_MODEL, dirs_exist_ok=True)


def checkpoint_files(folder: Path) -> dict[str, str]:
    """The file that holds each tensor of a checkpoint."""
    try:
        if (folder / INDEX).is_file():
            files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            for name in sorted(set(files.values())):
                if not (folder / name).is_file():
                    raise UserError(f"the folder {folder} lacks the weight file {name}; download the checkpoint again")
            return files
        if not (folder / SINGLE).is_file():
            raise UserError(f"the folder {folder} holds no safetensors checkpoint ({SINGLE} or {INDEX}); give a folder that does")
        with safe_open(folder / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"the weights in {folder} are damaged or truncated ({error}); download the checkpoint again") from error


def download(name: str) -> Path:
    """The folder of a Hub checkpoint, fetched where it is not there yet."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.safetensors.index.json", "config.json", *EXTRAS]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0][:160]
        raise UserError(
            f"the model {name} could not be had from the Hub ({type(error).__name__}: {first_line}); "
            "offline, give the folder of a downloaded checkpoint instead of its name"
        ) from error

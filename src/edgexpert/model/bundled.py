"""Bundled checkpoints: a standard transformers model whose large matrices are stored as 8-bit rows, to fit into a wheel."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import tied_weights
from edgexpert.int8 import dequantise_rows, quantise_rows

WEIGHTS = "model.int8.safetensors"
LARGE = 1 << 16  # routers and norms are small and stay as they are


def is_packed(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def save_packed(model: PreTrainedModel, folder: Path) -> None:
    """Writes config and 8-bit weights; tied weights once."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tied = set(tied_weights(model))
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(quantise_rows(tensors, LARGE), folder / WEIGHTS, metadata={"format": "pt"})


def load_packed(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    """The dequantised model, loaded strictly."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if dtype == "auto" else dtype)
    loaded = model.load_state_dict(dequantise_rows(load_file(folder / WEIGHTS)), strict=False)
    missing = set(loaded.missing_keys) - set(tied_weights(model))
    if missing or loaded.unexpected_keys:
        odd = sorted(missing) + sorted(loaded.unexpected_keys)
        raise UserError(f"the file {folder / WEIGHTS} does not fit its config.json ({odd[0]}); reinstall edgexpert")
    model.tie_weights()
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()

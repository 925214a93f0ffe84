"""Bundled checkpoints: 8-bit rows with a scale each, so that a trained model fits into a wheel.

The files hold standard transformers tensor names. A matrix ``name`` is stored as int8 with ``name.scale`` float32, one for
each row of its last dimension; everything else is stored as it is. Loading gives the dequantised weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from edgexpert.errors import UserError

WEIGHTS = "model.int8.safetensors"
SCALE = ".scale"
LARGE = 1 << 16


def quantise_rows(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Int8 with one scale a row for every large floating-point matrix; routers and norms are small and stay as they are."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or tensor.numel() < LARGE or not tensor.is_floating_point():
            packed[name] = tensor.contiguous()
            continue
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        packed[name] = (tensor.float() / scale).round().to(torch.int8)
        packed[name + SCALE] = scale.squeeze(-1)
    return packed


def dequantise_rows(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 tensors of `quantise_rows`."""
    return {
        name: tensor.float() * packed[name + SCALE].unsqueeze(-1) if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }


def is_packed(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file()


def save_packed(model: PreTrainedModel, folder: Path) -> None:
    """Writes config and 8-bit weights; tied weights once."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tied = set(model.all_tied_weights_keys or {})
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(quantise_rows(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def load_packed(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    """The dequantised model, loaded strictly."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if dtype == "auto" else dtype)
    loaded = model.load_state_dict(dequantise_rows(load_file(folder / WEIGHTS)), strict=False)
    missing = set(loaded.missing_keys) - set(model.all_tied_weights_keys or {})
    if missing or loaded.unexpected_keys:
        odd = sorted(missing) + sorted(loaded.unexpected_keys)
        raise UserError(f"{folder / WEIGHTS} does not fit its config.json ({odd[0]}); reinstall edgexpert")
    model.tie_weights()
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_dict(json.loads((folder / "generation_config.json").read_text()))
    return model.eval()

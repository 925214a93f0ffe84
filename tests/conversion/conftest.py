"""Tiny checkpoints, and a packed checkpoint as the weights of the transformers model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from edgexpert.conversion.sources.huggingface import HuggingFaceSource
from edgexpert.weights.files import Pack
from edgexpert.weights.matrix import PackedMatrix, dequantise
from tests.conftest import make_model, make_tokenizer

TINY = ("granitemoe", "olmoe", "qwen3_moe", "deepseek_v2")


def checkpoint(family: str, folder: Path, **changes: object) -> tuple[PreTrainedModel, HuggingFaceSource]:
    """A tiny model of two layers, saved in bfloat16 in several files, and the source that reads it."""
    model = make_model(family, num_hidden_layers=2, **changes).bfloat16()
    model.save_pretrained(folder, max_shard_size="30KB")
    make_tokenizer().save_pretrained(folder)
    return model, HuggingFaceSource(folder, AutoConfig.from_pretrained(folder), str(folder))


def float_weights(folder: Path) -> dict[str, Tensor]:
    """Everything that a packed checkpoint holds, under the names and in the shapes of the transformers model."""
    pack = Pack(folder)
    weights = {
        name: dequantise(stored).t() if isinstance(stored, PackedMatrix) else stored.float()
        for name, stored in pack.dense().items()
    }
    for layer in pack.manifest.layers:
        for part, stacked in pack.experts(layer).items():
            matrices = torch.stack([dequantise(stacked[e]) for e in range(layer.experts)])
            weights[layer.parameters[part]] = matrices if layer.transposed else matrices.transpose(1, 2)
    return weights

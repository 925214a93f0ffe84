"""Random weights in the shapes of real models, so that speed can be measured without a download.

The packed values are random bytes; scales give them the standard deviation of a model's initial weights, so that activations
stay finite, and the router is a real random one, so that experts are chosen about evenly. The text of such a model means
nothing.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from edgexpert.conversion.dummy_draft import write_dummy_draft
from edgexpert.conversion.sources.source import Source, meta_model
from edgexpert.core.errors import UserError
from edgexpert.core.resources import MODELS, PUBLISHED, bundled_folder
from edgexpert.weights.manifest import Linear, MatrixLayout
from edgexpert.weights.rounding import PackedMatrix, padded

STD = 0.02
"""Of all weights but embeddings; the usual `initializer_range`."""
EMBEDDING_STD = 10.0
COMMON = 0.68
"""Share of an embedding's variance that all tokens have in common, so that they share experts as those of a real model do:
65 tokens go to about 50 experts of 128 (46 in Qwen3's shape), where EdgeXpert's section 1 tells of 52 for 64 candidates."""
STD_OF_CODES = {4: (224 / 12) ** 0.5, 8: (254**2 / 12) ** 0.5}
"""Of codes that are uniformly random: -7 to 7, and -127 to 127 (about)."""
NIBBLES = [8, *range(1, 16)]
"""Codes are stored plus 8. There is no -8: weights whose mean is not zero push all tokens in one direction, to few experts."""
NIBBLE_PAIRS = np.array([[low | high << 4 for low in NIBBLES] for high in NIBBLES], np.uint8).flatten()
TOKENIZER = "stories"


class DummySource(Source):
    """Random weights for a configuration."""

    kind = "dummy"
    dummy = True

    def __init__(self, config: PreTrainedConfig, name: str) -> None:
        config.edgexpert_dummy = True  # whoever opens config.json sees it
        config.dtype = torch.bfloat16
        self.config, self.model = config, meta_model(config)
        self.origin = {"kind": self.kind, "name": name}
        self.fingerprint = config.to_dict()
        self._state = self.model.state_dict()

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def read(self, name: str) -> Tensor:
        """Normal weights; ones for norms, zeros for biases, and `random_embedding`."""
        shape = self._state[name].shape
        if len(shape) > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            if "embed" in name:
                return random_embedding(shape[0], shape[1], generator).bfloat16()
            return torch.empty(shape, dtype=torch.bfloat16).normal_(0, STD, generator=generator)
        return torch.ones(shape) if "norm" in name else torch.zeros(shape)

    def packed(self, name: str, matrix: MatrixLayout | Linear, count: int, zero_point: bool) -> Iterator[PackedMatrix]:
        random = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
        channels, width, group = matrix.channels, padded(matrix.outputs), matrix.group or matrix.channels
        for _ in range(count):
            if matrix.bits == 16:
                values = torch.from_numpy(random.standard_normal((channels, width), dtype=np.float32)).mul_(STD).bfloat16()
                yield PackedMatrix(values, None, None, channels, matrix.outputs, 16, group)
                continue
            random_bytes = random.integers(0, 1 << 64, channels * width * matrix.bits // 64, dtype=np.uint64).view(np.uint8)
            if matrix.bits == 4:
                values = torch.from_numpy(NIBBLE_PAIRS[random_bytes])
            else:
                values = torch.from_numpy(random_bytes).view(torch.int8).clamp_(min=-127)
            values = values.view(channels, -1)
            rows = (channels // group, width)
            scales = torch.full(rows, STD / STD_OF_CODES[matrix.bits], dtype=torch.float16)
            zeros = torch.full(rows, 8, dtype=torch.uint8) if zero_point and matrix.bits == 4 else None
            yield PackedMatrix(values, scales, zeros, channels, matrix.outputs, matrix.bits, group)

    def save_extras(self, folder: Path) -> None:
        """A random draft, and a tokenizer so that text can be given: the bundled model's, if the vocabulary is large enough."""
        write_dummy_draft(self.config, folder)
        bundled = bundled_folder(TOKENIZER)
        tokens = json.loads((bundled / "tokenizer.json").read_text())["model"]["vocab"]
        if self.config.get_text_config().vocab_size < len(tokens):
            return
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(bundled / name, folder / name)


def random_embedding(tokens: int, hidden: int, generator: torch.Generator) -> Tensor:
    """Normal float32 [tokens, hidden], of which all tokens have a part in common; too large to drown in what layers add."""
    own, common = (torch.empty(rows, hidden).normal_(0, EMBEDDING_STD, generator=generator) for rows in (tokens, 1))
    return own.mul_((1 - COMMON) ** 0.5).add_(common * COMMON**0.5)


def dummy_config(name: str) -> PreTrainedConfig:
    """The configuration of a shape by name, or of a config.json."""
    path = PUBLISHED / f"{name}.json" if name in MODELS else Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"there is no shape {name!r}: give {', '.join(MODELS)}, or a config.json")
    try:
        stored = json.loads(path.read_text())
        stored.pop("quantization_config", None)
        return CONFIG_MAPPING[stored.pop("model_type")].from_dict(stored)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"the file {path} is not a configuration that transformers knows ({error})") from error

"""The 8-bit form of the bundled encoder: how it was made, and how it is read.

    python -m edgexpert.encoder.quantise FLOAT_MODEL_FOLDER OUT_FOLDER

Every matrix becomes int8 with one float32 scale for each row (largest magnitude / 127); vectors stay float32. The pooler is
left out, since CLS attention does not pass through it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
_SCALE = ".scale"


def quantise(folder: Path, out: Path) -> None:
    """Writes the 8-bit form of the BERT model in ``folder``, with its configuration and tokenizer, to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        if name.startswith("pooler.") or name == "embeddings.position_ids":
            continue
        if weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny) / 127  # [rows, 1]
            stored[name + _SCALE] = scale
            weight = (weight / scale).round().to(torch.int8)
        stored[name] = weight.contiguous()
    save_file(stored, out / WEIGHTS)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, out / name)


def dequantise(folder: Path) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The float32 weights of what `quantise` wrote, and the bytes that each takes in the file, its scales included."""
    stored = load_file(folder / WEIGHTS)
    scales = {name.removesuffix(_SCALE): stored.pop(name) for name in list(stored) if name.endswith(_SCALE)}
    size = {name: weight.nbytes + (scales[name].nbytes if name in scales else 0) for name, weight in stored.items()}
    return {name: weight * scales[name] if name in scales else weight for name, weight in stored.items()}, size


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), Path(sys.argv[2]))

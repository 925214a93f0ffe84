"""The 8-bit form of the bundled encoder: how it was made, and how it is read.

    python -m edgexpert.encoder.quantise FLOAT_MODEL_FOLDER OUT_FOLDER

Matrices are stored as `int8` rows; vectors stay float32. The pooler is left out, since CLS attention does not pass through it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from edgexpert.int8 import dequantise_rows, quantise_rows

WEIGHTS = "model.safetensors"


def quantise(folder: Path, out: Path) -> None:
    """Writes the 8-bit form of the BERT model in ``folder``, with its configuration and tokenizer, to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: weight for name, weight in load_file(folder / WEIGHTS).items()
               if not name.startswith("pooler.") and name != "embeddings.position_ids"}
    save_file(quantise_rows(weights), out / WEIGHTS)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, out / name)


def dequantise(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of what `quantise` wrote."""
    return dequantise_rows(load_file(folder / WEIGHTS))


if __name__ == "__main__":
    quantise(Path(sys.argv[1]), Path(sys.argv[2]))

"""The bundled encoder's weights: how they were made, and how they are read.

    python -m edgexpert.encoder.quantise FLOAT_MODEL_FOLDER OUT_FOLDER

Linear layers are packed at 8 bits like those of a packed checkpoint, embeddings are float16, vectors float32. The pooler is left
out, since CLS attention does not pass through it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, BertModel

from edgexpert.core.library import compute_buffers
from edgexpert.kernels.modules import FloatEmbedding, PackedLinear
from edgexpert.weights.matrix import PackedMatrix, dequantise
from edgexpert.weights.rounding import quantise

WEIGHTS = "model.safetensors"
BITS, GROUP = 8, 32


def packed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored form of a BERT model's float weights."""
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        if weight.dim() < 2:
            stored[name] = weight.float()
        elif "embeddings" in name:
            stored[name] = weight.half()
        else:
            matrix = quantise(weight.float().t().contiguous(), BITS, GROUP)
            assert matrix.scales is not None
            stored[f"{name}.values"], stored[f"{name}.scales"] = matrix.values, matrix.scales
    return stored


def write(folder: Path, out: Path) -> None:
    """Writes the packed form of the BERT model in ``folder``, with its configuration and tokenizer, to ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(packed(load_file(folder / WEIGHTS)), out / WEIGHTS)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / name, out / name)


def load(folder: Path) -> BertModel:
    """The model that `write` wrote. Its linear layers run through our kernels on 16-bit weights: with activations of 8 bits, as
    packed 8-bit weights have them, the attention of a token moves by up to a tenth."""
    with torch.device("meta"):
        model = BertModel(AutoConfig.from_pretrained(folder, attn_implementation="eager"), add_pooling_layer=False)
    stored = load_file(folder / WEIGHTS)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            values, scales = stored[f"{name}.weight.values"], stored[f"{name}.weight.scales"]
            matrix = PackedMatrix(values, scales, None, module.in_features, module.out_features, BITS, GROUP)
            model.set_submodule(name, PackedLinear(quantise(dequantise(matrix), 16, GROUP), stored[f"{name}.bias"]))
        elif isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(stored[f"{name}.weight"], requires_grad=False)
            module.__class__ = FloatEmbedding
        elif isinstance(module, nn.LayerNorm):
            module.weight, module.bias = (nn.Parameter(stored[f"{name}.{part}"]) for part in ("weight", "bias"))
    compute_buffers(model)
    return model.eval()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))

"""However many layers a model has, a conversion takes the memory of about two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

LAYERS = 8
SHAPE = dict(
    vocab_size=256, hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=2,
    num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)
LAYER_BYTES = 2 * 16 * 3 * 256 * 256
MEASURE = """
import resource, sys
from pathlib import Path
from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import Options
from edgexpert.conversion.sources.opening import open_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

warm_up, source, out = sys.argv[1:]
convert(open_source(warm_up), Path(out + "0"), Options(4))
before = peak()
convert(open_source(source), Path(out), Options(4))
print(peak() - before)
"""


def write_checkpoint(folder: Path, layers: int, experts: int) -> None:
    """A checkpoint of random bfloat16 weights with a tensor for each expert, one file for each layer."""
    Qwen3MoeConfig(**{**SHAPE, "num_hidden_layers": layers, "num_experts": experts}).save_pretrained(folder)
    index: dict[str, str] = {}

    def save(tensors: dict[str, tuple[int, ...]], name: str) -> None:
        save_file({key: torch.randn(shape).bfloat16() for key, shape in tensors.items()}, folder / name)
        index.update(dict.fromkeys(tensors, name))

    save({"model.embed_tokens.weight": (256, 256), "lm_head.weight": (256, 256), "model.norm.weight": (256,)}, "rest.safetensors")
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj.weight": (256, 256), "self_attn.k_proj.weight": (128, 256), "self_attn.v_proj.weight": (128, 256),
            "self_attn.o_proj.weight": (256, 256), "self_attn.q_norm.weight": (64,), "self_attn.k_norm.weight": (64,),
            "input_layernorm.weight": (256,), "post_attention_layernorm.weight": (256,), "mlp.gate.weight": (experts, 256),
            **{f"mlp.experts.{e}.{part}_proj.weight": (256, 256) for e in range(experts) for part in ("gate", "up", "down")},
        }
        save({stem + name: shape for name, shape in shapes.items()}, f"layer{layer}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "small", 1, 2)
    write_checkpoint(tmp_path / "large", LAYERS, 16)
    arguments = [str(tmp_path / name) for name in ("small", "large", "out")]
    result = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    growth = int(result.stdout.split()[-1])
    assert 0 < growth < 2 * LAYER_BYTES + (8 << 20)  # the model has eight layers

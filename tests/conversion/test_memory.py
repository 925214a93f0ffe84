"""However many layers a model has, a conversion takes the memory of about two."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from edgexpert.conversion import calibration
from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from tests.conftest import make_tokenizer

LAYERS = 8
SHAPE = dict(
    vocab_size=256, hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=2,
    num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)
LAYER_BYTES = 2 * 16 * 3 * 256 * 256
PROCESS = Path("/proc/self")
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def resident(field: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most since the last reset (VmHWM)."""
    line = next(line for line in (PROCESS / "status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


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


@pytest.mark.skipif(not (PROCESS / "clear_refs").exists(), reason="peak memory can only be reset on Linux")
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "small", 1, 2)
    write_checkpoint(tmp_path / "large", LAYERS, 16)
    convert(open_source(str(tmp_path / "small")), tmp_path / "warm", PackOptions(4))  # what is loaded and allocated only once
    source = open_source(str(tmp_path / "large"))
    (PROCESS / "clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    convert(source, tmp_path / "out", PackOptions(4))
    assert resident("VmHWM") - before < 2 * LAYER_BYTES + (8 << 20)  # the model has eight layers


@pytest.mark.skipif(not (PROCESS / "clear_refs").exists(), reason="peak memory can only be reset on Linux")
def test_gptq_has_one_layer_in_float32_and_what_goes_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "VALUES_AT_ONCE", 1 << 20)  # a few experts at a time, as of a large model
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4 << 20)  # what is freed goes back to the system, as all above 32 MB does
    for name, layers, experts in (("small", 1, 2), ("large", LAYERS, 16)):
        write_checkpoint(tmp_path / name, layers, experts)
        make_tokenizer().save_pretrained(tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox. " * 40)
    options = PackOptions(4, 32, "gptq")
    convert(open_source(str(tmp_path / "small")), tmp_path / "warm", options, calibration=text)
    source = open_source(str(tmp_path / "large"))
    (PROCESS / "clear_refs").write_text("5")
    before = resident("VmRSS")
    convert(source, tmp_path / "out", options, calibration=text)
    peak = resident("VmHWM") - before
    # a layer in float32 is two of the checkpoint's; the rounding of a few experts takes some 16 MB here; the model takes 101 MB
    assert peak < 2 * LAYER_BYTES + (24 << 20)

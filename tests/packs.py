"""Packed checkpoints of tiny random models."""

from __future__ import annotations

from pathlib import Path

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from tests.conftest import make_model, make_tokenizer

SIZES = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=96)
"""Groups of 32 divide them."""
LATENT = dict(kv_lora_rank=32, v_head_dim=16)


def make_pack(family: str, folder: Path, options: PackOptions | None = None, **changes: object) -> Path:
    """Packs a model with seven layers, at 4 bits if nothing else is given, and returns its folder; the original is beside it."""
    sizes = SIZES | (LATENT if family == "deepseek_v2" else {}) | changes
    make_model(family, **sizes).bfloat16().save_pretrained(folder / "source")
    make_tokenizer().save_pretrained(folder / "source")
    convert(open_source(str(folder / "source")), folder / "packed", options or PackOptions(4, 32))
    return folder / "packed"

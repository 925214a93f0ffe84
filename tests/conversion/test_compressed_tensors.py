"""To compressed-tensors and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edgexpert.conversion.convert import convert
from edgexpert.conversion.export import export
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.weights.manifest import EXPERTS
from tests.conversion.conftest import TINY, checkpoint, float_weights


def packed_and_exported(family: str, folder: Path, options: PackOptions) -> Path:
    _, source = checkpoint(family, folder / "source")
    convert(source, folder / "packed", options)
    export(folder / "packed", folder / "exported")
    return folder / "exported"


@pytest.mark.parametrize("family", sorted(set(TINY) - {"granitemoe"}))  # whose experts the format has no place for
@pytest.mark.parametrize("options", [
    PackOptions(4, 8, keep={"lm_head": 16}),
    PackOptions(8, 8, keep={"lm_head": 16}),
    PackOptions(4, 8, zero_point=True, keep={"lm_head": 16}),
], ids=["4 bits", "8 bits", "zero points"])
def test_a_round_trip_changes_no_byte_of_the_experts(family: str, options: PackOptions, tmp_path: Path) -> None:
    exported = packed_and_exported(family, tmp_path, options)
    convert(open_source(str(exported)), tmp_path / "again", options)
    assert (tmp_path / "again" / EXPERTS).read_bytes() == (tmp_path / "packed" / EXPERTS).read_bytes()
    before, after = float_weights(tmp_path / "packed"), float_weights(tmp_path / "again")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_library_decompresses_what_was_exported(tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    exported = packed_and_exported("olmoe", tmp_path, PackOptions(4, 8, zero_point=True))
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_4_bits"]
    tensors = load_file(exported / "model-00002-of-00003.safetensors")
    stem = "model.layers.0.mlp.experts.3.up_proj."
    parts = {name.removeprefix(stem): tensor for name, tensor in tensors.items() if name.startswith(stem)}
    parts["weight_scale"] = parts["weight_scale"].float()
    weight = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    expected = float_weights(tmp_path / "packed")["model.layers.0.mlp.experts.gate_up_proj"][3].chunk(2)[1]
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("family", ["granitemoe", "qwen3_moe", "deepseek_v2"])
def test_transformers_loads_what_was_exported_with_the_packed_checkpoints_logits(family: str, tmp_path: Path) -> None:
    exported = packed_and_exported(family, tmp_path, PackOptions(4, 8, keep={"lm_head": 16}))
    loaded, info = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    expected.load_state_dict(float_weights(tmp_path / "packed"))
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        ours, theirs = loaded.eval()(ids).logits, expected(ids).logits
    assert (ours - theirs).norm() < 2e-2 * theirs.norm()


def test_every_linear_layer_is_either_a_target_or_ignored(tmp_path: Path) -> None:
    import re

    exported = packed_and_exported("qwen3_moe", tmp_path, PackOptions(4, 8, keep={"attention": 16}))
    config = json.loads((exported / "config.json").read_text())["quantization_config"]
    targets = config["config_groups"]["group_4_bits"]["targets"]
    index = json.loads((exported / "model.safetensors.index.json").read_text())["weight_map"]
    packed = {name.removesuffix(".weight_packed") for name in index if name.endswith(".weight_packed")}
    assert len(packed) == 2 * 8 * 3
    for module in {name.rpartition(".")[0] for name in index if "norm" not in name and "embed" not in name}:
        assert any(re.match(t.removeprefix("re:"), module) for t in targets) == (module in packed)
        assert any(re.match(t.removeprefix("re:"), module) for t in config["ignore"]) == (
            module not in packed and not module.endswith("mlp.gate")
        )


def test_coarser_groups_are_split_without_loss(tmp_path: Path) -> None:
    exported = packed_and_exported("olmoe", tmp_path, PackOptions(4, 8))
    manifest = convert(open_source(str(exported)), tmp_path / "finer", PackOptions(4, 4))
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(float_weights(tmp_path / "finer")[name], float_weights(tmp_path / "packed")[name])
    assert set(manifest.layers[1].errors["down"]) == {0.0}


def test_other_bits_are_rounded_anew_from_the_stored_weights(tmp_path: Path) -> None:
    exported = packed_and_exported("olmoe", tmp_path, PackOptions(4, 8))
    convert(open_source(str(exported)), tmp_path / "wide", PackOptions(16))
    name = "model.layers.1.mlp.experts.down_proj"
    expected = float_weights(tmp_path / "packed")[name].bfloat16().float()
    assert torch.equal(float_weights(tmp_path / "wide")[name], expected)


def test_unread_variants_are_refused(tmp_path: Path) -> None:
    exported = packed_and_exported("olmoe", tmp_path, PackOptions(4, 8))
    config = json.loads((exported / "config.json").read_text())
    config["quantization_config"]["format"] = "marlin-24"
    (exported / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="format marlin-24"):
        open_source(str(exported))
    config["quantization_config"]["format"] = "pack-quantized"
    (exported / "config.json").write_text(json.dumps(config))
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.experts.0.up_proj.weight_g_idx"] = "x.safetensors"
    (exported / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"model.layers.0.mlp.experts.0.up_proj.weight_g_idx": torch.zeros(32)}, exported / "x.safetensors")
    with pytest.raises(UserError, match="reordered by activation"):
        open_source(str(exported))

"""EAGLE-3 checkpoints: every format loads to the same draft, and nothing doubtful loads at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

from edgexpert.core.errors import UserError
from edgexpert.speculation.checkpoint import load_eagle3, save_eagle3
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model
from edgexpert.speculation.eagle3_config import normalise_layers

LAYERS = 12
TARGET = Qwen3MoeConfig(vocab_size=60, hidden_size=32, num_hidden_layers=LAYERS, architectures=["Qwen3MoeForCausalLM"])
EMBEDDING = torch.randn(60, 32, generator=torch.Generator().manual_seed(0))
# 4 heads of 16 on a hidden size of 32: head_dim is not hidden_size / heads
CONFIG = Eagle3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                      vocab_size=60, draft_vocab_size=20, target_hidden_size=32, fused_layers=(2, 6, 9))


def make_draft(**changes: Any) -> Eagle3Model:
    torch.manual_seed(1)
    config = replace(CONFIG, **changes)
    model = Eagle3Model(config, EMBEDDING if config.hidden_size == 32 else None)
    if model.d2t is not None:
        model.set_vocabulary(torch.arange(1, 60, 3)[:20])
    return model


def load(folder: Path) -> Eagle3Model:
    return load_eagle3(folder, TARGET, EMBEDDING)


def same(a: Eagle3Model, b: Eagle3Model) -> None:
    assert a.config == b.config
    for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == other
        assert x.dtype == y.dtype
        assert torch.equal(x, y), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_eagle3(make_draft(), tmp_path / "draft")
    return tmp_path / "draft"


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("format", ["official", "speculators"])
@pytest.mark.parametrize("changes", [
    {},
    {"draft_vocab_size": 60},
    {"norm_before_residual": True, "norm_before_fc": True},
    {"fc_norm": True, "norm_output": True, "attention_bias": True},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    {"hidden_size": 24, "max_position_embeddings": 100, "rms_norm_eps": 1e-5},
], ids=["plain", "full vocabulary", "norms", "eagle 3.1", "yarn", "other width"])
def test_what_is_saved_loads_again(tmp_path: Path, format: Any, changes: dict[str, Any]) -> None:
    draft = make_draft(**changes)
    save_eagle3(draft, tmp_path / "draft", format, TARGET)
    same(load(tmp_path / "draft"), draft)


def test_saved_names_are_the_official_ones_without_embeddings(folder: Path) -> None:
    projections = [f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"]
    assert set(load_file(folder / "model.safetensors")) == {
        "d2t", "t2d", "fc.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", *projections,
        "midlayer.post_attention_layernorm.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
        "midlayer.mlp.down_proj.weight", "norm.weight", "lm_head.weight",
    }


def test_pickled_tensors_and_shards_load_like_one_file(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    same(load(folder), make_draft())

    (folder / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    same(load(folder), make_draft())
    (folder / files[names[0]]).unlink()
    with pytest.raises(UserError, match=r"00001-of-00002\.safetensors is missing or damaged"):
        load(folder)


def test_a_pickle_that_runs_code_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Path}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="damaged"):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UserError, match="damaged"):
        load(folder)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("norm.weight"), "lacks the tensor norm.weight"),
    (lambda t: t.pop("d2t"), "lacks the tensor d2t"),
    (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}), "has the tensor midlayer.self_attn.q_norm"),
    (lambda t: t.update({"fc.weight": torch.ones(32, 64)}), r"fc.weight .* shape \[32, 64\], but .* \[32, 96\]"),
    (lambda t: t.update(d2t=t["d2t"] + torch.arange(20)), "d2t .* must hold the offset"),  # ids where offsets belong
    (lambda t: t.update(t2d=~t["t2d"]), "t2d must mark"),
])
def test_a_missing_leftover_or_odd_tensor_is_refused_by_name(folder: Path, change: Any, message: str) -> None:
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(("change", "message"), [
    ({"vocab_size": 61}, "vocabulary size 61, but this model's is 60"),
    ({"target_hidden_size": 64}, "hidden size 64, but this model's is 32"),
    ({"head_dim": 8}, "midlayer.self_attn"),
    ({"hidden_act": "gelu"}, "SiLU"),
    ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rotary embedding, one of default, linear"),
    ({"rope_scaling": {"type": "yarn"}}, "not that of a Llama layer"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 2, 9]}, "three distinct layers"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 6, 12]}, "three distinct layers"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 6]}, "three distinct layers"),
    ({"layer_types": ["sliding_attention"]}, "full attention"),
    ({"speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}}}, "this model is Qwen3MoeForCausalLM"),
])
def test_a_configuration_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    edit_config(folder, lambda config: config.update(change))
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_folder_without_configuration_or_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="no valid JSON"):
        load(folder)
    with pytest.raises(UserError, match="cannot be read"):
        load(folder / "nowhere")


@pytest.mark.parametrize(("ids", "layers"), [
    ([2, 6, 9], (2, 6, 9)),  # inputs of layers: official, speculators, vLLM
    ([1, 5, 8], (2, 6, 9)),  # outputs of layers: SpecForge
    ([3, 5, 8], (3, 5, 8)),
])
def test_both_ways_to_count_layers_are_recognised(ids: list[int], layers: tuple[int, ...]) -> None:
    assert normalise_layers(ids, LAYERS) == layers


def test_layers_may_stand_in_eagle_config_or_be_left_out(folder: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    edit_config(folder, lambda config: (config.pop(key), config.update(eagle_config={key: [1, 4, 8]})))
    assert load(folder).config.fused_layers == (2, 5, 9)
    edit_config(folder, lambda config: config.pop("eagle_config"))
    assert load(folder).config.fused_layers == (2, LAYERS // 2, LAYERS - 3)


def test_a_target_with_too_few_layers_for_the_default_is_refused(folder: Path) -> None:
    edit_config(folder, lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    small = LlamaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=6)
    with pytest.raises(UserError, match="three distinct layers"):
        load_eagle3(folder, small, EMBEDDING)


def test_values_that_a_nested_configuration_leaves_out_are_the_library_defaults(tmp_path: Path) -> None:
    save_eagle3(make_draft(), tmp_path / "draft", "speculators")

    def leave_out(config: dict[str, Any]) -> None:
        for key in ("model_type", "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings", "hidden_act"):
            del config["transformer_layer_config"][key]

    edit_config(tmp_path / "draft", leave_out)
    same(load(tmp_path / "draft"), make_draft())


def test_embeddings_of_the_target_are_shared_and_others_are_kept(folder: Path) -> None:
    assert load(folder).embed_tokens.weight.data_ptr() == EMBEDDING.data_ptr()
    edit_tensors(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": EMBEDDING.clone()}))
    assert load(folder).embed_tokens.weight.data_ptr() == EMBEDDING.data_ptr()
    edit_tensors(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": EMBEDDING + 1}))
    assert torch.equal(load(folder).embed_tokens.weight, EMBEDDING + 1)


def test_a_map_that_changes_nothing_may_come_with_the_full_vocabulary(tmp_path: Path) -> None:
    save_eagle3(make_draft(draft_vocab_size=60), tmp_path / "draft")
    edit_tensors(tmp_path / "draft", lambda t: t.update(d2t=torch.zeros(60).long(), t2d=torch.ones(60).bool()))
    same(load(tmp_path / "draft"), make_draft(draft_vocab_size=60))
    edit_tensors(tmp_path / "draft", lambda t: t["d2t"].fill_(1))
    with pytest.raises(UserError, match="has the tensor"):
        load(tmp_path / "draft")


def test_weights_take_the_dtype_of_the_target(folder: Path) -> None:
    draft = load_eagle3(folder, TARGET, EMBEDDING.bfloat16())
    assert {weight.dtype for weight in draft.parameters()} == {torch.bfloat16}
    assert draft.d2t is not None
    assert draft.d2t.dtype == torch.int64


def test_saving_replaces_a_draft_whole_and_nothing_else(folder: Path) -> None:
    other = make_draft(norm_output=True)
    save_eagle3(other, folder)
    same(load(folder), other)
    assert [path.name for path in folder.parent.iterdir()] == ["draft"], "no temporary folder is left"
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        save_eagle3(other, folder)

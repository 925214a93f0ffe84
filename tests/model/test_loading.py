"""Bad checkpoints and names get one sentence that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import edgexpert
from edgexpert.core.errors import UserError
from edgexpert.model.calibrated import read_calibrated
from edgexpert.model.loading import load_model
from edgexpert.policy import Hyperparameters
from tests.conftest import make_model, make_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model("qwen3_moe").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(name: object, **options: str) -> str:
    with pytest.raises(UserError) as caught:
        load_model(str(name), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_checkpoint_loads_with_its_tokenizer(checkpoint: Path) -> None:
    engine = edgexpert.load(str(checkpoint))
    assert engine.draft is not None
    assert engine.draft.name == "ngram"
    assert "no EAGLE-3 draft" in engine.generate("hello", max_new_tokens=3).notes[0]


def test_a_truncated_weight_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "damaged or truncated" in refusal(checkpoint)


def test_a_missing_weight_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "lacks the weight file model.safetensors" in refusal(checkpoint)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(checkpoint)


def test_damaged_and_missing_configurations_are_named(checkpoint: Path) -> None:
    for text in ("{", "{}", "[1]", "\0"):
        (checkpoint / "config.json").write_text(text)
        assert "is no JSON object with a model_type; download the checkpoint again" in refusal(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "no config.json" in refusal(checkpoint)


def test_a_missing_tokenizer_is_named(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer" in refusal(checkpoint)


def test_an_unknown_model_type_is_named(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    assert "the model type nonesuch" in refusal(checkpoint)


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "there is no model" in refusal("nonesuch")
    assert "there is no model" in refusal(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")
    assert refusal("nobody/nothing-here").endswith("check the name, or give the folder of a downloaded checkpoint")


def test_devices_and_dtypes_that_are_not_there(checkpoint: Path) -> None:
    if not torch.cuda.is_available():
        assert "`device` cpu" in refusal(checkpoint, device="cuda")
    assert "unknown `device`" in refusal(checkpoint, device="potato")
    assert "unknown `dtype`" in refusal(checkpoint, dtype="int3")


def test_a_dense_model_has_nothing_to_do(tmp_path: Path) -> None:
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2))
    dense.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no mixture-of-experts layer"):
        edgexpert.load(str(tmp_path))


def test_calibrated_hyperparameters_beside_a_checkpoint_are_used(checkpoint: Path) -> None:
    chosen = Hyperparameters(2, 2, 3, 1, theta1=3.0, theta2=1.5, selection_ratio=0.4, keep_channels=0.8, keep_mass=0.7)
    (checkpoint / "edgexpert.json").write_text(json.dumps({"hyperparameters": vars(chosen)}))
    assert read_calibrated(checkpoint) == chosen
    assert edgexpert.load(str(checkpoint), policy="edgexpert").policy.hyperparameters == chosen
    assert edgexpert.load(str(checkpoint), policy="edgexpert", k_tri=5).policy.k_tri == 5
    (checkpoint / "edgexpert.json").write_text('{"hyperparameters": {"k_min": 2}}')
    with pytest.raises(UserError, match=r"edgexpert\.json"):
        edgexpert.load(str(checkpoint))

"""`edgexpert info`: facts about a model, its memory and its draft, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import edgexpert
from edgexpert.cli.info import memory, verdict
from edgexpert.core.resources import bundled_folder
from edgexpert.speculation.medusa import MedusaConfig, MedusaModel, save_medusa
from edgexpert.weights import families
from edgexpert.weights.need import Need
from tests.cli.conftest import Run
from tests.conftest import make_model, make_tokenizer
from tests.conversion.gguf_files import ARCHITECTURES, write_gguf
from tests.parity.architectures import tiny_config, tiny_model


def test_facts_are_those_of_the_checkpoint(run: Run, tiny_checkpoint: Path) -> None:
    facts = json.loads(run("info", tiny_checkpoint, "--json").stdout)
    assert (facts["family"], facts["layers"], facts["moe_layers"]) == ("olmoe", 7, 7)
    assert (facts["experts"], facts["top_k"], facts["context"]) == (8, 2, 256)
    assert facts["expert_bytes"] == 3 * 32 * 24 * 4
    assert facts["bytes"]["experts"] == 7 * 8 * facts["expert_bytes"]
    assert sum(facts["bytes"].values()) == 4 * facts["parameters"] == facts["memory"]["weights"]
    assert facts["hyperparameters"]["n_tri"] == 1
    assert facts["draft"] == {"asked_for": "auto", "fits": True, "kind": "ngram", "notes": facts["draft"]["notes"]}
    assert facts["dtype"] == "float32"
    assert facts["chat_template"] is False


def test_bytes_are_those_of_the_dtype_asked_for(run: Run, tiny_checkpoint: Path) -> None:
    facts = json.loads(run("info", tiny_checkpoint, "--dtype", "bfloat16", "--json").stdout)
    assert facts["memory"]["weights"] == 2 * facts["parameters"]
    assert "Unknown --dtype int3" in run("info", tiny_checkpoint, "--dtype", "int3").stderr


def test_what_a_text_counts_is_what_info_says(run: Run, tiny_checkpoint: Path) -> None:
    facts = json.loads(run("info", tiny_checkpoint, "--json").stdout)
    generation = edgexpert.load(str(tiny_checkpoint), draft="none").generate("a fox", max_new_tokens=3)
    assert facts["expert_bytes_per_token_plain"] == generation.expert_bytes_plain == generation.expert_bytes_per_token


def test_a_draft_that_does_not_fit_is_a_fact_and_no_failure(run: Run, tiny_checkpoint: Path) -> None:
    result = run("info", tiny_checkpoint, "--draft", "./nowhere")
    assert result.exit_code == 0
    assert "does not fit: there is no draft './nowhere'" in result.stdout
    assert "8, of which 2 for each token" in result.stdout


def test_drafts_are_judged_by_their_configurations(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    eagle = json.loads(run("info", "--draft", bundled_folder("stories") / "draft", tiny_checkpoint, "--json").stdout)["draft"]
    assert not eagle["fits"] and "hidden size 256, but this model's is 32" in eagle["reason"]
    save_medusa(MedusaModel(MedusaConfig(1, 32, 128, 7, 1e-6)), tmp_path)
    medusa = json.loads(run("info", "--draft", tmp_path, tiny_checkpoint, "--json").stdout)
    assert medusa["draft"]["fits"] and medusa["draft"]["kind"] == "medusa"
    assert medusa["memory"]["draft"] == 4 * (32 + 32 * 32 + 32 + 32 * 128)
    save_medusa(MedusaModel(MedusaConfig(1, 32, 128, 6, 1e-6)), tmp_path)
    assert "num_hidden_layers 6" in run("info", "--draft", tmp_path, tiny_checkpoint).stdout


def test_the_bundled_model_has_its_own_draft_and_hyperparameters(run: Run) -> None:
    facts = json.loads(run("info", "--json").stdout)
    assert facts["draft"] == {"asked_for": "auto", "fits": True, "kind": "eagle3", "notes": []}
    assert facts["hyperparameters_calibrated"] and facts["hyperparameters"]["k_tri"] == 64


def test_a_gguf_file_is_told_to_be_converted(run: Run, tmp_path: Path) -> None:
    write_gguf(make_model("granitemoe", num_hidden_layers=1), tmp_path / "m.gguf")
    result = run("info", tmp_path / "m.gguf")
    assert result.exit_code == 0
    assert "stored as GGUF F32" in result.stdout
    assert f"edgexpert convert {tmp_path / 'm.gguf'}" in result.stdout
    assert {name: family for family, name in ARCHITECTURES.items()} == families.GGUF


def test_a_model_type_that_loading_refuses_is_told_before(run: Run, tmp_path: Path) -> None:
    tiny_model(tiny_config("minimax")).save_pretrained(tmp_path)
    facts = json.loads(run("info", tmp_path, "--json").stdout)
    assert facts["runs"] is False and facts["policies"] == [] and facts["policies_certain"]
    assert "cannot run models of the type minimax" in run("info", tmp_path).stdout


def test_a_dense_model_is_refused_with_one_sentence(run: Run, tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    result = run("info", tmp_path)
    assert result.exit_code == 2
    assert "give an MoE model" in result.stderr


def test_a_model_of_the_hub_that_is_not_here_is_answered_with_pull(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("info", "nobody/nothing")
    assert result.exit_code == 2
    assert "where there is a network: edgexpert pull nobody/nothing" in result.stderr


def test_memory_says_how_much_context_fits() -> None:
    need = Need("float32", {"experts": 700.0}, 1, draft=100, encoder=100, kv_token=10, context=1000)
    assert memory(need, 20_000)["fits"] and verdict(memory(need, 20_000)).startswith("fits, ")
    half = memory(need, 900 + 5000)
    assert not half["fits"] and half["context_that_fits"] == 500
    assert "context of up to 500 tokens" in verdict(half)
    assert "does not fit" in verdict(memory(need, 800)) and "convert" in verdict(memory(need, 800))
    assert memory(need, 0)["fits"] is None and "does not tell" in verdict(memory(need, 0))


@pytest.mark.parametrize("command", [("info",), ("list",), ("--help",), ("train", "draft", "-h"), ("--version",)])
def test_these_need_no_torch(tiny_checkpoint: Path, command: tuple[str, ...]) -> None:
    code = ("import sys; from edgexpert.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    folder = [tiny_checkpoint] if command in (("info",), ("list",)) else []
    assert subprocess.run([sys.executable, "-c", code, *command, *folder], check=False, capture_output=True).returncode == 0

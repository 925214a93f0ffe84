"""`edgexpert info`: facts about a model and its draft."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli.conftest import Run
from tests.conftest import make_tokenizer


def test_facts_are_those_of_the_checkpoint(run: Run, tiny_checkpoint: Path) -> None:
    facts = json.loads(run("info", tiny_checkpoint, "--json").stdout)
    assert (facts["family"], facts["layers"], facts["moe_layers"]) == ("olmoe", 7, 7)
    assert (facts["experts"], facts["top_k"], facts["context"]) == (8, 2, 256)
    assert facts["expert_bytes"] == 3 * 32 * 24 * 4
    assert facts["bytes"]["experts"] == 7 * 8 * facts["expert_bytes"]
    assert sum(facts["bytes"].values()) == 4 * facts["parameters"]
    assert facts["hyperparameters"]["n_tri"] == 1
    assert facts["draft"] == {"asked_for": "auto", "fits": True, "kind": "ngram", "notes": facts["draft"]["notes"]}


def test_a_draft_that_does_not_fit_is_a_fact_and_no_failure(run: Run, tiny_checkpoint: Path) -> None:
    result = run("info", tiny_checkpoint, "--draft", "./nowhere")
    assert result.exit_code == 0
    assert "does not fit: there is no draft './nowhere'" in result.stdout
    assert "8, of which 2 for each token" in result.stdout


def test_a_dense_model_is_refused_with_one_sentence(run: Run, tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    result = run("info", tmp_path)
    assert result.exit_code == 2
    assert "give an MoE model" in result.stderr

"""From ``--draft`` to a draft, with a sentence for every name that leads nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgexpert.core.errors import UserError
from edgexpert.speculation.checkpoint import save_eagle3
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model
from edgexpert.speculation.loading import load_draft
from tests.conftest import make_model, make_tokenizer

MODEL, TOKENIZER = make_model("qwen3_moe"), make_tokenizer()


def load(name: object, folder: Path | None = None) -> tuple[str, list[str]]:
    draft, notes = load_draft(str(name), MODEL, TOKENIZER, folder)
    return (draft.name if draft else "none"), notes


def save_tiny_eagle3(folder: Path) -> None:
    config = Eagle3Config(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                          vocab_size=128, draft_vocab_size=128, target_hidden_size=32, fused_layers=(2, 3, 4))
    torch.manual_seed(0)
    save_eagle3(Eagle3Model(config, MODEL.get_input_embeddings().weight), folder)


def test_drafts_by_name() -> None:
    assert load("none") == ("none", [])
    assert load("ngram") == ("ngram", [])


def test_auto_takes_the_draft_beside_the_model_and_says_so_when_there_is_none(tmp_path: Path) -> None:
    kind, notes = load("auto", tmp_path)
    assert kind == "ngram"
    assert "no EAGLE-3 draft" in notes[0]
    save_tiny_eagle3(tmp_path / "draft")
    assert load("auto", tmp_path) == ("eagle3", [])


def test_a_folder_is_recognised_by_its_configuration(tmp_path: Path) -> None:
    save_tiny_eagle3(tmp_path / "eagle")
    make_model("olmoe").save_pretrained(tmp_path / "little")
    TOKENIZER.save_pretrained(tmp_path / "little")
    assert load(tmp_path / "eagle")[0] == "eagle3"
    assert load(tmp_path / "little")[0] == "causal"


@pytest.mark.parametrize("name", ["nonesuch", "./nothing", "a/b/c"])
def test_a_name_that_leads_nowhere(name: str) -> None:
    with pytest.raises(UserError, match="there is no draft"):
        load(name)


def test_a_folder_without_or_with_a_damaged_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        load(tmp_path)


def test_a_draft_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tiny_eagle3(tmp_path / "eagle")
    other = make_model("qwen3_moe", hidden_size=48)
    with pytest.raises(UserError, match="hidden"):
        load_draft(str(tmp_path / "eagle"), other, TOKENIZER, None)

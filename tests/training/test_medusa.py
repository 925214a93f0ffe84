"""Medusa heads, trained in seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.medusa import MedusaDraft, MedusaModel, load_medusa
from edgexpert.training.capture import logit_scale
from edgexpert.training.medusa import new_medusa, train_medusa
from edgexpert.training.recipes import DraftRecipe

from .conftest import FAMILIES, qwen3_moe

RECIPE = DraftRecipe(steps=12, ttt=3, learning_rate=1e-2, warmup=2, tokens_per_batch=80)


@pytest.fixture(scope="module")
def trained(target: PreTrainedModel, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("medusa")
    train_medusa(target, RECIPE, states, out)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_new_heads_say_what_the_target_says(family: str) -> None:
    torch.manual_seed(1)
    target = FAMILIES[family]().eval()
    model = new_medusa(target, 2, logit_scale(target))
    seen: list[torch.Tensor] = []
    target.get_decoder().norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([[5, 6, 7]])).logits
        torch.testing.assert_close(model.heads[1](model.norm(seen[0])), logits)


def test_the_loss_of_every_head_falls(trained: Path) -> None:
    records = json.loads((trained / "history.json").read_text())
    assert all(after < before for before, after in zip(records[0]["loss"], records[-1]["loss"], strict=True))


def test_resuming_gives_the_same_losses(target: PreTrainedModel, states: Path, trained: Path, tmp_path: Path) -> None:
    train_medusa(target, RECIPE, states, tmp_path, stop_at=4)
    train_medusa(target, RECIPE, states, tmp_path)
    losses = [[record["loss"] for record in json.loads((out / "history.json").read_text())] for out in (trained, tmp_path)]
    assert losses[0] == losses[1]


def test_the_tree_holds_each_heads_likeliest_tokens(target: PreTrainedModel, trained: Path) -> None:
    model = load_medusa(trained / "draft", target.config)
    draft = MedusaDraft(model)
    features = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    state = draft.start()
    state.observe(torch.tensor([5, 6]), features)
    tree = state.propose(7, TreeShape(size=8, depth=6, top_k=1))
    with torch.no_grad():
        expected = [int(head(model.norm(features[1])).argmax()) for head in model.heads]
    assert tree.tokens.tolist() == [7, *expected]
    assert draft.fused_layers == (7,)
    assert state.bytes_read == sum(weight.nbytes for weight in model.parameters())


def test_heads_for_another_target_are_refused(trained: Path) -> None:
    with pytest.raises(UserError, match="num_hidden_layers 7"):
        load_medusa(trained / "draft", qwen3_moe(num_hidden_layers=8).config)


def test_incomplete_heads_are_refused(target: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="complete"):
        load_medusa(tmp_path, target.config)


def test_a_smaller_vocabulary_is_refused(target: PreTrainedModel, states: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whole vocabulary"):
        train_medusa(target, replace(RECIPE, draft_vocab=10), states, tmp_path)


def test_evaluation_gets_the_heads_under_training(target: PreTrainedModel, states: Path, tmp_path: Path) -> None:
    seen: list[MedusaModel] = []
    train_medusa(target, replace(RECIPE, steps=1), states, tmp_path, evaluate=lambda model: float(seen.append(model) or 2.0))
    assert len(seen[0].heads) == RECIPE.ttt

"""Training a draft, in seconds."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from edgexpert.core.errors import UserError
from edgexpert.speculation.checkpoint import load_eagle3
from edgexpert.speculation.eagle3 import Eagle3Model
from edgexpert.training.capture import Captured
from edgexpert.training.corpus import END_OF_TEXT, is_held_out
from edgexpert.training.draft import draft_config, initialise, new_draft, stories_data, train_draft
from edgexpert.training.recipes import STORIES, DraftRecipe

RECIPE = DraftRecipe(steps=12, ttt=3, learning_rate=1e-2, warmup=2, tokens_per_batch=80, draft_vocab=40,
                     intermediate_size=32, num_attention_heads=4)


def history(out: Path) -> list[dict[str, object]]:
    return [{name: value for name, value in record.items() if name != "seconds"}
            for record in json.loads((out / "history.json").read_text())]



@pytest.fixture(scope="module")
def trained(target: PreTrainedModel, states: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("draft")
    train_draft(target, RECIPE, states, out)
    return out


def test_the_loss_falls_at_every_depth(trained: Path) -> None:
    records = json.loads((trained / "history.json").read_text())
    first, last = records[0]["loss"], records[-1]["loss"]
    assert len(first) == RECIPE.ttt
    assert all(after < 0.9 * before for before, after in zip(first, last, strict=True))


def test_resuming_gives_the_losses_and_the_weights_of_an_uninterrupted_run(target: PreTrainedModel, states: Path,
                                                                           trained: Path, tmp_path: Path) -> None:
    assert train_draft(target, RECIPE, states, tmp_path, stop_at=5) == tmp_path / "checkpoint.pt"
    finished = train_draft(target, RECIPE, states, tmp_path)
    assert history(tmp_path) == history(trained)
    whole = load_file(trained / "draft" / "model.safetensors")
    resumed = load_file(finished / "model.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_vocabulary_map_is_kept_on_resume(target: PreTrainedModel, states: Path, tmp_path: Path) -> None:
    changed = tmp_path / "states"
    shutil.copytree(states, changed)
    train_draft(target, RECIPE, changed, tmp_path / "out", stop_at=1)
    first = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["weights"]["d2t"]
    shard = load_file(changed / "000000.safetensors")
    shard["tokens"].fill_(63)  # other counts: a map made anew would differ
    before = Captured(changed).vocabulary(40)
    save_file(shard, changed / "000000.safetensors")
    assert not torch.equal(Captured(changed).vocabulary(40), before)
    train_draft(target, replace(RECIPE), changed, tmp_path / "out", stop_at=2)
    assert torch.equal(torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["weights"]["d2t"], first)


def test_the_vocabulary_is_the_most_frequent_learned_tokens_the_lower_id_first(captured: Captured) -> None:
    batch = captured.batch(range(len(captured)), 0)
    counts = torch.bincount(batch.tokens[batch.loss_mask], minlength=64).tolist()
    expected = sorted(sorted(range(64), key=lambda token: (-counts[token], token))[:10])
    assert captured.vocabulary(10).tolist() == expected


@pytest.mark.parametrize("format", ["official", "speculators"])
def test_the_saved_draft_loads_as_it_was_trained(target: PreTrainedModel, states: Path, tmp_path: Path, format: str) -> None:
    kept: list[Eagle3Model] = []
    folder = train_draft(target, replace(RECIPE, steps=2), states, tmp_path, format=format,  # type: ignore[arg-type]
                         evaluate=lambda draft: float(kept.append(draft) or 1.0))
    loaded = load_eagle3(folder, target.config, target.get_input_embeddings().weight.detach())
    tokens, features = torch.randint(0, 64, (5,)), torch.randn(5, 96)
    with torch.no_grad():
        logits = [draft.logits(draft.step(tokens, draft.fuse(features), torch.arange(5))[0]) for draft in (kept[-1], loaded)]
    torch.testing.assert_close(*logits)
    assert torch.equal(loaded.to_target(torch.arange(40)), kept[-1].to_target(torch.arange(40)))


def test_acceptance_length_is_measured_with_every_checkpoint(target: PreTrainedModel, states: Path, tmp_path: Path) -> None:
    lengths = iter([1.5, 2.5])
    train_draft(target, replace(RECIPE, steps=4), states, tmp_path, evaluate=lambda draft: next(lengths), checkpoint_every=2)
    assert [record.get("acceptance_length") for record in history(tmp_path)] == [None, 1.5, None, 2.5]


def test_the_embedding_stays_the_targets_and_the_head_starts_as_it(target: PreTrainedModel, captured: Captured) -> None:
    draft = new_draft(draft_config(target, RECIPE, captured), target)
    assert not draft.embed_tokens.weight.requires_grad
    assert torch.equal(draft.embed_tokens.weight, target.get_input_embeddings().weight)
    ids = captured.vocabulary(40)
    initialise(draft, target, 0.5, ids, seed=0)
    assert torch.equal(draft.lm_head.weight, target.get_output_embeddings().weight[ids] * 0.5)


def test_a_weight_that_nobody_set_is_noticed(target: PreTrainedModel, captured: Captured) -> None:
    draft = new_draft(draft_config(target, RECIPE, captured), target)
    assert all(bool(weight.isnan().all()) for name, weight in draft.named_parameters() if name != "embed_tokens.weight")
    initialise(draft, target, 1.0, torch.arange(40), seed=0)
    assert all(bool(weight.isfinite().all()) for weight in draft.parameters())


def test_a_batch_is_a_function_of_the_step_and_an_epoch_sees_each_sequence_once(captured: Captured) -> None:
    recipe = replace(RECIPE, tokens_per_batch=4 * captured.longest)
    steps = [recipe.sequences(step, captured) for step in range(len(captured) // 4)]
    assert sorted(itertools.chain(*steps)) == list(range(len(captured)))
    assert recipe.sequences(3, captured) == steps[3]
    assert recipe.sequences(len(steps), captured) != steps[0]


def test_a_training_begins_with_the_weights_and_the_map_of_another_draft(target: PreTrainedModel, states: Path, trained: Path,
                                                                         tmp_path: Path) -> None:
    again = replace(RECIPE, steps=1, learning_rate=1e-9)
    finished = train_draft(target, again, states, tmp_path, start=trained / "draft")
    before, after = (load_file(folder / "model.safetensors") for folder in (trained / "draft", finished))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-8, msg=name)


def test_a_training_does_not_begin_from_a_draft_of_other_sizes(target: PreTrainedModel, states: Path, trained: Path,
                                                               tmp_path: Path) -> None:
    with pytest.raises(UserError, match="draft_vocab_size"):
        train_draft(target, replace(RECIPE, draft_vocab=30), states, tmp_path, start=trained / "draft")
    assert not (tmp_path / "draft").exists()


def test_another_recipe_does_not_resume(target: PreTrainedModel, states: Path, tmp_path: Path) -> None:
    train_draft(target, RECIPE, states, tmp_path, stop_at=1)
    with pytest.raises(UserError, match="another recipe"):
        train_draft(target, replace(RECIPE, ttt=2), states, tmp_path)


@pytest.mark.parametrize(("change", "message"), [({"draft_vocab": 65}, "larger than the target's 64"),
                                                 ({"num_attention_heads": 5}, "do not divide")])
def test_sizes_that_do_not_fit_the_target_are_refused(target: PreTrainedModel, states: Path, tmp_path: Path,
                                                      change: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_draft(target, replace(RECIPE, **change), states, tmp_path)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"learning_rate": float("nan")}, {"learning_rate": float("inf")},
                                   {"learning_rate": 1e30}, {"learning_rate": -1e-3}, {"ttt": 0}])
def test_a_recipe_that_cannot_train_is_refused(wrong: dict[str, float]) -> None:
    name = next(iter(wrong))
    with pytest.raises(UserError, match=f"`{name}`"):
        DraftRecipe(**wrong)  # type: ignore[arg-type]


def test_the_stories_draft_learns_no_document_that_is_held_out(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    texts = [" ".join(f"w{(number * step) % 59 + 1}" for step in range(1, 20)) for number in range(1, 59)]
    held_out = [text for text in texts if is_held_out(text)]
    assert held_out
    for file in itertools.chain(*STORIES.domains.values()):
        (tmp_path / file).write_text("".join(f"{text}\n{END_OF_TEXT}\n" for text in texts))
    source, kept_out = stories_data(tmp_path, tokenizer)
    prompts = [tokenizer.decode(prompt[1:]) for prompt in source.prompts]
    assert all(tokenizer.decode(prompt[1:]) not in prompts for prompt in kept_out)
    assert any(texts[0].startswith(prompt) for prompt in prompts)
    assert not any(text.startswith(prompt) for prompt in prompts for text in held_out)

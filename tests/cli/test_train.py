"""`edgexpert train`: what it refuses, and a draft trained in seconds."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from edgexpert.cli.train import training_data
from edgexpert.training.draft import RECIPES
from edgexpert.training.examples import Continuations
from edgexpert.training.recipes import STORIES
from tests.cli.conftest import Run
from tests.conftest import make_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("\n<|endoftext|>\n".join(f"once upon a time {n} foxes met a crow. " * 12 for n in range(6)))
    return file


def test_an_unknown_recipe_is_answered_with_the_known_ones(run: Run, tmp_path: Path) -> None:
    result = run("train", "model", "--recipe", "novels", "--corpus", tmp_path, "--out", tmp_path)
    assert result.exit_code == 2
    assert "stories" in result.stderr


def test_a_missing_corpus_is_named(run: Run, tmp_path: Path) -> None:
    result = run("train", "model", "--corpus", tmp_path / "none", "--out", tmp_path)
    assert result.exit_code == 2
    assert "--corpus" in result.stderr


def test_text_and_chats_exclude_each_other(run: Run, tmp_path: Path, text: Path) -> None:
    for arguments in ([], ["--text", text, "--chats", text]):
        result = run("train", "draft", "--model", "stories", "--out", tmp_path / "out", *arguments)
        assert result.exit_code == 2
        assert "either as --text files, or as a --chats file" in result.stderr


@pytest.mark.parametrize(("arguments", "part"), [
    (["--recipe", "stories"], "--recipe and --corpus belong together"),
    (["--corpus", "."], "--recipe and --corpus belong together"),
    (["--recipe", "novels", "--corpus", "."], "There is no recipe 'novels'; choose one of stories."),
    (["--recipe", "stories", "--corpus", "./nowhere"], "The corpus file nowhere/tinystories_sample.txt does not exist"),
])
def test_a_recipe_needs_its_name_and_its_corpus(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], part: str
) -> None:
    result = run("train", "draft", "--model", tiny_checkpoint, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert part in result.stderr


def test_a_recipe_trains_a_draft_on_the_corpus_of_the_model(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    for file in chain(*STORIES.domains.values()):
        texts = (f"{file}: {number} foxes met a crow and they all sang to the moon until the morning came. " * 2
                 for number in range(100))
        (tmp_path / file).write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts))

    def few(prompts: list[torch.Tensor], **_: int) -> Continuations:
        return Continuations([prompt for prompt in prompts if len(prompt) == 16][:4], length=24)

    out = tmp_path / "out"
    recipe = replace(RECIPES["stories"], ttt=2, steps=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "stories", recipe)
        patch.setattr("edgexpert.cli.train.VALIDATION_TOKENS", 2)
        patch.setattr("edgexpert.training.draft.Continuations", few)
        result = run("train", "draft", "--recipe", "stories", "--corpus", tmp_path, "--model", tiny_checkpoint, "--out", out,
                     "--steps", 1)
    assert result.exit_code == 0, result.output
    assert torch.load(out / "checkpoint.pt", weights_only=True)["recipe"] == asdict(replace(recipe, steps=1))


def test_resume_needs_a_checkpoint(run: Run, tmp_path: Path, text: Path) -> None:
    result = run("train", "draft", "--model", "stories", "--out", tmp_path / "out", "--text", text, "--resume")
    assert result.exit_code == 2
    assert "no training to resume" in result.stderr


def test_chats_too_long_for_a_sequence_are_left_out_and_do_not_end_the_training(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chats = [[{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}] for n in (8, 500, 31, 32)]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    source, held_out = training_data(tokenizer, None, file, regenerate=True, sequences=10, length=32)
    assert isinstance(source, Continuations)
    assert sorted([*map(len, source.prompts), *map(len, held_out)]) == [8, 31]


def test_medusa_heads_are_trained_from_the_same_command(run: Run, tiny_checkpoint: Path, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    result = run("train", "draft", "--kind", "medusa", "--model", tiny_checkpoint, "--text", text, "--out", out, "--steps", 1,
                 "--ttt", 2, "--length", 32, "--sequences", 4, "--no-regenerate")
    assert result.exit_code == 0, result.output
    assert (out / "draft" / "config.json").is_file()


@pytest.mark.parametrize("regenerate", ["--regenerate", "--no-regenerate"])
def test_a_trained_draft_runs_the_model(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, text: Path, regenerate: str
) -> None:
    out = tmp_path / "out"
    train = ["train", "draft", "--model", tiny_checkpoint, "--text", text, "--out", out, "--steps", 2, "--ttt", 2,
             "--length", 32, "--sequences", 8, regenerate]
    result = run(*train)
    assert result.exit_code == 0, result.output
    history = json.loads((out / "history.json").read_text())
    assert history[-1]["acceptance_length"] >= 1, "measured by decoding"
    answer = run("generate", "--model", tiny_checkpoint, "--draft", out / "draft", "--max-new-tokens", 8, "--json", "a")
    assert json.loads(answer.stdout)["draft"] == "eagle3"
    again = run(*train)
    assert again.exit_code == 2
    assert "--resume" in again.stderr


@pytest.mark.parametrize("option", [["--learning-rate", "nan"], ["--learning-rate", "1e30"], ["--steps", "0"]])
def test_a_setting_that_no_training_survives_is_refused(run: Run, tmp_path: Path, text: Path, option: list[str]) -> None:
    result = run("train", "draft", "--model", "stories", "--out", tmp_path / "out", "--text", text, *option)
    assert result.exit_code == 2 and option[0] in result.stderr
    assert not (tmp_path / "out").exists()


def test_binary_text_is_one_sentence(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 50)
    for option in ("--text", "--chats"):
        result = run("train", "draft", "--model", tiny_checkpoint, "--out", tmp_path / "out", option, tmp_path / "binary")
        assert (result.exit_code == 2 and "UTF-8" in result.stderr) or "chat template" in result.stderr, result.stderr


def test_a_damaged_checkpoint_is_not_resumed(run: Run, tiny_checkpoint: Path, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    train = ["train", "draft", "--model", tiny_checkpoint, "--text", text, "--out", out, "--steps", 1, "--ttt", 2,
             "--length", 32, "--sequences", 8, "--no-regenerate"]
    assert run(*train).exit_code == 0
    (out / "checkpoint.pt").write_bytes(b"PK\3\4 no checkpoint")
    result = run(*train, "--resume")
    assert result.exit_code == 2 and "is damaged" in result.stderr.replace("\n", " ")

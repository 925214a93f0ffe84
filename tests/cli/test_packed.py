"""Packed checkpoints on the command line: which kernels compute, with how many threads, and what a dummy's text is worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edgexpert.kernels import native
from tests.cli.conftest import Run
from tests.conftest import make_model, make_tokenizer


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before, of_torch = native.get_threads(), torch.get_num_threads()
    yield
    native.set_threads(before)
    torch.set_num_threads(of_torch)


@pytest.fixture
def dummy(run: Run, tmp_path: Path) -> Path:
    """A packed checkpoint of random weights."""
    make_model("olmoe", num_hidden_layers=1, intermediate_size=32).config.save_pretrained(tmp_path / "shape")
    assert run("convert", "--dummy", tmp_path / "shape" / "config.json", tmp_path / "packed").exit_code == 0
    make_tokenizer().save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def test_a_dummy_says_in_every_command_that_its_text_means_nothing(run: Run, dummy: Path) -> None:
    asked = ("--model", dummy, "--max-new-tokens", 3, "--draft", "none")
    generated = run("generate", *asked, "--json", "abc")
    compared = run("bench", *asked, "--policies", "exact", "--json")
    chatted = run("chat", *asked, input="abc\n/quit\n")
    for result in (generated, compared, chatted):
        assert result.exit_code == 0, result.output
        assert "random weights: speed only" in result.stdout
        assert f"packed weights, {native.path()}" in result.stdout or native.path() == "torch"


def test_threads_are_those_asked_for_and_named(run: Run, dummy: Path) -> None:
    for threads in (1, 3):
        result = run("generate", "--model", dummy, "--max-new-tokens", 3, "--threads", threads, "--json", "abc")
        (note,) = (note for note in json.loads(result.stdout)["notes"] if note.startswith("packed weights"))
        assert note.endswith(f", {threads} thread{'s' * (threads != 1)}")
        assert native.get_threads() == threads
        assert torch.get_num_threads() == (threads if native.path() == "torch" else 1)


@pytest.mark.parametrize("threads", [0, 100_000])
def test_a_number_of_threads_that_cannot_be_is_refused(run: Run, threads: int) -> None:
    result = run("generate", "--threads", threads, "abc")
    assert result.exit_code == 2 and "--threads must be from 1 to 1024" in result.stderr


def test_a_checkpoint_of_weights_that_were_learned_has_no_such_note(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert run("convert", tiny_checkpoint, tmp_path / "packed", "--group-size", 8).exit_code == 0
    result = run("generate", "--model", tmp_path / "packed", "--max-new-tokens", 3, "--json", "abc")
    assert "packed weights" in result.stdout and "random weights" not in result.stdout

"""A tiny checkpoint on disk, and a way to call the command line without a new process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgexpert.cli.main import app
from tests.conftest import make_model, make_tokenizer

Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "olmoe"
    make_model("olmoe").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run() -> Run:
    """Runs ``edgexpert ARGUMENTS`` in this process."""

    def invoke(*arguments: object, input: str | None = None) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input, env={"COLUMNS": "120"})

    return invoke

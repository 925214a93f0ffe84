"""Every error is written in one style, so that the command line can make a sentence of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgexpert
from edgexpert.cli.show import sentence
from edgexpert.core.errors import UserError

PROPER_NAMES = ("EAGLE-3 ", "Medusa ", "GGUF ", "EDGEXPERT_KERNELS ")


def written_texts() -> Iterator[tuple[str, str]]:
    """Place and text of each error in the package, with its values as they stand in the code."""
    for file in sorted(Path(edgexpert.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"):
                continue
            if isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                yield f"{file.name}:{node.lineno}", ast.unparse(node.args[0]).removeprefix("f")[1:-1]


def test_errors_begin_small_without_a_name_and_have_no_full_stop() -> None:
    texts = dict(written_texts())
    assert len(texts) > 50
    for place, text in texts.items():
        assert text[0].islower() or text.startswith(("`", "--", "{error} (", *PROPER_NAMES)), f"{place}: {text}"
        assert not text.endswith("."), f"{place}: {text}"


@pytest.mark.parametrize(("text", "printed"), [
    ("the prompt is empty; give some text", "The prompt is empty; give some text."),
    ("`n_tri` (3) must be at most `n_min` (2)", "--n-tri (3) must be at most --n-min (2)."),
    ("`TreeShape.top_k` must be from 1 to 256, not 0", "--tree-top-k must be from 1 to 256, not 0."),
])
def test_the_command_line_prints_a_sentence_with_its_own_options(text: str, printed: str) -> None:
    assert sentence(UserError(text)) == printed

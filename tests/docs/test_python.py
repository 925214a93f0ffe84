"""The Python that the documentation shows runs, page by page and from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"(<!-- not tested: [^\n]+ -->\n)?```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", ["python.md"])
def test_the_python_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for excuse, code in BLOCK.findall((DOCS / page).read_text("utf-8")):
        if not excuse:
            exec(code, names)
    assert capsys.readouterr().out

"""The tables of the documentation are those of the result files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("tables")


def test_every_table_of_the_documentation_is_that_of_its_result_file(tables: ModuleType) -> None:
    pages = {page.name: page.read_text("utf-8") for page in tables.PAGES}
    assert sum(len(tables.MARK.findall(page)) for page in pages.values()) >= 4
    for name, page in pages.items():
        assert tables.rendered(page) == page, f"{name}: run python benchmarks/tables.py"
        assert page.count("<!-- table:") == page.count("<!-- /table -->") == len(tables.MARK.findall(page)), name


def test_a_figure_that_was_typed_by_hand_is_found(tables: ModuleType) -> None:
    page = next(page.read_text("utf-8") for page in tables.PAGES if page.name == "performance.md")
    row = next(line for line in page.splitlines() if line.startswith("| OLMoE"))
    assert tables.rendered(page.replace(row, row.replace("ms", "s", 1))) == page


RESULTS = [*(BENCHMARKS / "results").glob("*.json"), BENCHMARKS.parent / "src/edgexpert/reproduce/frameworks-stories.json"]


@pytest.mark.parametrize("file", sorted(RESULTS), ids=lambda file: file.stem)
def test_result_files_say_which_command_and_commit_they_are_of(file: Path) -> None:
    about = json.loads(file.read_text("utf-8"))["about"]
    assert about["command"].startswith("python ") and len(about["commit"]) >= 7 and about["date"] and about["processor"]

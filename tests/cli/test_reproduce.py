"""`edgexpert reproduce`: what it prints, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")


def test_a_table_with_its_claims(run: Run, tmp_path: Path) -> None:
    result = json.loads(run("reproduce", "table5", "--out", tmp_path / "new", "--json").stdout)
    assert result["figures"] == ["table5"] and (tmp_path / "new" / "report.html").is_file()
    area = next(row for row in result["claims"] if row["claim"] == "area")
    assert area["ours"] == pytest.approx(9.31) and area["verdict"] == "agrees" and area["trace"].startswith("none")
    text = run("reproduce", "table5", "--out", tmp_path / "new").stdout
    assert "table5 controller area" in text and "14.1 %" in text


def test_an_unknown_figure_is_refused_with_a_list(run: Run, tmp_path: Path) -> None:
    result = run("reproduce", "fig99", "--out", tmp_path / "new")
    assert result.exit_code == 2 and "there is no figure 'fig99'" in result.stderr.lower().replace("\n", " ")
    assert "fig2a" in result.stderr and "headline" in result.stderr and not (tmp_path / "new").exists()


@pytest.mark.parametrize(("module", "extra"), [("pyarrow", "trace"), ("matplotlib", "plot")])
def test_a_missing_extra_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("edgexpert.reproduce.make.find_spec", lambda name: None if name == module else find(name))
    result = run("reproduce", "table5", "--out", tmp_path)
    assert result.exit_code == 2 and f"edgexpert[{extra}]" in result.stderr


def test_the_check_for_extras_needs_none_of_them() -> None:
    code = "import sys; sys.modules.update(pyarrow=None, matplotlib=None); import edgexpert.reproduce.make"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""


def test_a_folder_that_cannot_be_made_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("reproduce", "table5", "--out", tmp_path / "file")
    assert result.exit_code == 2 and "is no folder" in result.stderr

"""`edgexpert bench`: the comparison, its prompts file and its chart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgexpert.cli import plot
from edgexpert.cli.prompts import read_prompts
from edgexpert.core.errors import UserError
from tests.cli.conftest import Run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text('once upon a time, once upon\n\n{"prompt": "a fox met a crow"}\n')
    return file


def command(checkpoint: Path, prompts: Path) -> list[object]:
    return ["bench", "--model", checkpoint, "--prompts", prompts, "--max-new-tokens", 6, "--policies", "exact,pruned"]


def test_policies_stand_side_by_side(run: Run, tiny_checkpoint: Path, prompts: Path) -> None:
    result = run(*command(tiny_checkpoint, prompts))
    assert result.exit_code == 0
    header, exact, pruned, *_ = result.stdout.splitlines()
    assert header.split() == ["policy", "tokens/s", "acceptance", "length", "prefill", "decode", "total", "saved"]
    assert exact.startswith("exact")
    assert pruned.startswith("pruned")
    assert pruned.rstrip().endswith("%")
    assert "over 2 prompts" in result.stdout


def test_json_and_chart(run: Run, tiny_checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    chart = tmp_path / "chart.svg"
    result = run(*command(tiny_checkpoint, prompts), "--json", "--plot", chart)
    rows = {row["policy"]["name"]: row for row in json.loads(result.stdout)["policies"]}
    assert rows["exact"]["new_tokens"] == 12
    assert rows["exact"]["approximations"] == []
    assert rows["pruned"]["expert_bytes_per_token"]["decode"] < rows["exact"]["expert_bytes_per_token"]["decode"]
    assert "<svg" in chart.read_text()


@pytest.mark.parametrize(("text", "part"), [
    ("\n \n", "is empty"),
    ('a fox\n{"words": "x"}', "line 2"),
    ('{"prompt": ', "line 1"),
])
def test_a_bad_prompts_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=part):
        read_prompts(file)


def test_a_missing_or_binary_prompts_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_prompts(tmp_path / "binary")


def test_a_chart_that_cannot_be_drawn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"\.png, \.svg, \.pdf"):
        plot.require_matplotlib(tmp_path / "chart.txt")
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"edgexpert\[plot\]"):
        plot.require_matplotlib(tmp_path / "chart.png")


def test_a_place_where_no_chart_can_stand_is_told_before_the_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgexpert.cli.options.Options.load", lambda self: pytest.fail("loaded"))
    (tmp_path / "folder.png").mkdir()
    for place, reason in (("none/chart.png", "no folder"), ("folder.png", "is a folder"), ("n" * 300 + ".png", "name")):
        result = run("bench", "--plot", tmp_path / place)
        assert result.exit_code == 2 and reason in result.stderr.replace("\n", " ")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]


def test_no_policies_is_bad_input(run: Run) -> None:
    result = run("bench", "--policies", ",")
    assert result.exit_code == 2
    assert "No policy is given" in result.stderr

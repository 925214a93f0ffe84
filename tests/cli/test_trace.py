"""`edgexpert trace`: recording, synthesis, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgexpert.trace.read import Trace
from tests.cli.conftest import Run


def test_a_recording_is_summarised(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('once upon a time\n{"text": "a fox met a crow"}\n')
    out = tmp_path / "t.parquet"
    result = run("trace", "--model", tiny_checkpoint, "--prompts", prompts, "--out", out, "--max-new-tokens", 4, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["synthetic"], facts["prefill_stages"], facts["policy"]["name"]) == (False, 2, "exact")
    assert [stage.text for stage in Trace(out).stages() if stage.stage.tree is None] == [0, 1]


def test_a_synthetic_trace_says_so_everywhere(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    arguments = ("trace", "--synthesise", "granite-1b-a400m", "--out", out, "--stages", 2, "--prompt-tokens", 5)
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["synthetic"], facts["verify_stages"], facts["model"]) == (True, 2, "granite-1b-a400m")
    again = run(*arguments)
    assert again.exit_code == 2 and "exists" in again.stderr and "--force" in again.stderr.replace("\n", " ")
    assert "synthetic: drawn at random" in run(*arguments, "--force").stdout
    assert Trace(out).synthetic


@pytest.mark.parametrize(("arguments", "part"), [
    (["--prompts", "EMPTY"], "is empty"),
    ([], "Give either --prompts FILE"),
    (["--synthesise", "gpt-2"], "choose one of granite-1b-a400m"),
    (["--synthesise", "olmoe-1b-7b", "--acceptance", "9"], "cannot be synthesised"),
    (["--prompts", "GOOD", "--channels", "some"], "full, sampled, none"),
])
def test_bad_input_is_one_sentence_and_no_file(
    run: Run, tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], part: str
) -> None:
    (tmp_path / "EMPTY").write_text("\n\n")
    (tmp_path / "GOOD").write_text("a fox\n")
    paths = [str(tmp_path / word) if word in ("EMPTY", "GOOD") else word for word in arguments]
    result = run("trace", "--model", tiny_checkpoint, "--out", tmp_path / "t.parquet", *paths)
    assert result.exit_code == 2
    assert part in result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["EMPTY", "GOOD"]

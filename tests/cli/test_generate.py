"""`edgexpert generate`: text, table, JSON, bad input, interruption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import edgexpert
from edgexpert.runtime.session import Session
from edgexpert.speculation.verify import Verifier
from tests.cli.conftest import Run

PROMPT = "once upon a time a fox met a crow, once upon"


def command(checkpoint: Path, *more: object) -> list[object]:
    return ["generate", "--model", checkpoint, "--max-new-tokens", 12, *more]


def test_text_comes_first_and_is_printed_as_it_is(run: Run, tiny_checkpoint: Path) -> None:
    engine = edgexpert.load(str(tiny_checkpoint))
    text = engine.generate(PROMPT, max_new_tokens=100).text
    result = run("generate", "--model", tiny_checkpoint, "--max-new-tokens", 100, PROMPT)
    assert result.exit_code == 0
    assert result.stdout.startswith(text + "\n\n")
    for label in ("prompt tokens", "new tokens", "time to first token", "time per output token", "acceptance length",
                  "expert bytes per output token, prefill", "expert bytes per output token, decode"):
        assert label in result.stdout[len(text):]
    assert "approximated: nothing: exact" in result.stdout


def test_a_policy_says_what_it_approximates(run: Run, tiny_checkpoint: Path) -> None:
    result = run(*command(tiny_checkpoint, "--policy", "edgexpert", "--no-coarse-pruning", PROMPT))
    assert result.exit_code == 0
    said = result.stdout[result.stdout.index("approximated:"):]
    assert "fine pruning" in said
    assert "coarse pruning" not in said


def test_json_is_one_object_with_the_promised_keys(run: Run, tiny_checkpoint: Path) -> None:
    result = run(*command(tiny_checkpoint, "--policy", "pruned", "--keep-channels", 0.5, "--json", PROMPT))
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert {"text", "token_ids", "policy", "model", "draft", "timing", "speculation", "traffic", "expert_bytes_per_token",
            "experts_per_layer_per_stage", "approximations"} <= value.keys()
    assert value["policy"]["keep_channels"] == 0.5
    assert None not in value["policy"].values(), "every hyperparameter is resolved"
    assert value["draft"] == "ngram"


def test_the_prompt_comes_from_standard_input_when_left_out(run: Run, tiny_checkpoint: Path) -> None:
    given = run(*command(tiny_checkpoint, "--json", PROMPT))
    read = run(*command(tiny_checkpoint, "--json"), input=PROMPT + "\n")
    assert json.loads(given.stdout)["token_ids"] == json.loads(read.stdout)["token_ids"]


@pytest.mark.parametrize(("arguments", "part"), [
    (["--policy", "exacct", "hi"], "exact, pruned, reuse, coalesced, edgexpert"),
    (["--model", "no/such/folder", "hi"], "There is no model 'no/such/folder': give a bundled name"),
    (["--draft", "./nowhere", "hi"], "There is no draft"),
    (["--n-tri", "3", "--n-min", "2", "hi"], "--n-tri (3) must be at most --n-min (2)."),
    (["--computational-calibration", "hi"], "switch coalescing on"),
    (["--temperature", "-1", "hi"], "--temperature must"),
    (["--max-new-tokens", "0", "hi"], "--max-new-tokens must"),
    (["--max-new-tokens", "5000", "hi"], "context"),
    (["--tree-size", "-1", "hi"], "--tree-size must be a whole number from 0 to"),
    (["--tree-depth", "1000000", "hi"], "--tree-depth must be a whole number from 1 to"),
    (["--dtype", "int3", "hi"], "--dtype"),
    (["--device", "tpu", "hi"], "--device"),
    ([" "], "The prompt is empty"),
    (["\udcff"], "UTF-8"),
])
def test_bad_input_is_one_sentence_and_exit_code_2(
    run: Run, tiny_checkpoint: Path, arguments: list[str], part: str
) -> None:
    result = run(*command(tiny_checkpoint, *arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert part in result.stderr
    assert result.stderr.startswith("edgexpert: ")
    assert result.stderr.endswith(".\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--seed", "x", "hi"], ["--nonsense", "hi"]])
def test_wrong_usage_has_exit_code_2(run: Run, arguments: list[str]) -> None:
    result = run("generate", *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the fourth verify stage."""
    step = Session.step

    def interrupting(self: Session, verifier: Verifier) -> list[int]:
        if self.speculation.stages == 3:
            raise KeyboardInterrupt
        return step(self, verifier)

    monkeypatch.setattr(Session, "step", interrupting)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_keeps_text_and_statistics(run: Run, tiny_checkpoint: Path) -> None:
    result = run(*command(tiny_checkpoint, "--draft", "none", PROMPT))
    assert result.exit_code == 130
    assert "acceptance length" in result.stdout
    assert "note: interrupted" in result.stdout


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_with_json_still_prints_one_object(run: Run, tiny_checkpoint: Path) -> None:
    result = run(*command(tiny_checkpoint, "--draft", "none", "--json", PROMPT))
    assert result.exit_code == 130
    value = json.loads(result.stdout)
    assert value["finish"] == "interrupted"
    assert 0 < len(value["token_ids"]) < 50


@pytest.mark.parametrize("where", ["edgexpert.load", "edgexpert.runtime.session.Session.begin"])
def test_ctrl_c_before_the_first_token_leaves_with_one_line(
    run: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    result = run(*command(tiny_checkpoint, PROMPT))
    assert result.exit_code == 130
    assert (result.stdout, result.stderr) == ("", "Interrupted.\n")


def test_the_installed_command_works_offline(tiny_checkpoint: Path) -> None:
    code = "from edgexpert.cli.main import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", code, *map(str, command(tiny_checkpoint, "--json"))],
        input=PROMPT, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert len(json.loads(process.stdout)["token_ids"]) == 12

"""`edgexpert generate`: text, table, JSON, bad input, interruption."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgexpert
from edgexpert.cli.show import readable_bytes
from edgexpert.runtime.session import Session
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.verify import Verifier
from tests.cli.conftest import Run

MAIN = "from edgexpert.cli.main import main; main()"
PROMPT = "once upon a time a fox met a crow, once upon"


def command(checkpoint: Path, *more: object) -> list[object]:
    return ["generate", "--model", checkpoint, "--max-new-tokens", 12, *more]


def test_standard_output_is_the_text_alone_and_standard_error_one_line_and_the_notes(run: Run, tiny_checkpoint: Path) -> None:
    generation = edgexpert.load(str(tiny_checkpoint)).generate(PROMPT, tree=TreeShape(4), max_new_tokens=100)
    result = run("generate", "--model", tiny_checkpoint, "--max-new-tokens", 100, "--speculation", 4, PROMPT)
    assert result.exit_code == 0
    assert result.stdout == generation.text + "\n"
    line, notes = result.stderr.splitlines()
    assert line.startswith("100 tokens, ") and line.endswith("; exact")
    assert f"{generation.speculation.acceptance_length:.2f} tokens a stage" in line
    assert f"{readable_bytes(generation.expert_bytes_per_token)} of experts read a token" in line
    assert f"plain decoding reads {readable_bytes(generation.expert_bytes_plain)}: its top-k experts" in line
    assert notes.startswith("note: no EAGLE-3 draft lies beside this model")


def test_plain_decoding_reads_what_the_line_says_that_it_reads(tiny_checkpoint: Path) -> None:
    plain = edgexpert.load(str(tiny_checkpoint), draft="none").generate(PROMPT, max_new_tokens=8)
    assert plain.expert_bytes_per_token == plain.expert_bytes_plain


def test_stats_show_the_whole_table(run: Run, tiny_checkpoint: Path) -> None:
    result = run(*command(tiny_checkpoint, "--stats", PROMPT))
    for label in ("prompt tokens", "new tokens", "time to first token", "time per output token", "acceptance length",
                  "expert bytes per output token, prefill", "expert bytes per output token, decode"):
        assert label in result.stderr
    assert result.stderr.splitlines()[-2] == "exact"


def test_a_policy_says_what_it_approximates(run: Run, tiny_checkpoint: Path) -> None:
    for more in ((), ("--stats",)):
        result = run(*command(tiny_checkpoint, "--policy", "edgexpert", "--no-coarse-pruning", *more, PROMPT))
        assert result.exit_code == 0
        said = result.stderr[result.stderr.index("approximated:"):]
        assert "fine pruning" in said
        assert "coarse pruning" not in said


def test_sampling_that_the_checkpoint_asks_for_is_done_and_shown(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "sampled"
    shutil.copytree(tiny_checkpoint, copy)
    (copy / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 1}')
    shown = "from the checkpoint's generation_config.json: temperature 0.7, top_k 50, top_p 0.9"
    assert shown in run(*command(copy, PROMPT)).stderr
    given = run(*command(copy, "--temperature", 0, PROMPT))
    assert "generation_config.json" not in given.stderr
    assert given.stdout == run(*command(tiny_checkpoint, PROMPT)).stdout


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
    (["--kernels", "avx1024", "hi"], "Unknown --kernels avx1024; choose one of auto"),
    (["--model", "", "hi"], "name is empty"),
    (["--draft", "", "hi"], "There is no draft ''"),
    (["--temperature", "nan", "hi"], "--temperature must"),
    (["--top-p", "nan", "hi"], "--top-p must"),
    (["--repetition-penalty", "inf", "hi"], "--repetition-penalty must"),
    (["--threads", "9" * 20, "hi"], "--threads must be from 1 to"),
    (["--max-new-tokens", "9" * 20, "hi"], "context"),
    (["--speculation", "9" * 20, "hi"], "must be a whole number from 0 to 1024"),
    (["--policy", "reuse", "--theta1", "nan", "hi"], "--theta1 (nan)"),
    (["--policy", "pruned", "--keep-channels", "nan", "hi"], "--keep-channels (nan)"),
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
    assert len(result.stdout) > 3
    assert "; interrupted" in result.stderr


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
    process = subprocess.run(
        [sys.executable, "-c", MAIN, *map(str, command(tiny_checkpoint, "--json"))],
        input=PROMPT, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert len(json.loads(process.stdout)["token_ids"]) == 12


@pytest.mark.parametrize("arguments", ["--version", "--help", "generate -h", "simulate --devices", "info --json", "list"])
def test_a_full_disk_behind_standard_output_is_one_sentence(arguments: str) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = subprocess.run([sys.executable, "-c", MAIN, *arguments.split()],
                                 stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr == "edgexpert: the output cannot be written (No space left on device).\n"


@pytest.mark.parametrize("arguments", [("--help",), ("info", "--json")])
def test_a_reader_that_went_away_ends_a_command_quietly(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as closed:
        process = subprocess.run([sys.executable, "-c", MAIN, *arguments], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (process.returncode, process.stderr) == (1, b"")


def test_a_text_that_cannot_be_written_ends_with_one_sentence(tiny_checkpoint: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = subprocess.run([sys.executable, "-c", MAIN, *map(str, command(tiny_checkpoint, PROMPT))],
                                 stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1] == "edgexpert: the output cannot be written (No space left on device)."
    assert "Traceback" not in process.stderr

"""`edgexpert chat`: history, commands, models with and without a chat template."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgexpert.runtime.engine import Engine, Prompt
from edgexpert.runtime.session import Session
from edgexpert.speculation.verify import Verifier
from tests.cli.conftest import Run

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """What the engine is asked, in order."""
    asked: list[Prompt] = []
    encode = Engine.encode

    def spy(self: Engine, prompt: Prompt) -> list[int]:
        asked.append(prompt if isinstance(prompt, str) else list(prompt))
        return encode(self, prompt)

    monkeypatch.setattr(Engine, "encode", spy)
    return asked


def chat(run: Run, checkpoint: Path, *lines: str) -> str:
    result = run("chat", "--model", checkpoint, "--draft", "none", "--max-new-tokens", 4, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_without_a_template_the_text_grows(run: Run, tiny_checkpoint: Path, prompts: list[Prompt]) -> None:
    said = chat(run, tiny_checkpoint, "a fox", "a crow", "/stats", "/quit", "never read")
    assert "has no chat template" in said
    assert "> " not in said, "prompts are for people at a terminal"
    assert len(prompts) == 2
    assert prompts[0] == "a fox"
    answer = prompts[1].removeprefix("a fox").removesuffix("\na crow")
    assert len(answer) == 4
    assert answer in said
    # all tokens of the first turn but the last, which is run again
    assert said.split("prompt tokens from the cache")[1].split()[0] == str(len("a fox") + len(answer) - 1)


def test_with_a_template_the_history_is_messages(
    run: Run, tiny_checkpoint: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Engine.__init__

    def with_template(self: Engine, *args: object, **kwargs: object) -> None:
        load(self, *args, **kwargs)
        self.tokenizer.chat_template = TEMPLATE

    monkeypatch.setattr(Engine, "__init__", with_template)
    said = chat(run, tiny_checkpoint, "a fox", "a crow")
    assert "has no chat template" not in said
    assert [message["role"] for message in prompts[1]] == ["user", "assistant", "user"]
    assert prompts[1][2]["content"] == "a crow"


def test_reset_forgets(run: Run, tiny_checkpoint: Path, prompts: list[Prompt]) -> None:
    chat(run, tiny_checkpoint, "a fox", "/reset", "a crow")
    assert prompts == ["a fox", "a crow"]


def test_policy_changes_and_stats_show_it(run: Run, tiny_checkpoint: Path) -> None:
    said = chat(run, tiny_checkpoint, "/stats", "/policy", "/policy pruned", "a fox", "/stats", "/policy nonsense", "/what",
                "/help")
    assert "There is no answer yet" in said
    assert "exact: nothing approximated." in said
    assert "From now on: coarse pruning" in said
    assert "acceptance length" in said
    assert "approximated: coarse pruning" in said
    assert "There is no policy 'nonsense'" in said
    assert "There is no command /what" in said
    assert "/reset" in said


def test_a_turn_that_does_not_fit_is_refused_and_forgotten(run: Run, tiny_checkpoint: Path, prompts: list[Prompt]) -> None:
    said = chat(run, tiny_checkpoint, "a fox " * 400, "a crow")
    assert "/reset starts over" in said
    assert prompts[-1] == "a crow"


def test_a_system_message_comes_first_and_stays_over_a_reset(run: Run, tiny_checkpoint: Path, prompts: list[Prompt]) -> None:
    result = run("chat", "--model", tiny_checkpoint, "--draft", "none", "--max-new-tokens", 4, "--system", "be brief",
                 input="a fox\n/reset\na crow\n/system be long\n/reset\na hen\n/system\n/reset\na cow\n")
    assert result.exit_code == 0, result.output
    assert prompts == ["be brief\na fox", "be brief\na crow", "be long\na hen", "a cow"]
    assert "The model is told nothing before." in result.stdout


def test_lines_are_joined_by_a_backslash_and_by_quotes(run: Run, tiny_checkpoint: Path, prompts: list[Prompt]) -> None:
    chat(run, tiny_checkpoint, "a \\", " fox", "/reset", '""" a', "crow", ' hen""" ', "/reset", '"""one"""')
    assert prompts == ["a \n fox", "a\ncrow\n hen", "one"]


def test_a_conversation_is_saved_and_gone_on_from(
    run: Run, tiny_checkpoint: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    said = chat(run, tiny_checkpoint, "a fox", f"/save {file}", f"/save {file}", "a crow")
    assert f"Saved 2 messages to {file}." in said and "in the place of what was there" in said
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    said = chat(run, tiny_checkpoint, f"/load {file}", "a crow")
    assert "Going on from 2 messages." in said
    assert prompts[1] == prompts[2], "as if nothing lay between"
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize("content", ["{}", "[1]", "nonsense", '[{"role": "user"}]', '[{"role": "king", "content": "a"}]',
                                     '[{"role": "user", "content": 1}]', "[" * 100_000])
def test_a_file_that_is_no_conversation_is_refused_and_the_conversation_stays(
    run: Run, tiny_checkpoint: Path, prompts: list[Prompt], tmp_path: Path, content: str
) -> None:
    (tmp_path / "bad.json").write_text(content)
    said = chat(run, tiny_checkpoint, "a fox", f"/load {tmp_path / 'bad.json'}", "a crow")
    assert "is no JSON list of messages" in said
    assert prompts[1].startswith("a fox")


def test_places_that_cannot_be_read_or_written_are_told(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    said = chat(run, tiny_checkpoint, f"/save {tmp_path}", f"/save {tmp_path}/no/file", "/save",
                f"/load {tmp_path}/none", "/load", f"/save {tmp_path / ('x' * 300)}", "/save /dev/null")
    assert f"The output {tmp_path} is a folder" in said
    assert f"There is no folder {tmp_path}/no" in said
    assert "cannot be read (No such file or directory)" in said
    assert "give its name after /save" in said and "give its name after /load" in said
    assert "too long" in said
    assert "The output /dev/null is no regular file" in said


def test_ctrl_c_ends_an_answer_and_keeps_what_there_is(
    run: Run, tiny_checkpoint: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Session.step

    def interrupted(self: Session, verifier: Verifier) -> list[int]:
        if self.speculation.stages == 1:
            raise KeyboardInterrupt
        return step(self, verifier)

    monkeypatch.setattr(Session, "step", interrupted)
    result = run("chat", "--model", tiny_checkpoint, "--draft", "none", "--max-new-tokens", 50, input="a fox\na crow\n/stats\n")
    assert result.exit_code == 0, result.output
    assert len(prompts) == 2 and len(prompts[1]) == len("a fox") + 2 + len("\na crow"), "two tokens were there"
    assert "interrupted" in result.stdout


def test_stats_after_each_answer_on_request(run: Run, tiny_checkpoint: Path) -> None:
    result = run("chat", "--model", tiny_checkpoint, "--draft", "none", "--max-new-tokens", 4, "--stats", input="a fox\n")
    assert "4 tokens, " in result.stdout and "of experts read a token" in result.stdout


def at_terminal(code: str, *typed: str, **environment: str) -> str:
    """What a program shows that runs at a terminal of its own, where each of ``typed`` is typed at a prompt."""
    program = Path(__file__).with_name("terminal.py")
    result = subprocess.run([sys.executable, program, code, *typed], env={**os.environ, "TERM": "dumb", **environment},
                            capture_output=True, text=True, check=True, timeout=60)
    return result.stdout


READ = """
from edgexpert.cli.line import Lines
with Lines(keep={keep}) as lines:
    while (line := lines.read()) is not None:
        print("said", repr(line))
"""


def test_lines_are_edited_and_remembered_at_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("readline")
    state = {"XDG_STATE_HOME": str(tmp_path)}
    shown = at_terminal(READ.format(keep=True), "a foz\x7fx\n", "\x03", "b\n", "\x04", **state)
    assert "said 'a fox'" in shown, "backspace edits"
    assert "Ctrl-D or /quit leaves." in shown and "said 'b'" in shown, "Ctrl-C does not"
    history = tmp_path / "edgexpert" / "chat_history"
    assert history.read_text().splitlines()[-2:] == ["a fox", "b"]
    assert history.stat().st_mode & 0o077 == 0, "it is nobody else's business"
    assert "said 'a fox'" in at_terminal(READ.format(keep=True), "\x10\x10\n", "\x04", **state), "Ctrl-P twice"


def test_nothing_is_remembered_where_it_is_not_wanted(tmp_path: Path) -> None:
    at_terminal(READ.format(keep=False), "a fox\n", "\x04", XDG_STATE_HOME=str(tmp_path))
    assert list(tmp_path.iterdir()) == []

"""`edgexpert chat`: history, commands, models with and without a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgexpert.runtime.engine import Engine, Prompt
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
    said = chat(run, tiny_checkpoint, "/stats", "/policy pruned", "a fox", "/stats", "/policy nonsense", "/what", "/help")
    assert "There is no answer yet" in said
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

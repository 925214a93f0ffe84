"""Every command that README and documentation show runs, page by page and from top to bottom, in a folder of its own.

A comment before a block says where it cannot be run as it stands: ``<!-- test: skip, REASON -->``, or
``<!-- test: add OPTIONS -->``, which are appended to the block's commands to make them short.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from edgexpert.cli.main import app
from edgexpert.kernels import native
from edgexpert.trace.synthesis import synthesise_trace

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- test: (?P<marker>[^\n]+) -->\n+)?"
    r"(?:^```(?:console|sh|bash|)\n(?P<fenced>.*?)^```$|(?P<indented>(?:^    [^\n]*\n)+))", re.MULTILINE | re.DOTALL)
OTHER_FENCE = re.compile(r"^```(?!console\n|sh\n|bash\n|\n).*?^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("edgexpert", "echo", "python", "python3", "pip", ".venv/bin/pip", "source", "scripts/test", "for", "cmake", "git")


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """The commands of a page, each with its block's marker."""
    for found in BLOCK.finditer(OTHER_FENCE.sub("", page.read_text("utf-8"))):
        text = found["fenced"] or found["indented"] or ""
        lines = [line.strip().removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines()]
        if is_command(lines[0]):
            yield from ((line, found["marker"] or "") for line in lines if is_command(line))


def is_command(line: str) -> bool:
    words = [word for word in line.split() if not re.match(r"[A-Z_]+=", word)]
    return bool(words) and words[0] in COMMANDS


def to_run(page: Path) -> list[str]:
    """What is run of a page: its commands with their additions, but those that a marker takes out."""
    assert all(marker == "" or marker.startswith(("skip, ", "add ")) for _, marker in commands(page))
    return [f"{line.partition('  #')[0]} {marker.removeprefix('add')}".strip()
            for line, marker in commands(page) if not marker.startswith("skip, ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_trace: Path) -> Iterator[Path]:
    """A folder with the files that the pages speak of, small. Threads are as many afterwards as before."""
    threads, of_torch = native.get_threads(), torch.get_num_threads()
    for name in ("prompts.txt", "my_prompts.txt"):
        (tmp_path / name).write_text("Once upon a time, a little fox\n")
    shutil.copy(tiny_trace, tmp_path / "recorded.parquet")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    native.set_threads(threads)
    torch.set_num_threads(of_torch)


@pytest.fixture(scope="session")
def tiny_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "run.parquet"
    synthesise_trace("granite-1b-a400m", file, stages=1, prompt_tokens=8)
    return file


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    for line in to_run(page):
        run_line(line, folder)


def run_line(line: str, folder: Path) -> None:
    """Runs a command in this process, where PyTorch is loaded once."""
    words = shlex.split(line)
    said = None
    if words[0] == "echo":
        cut = words.index("|")
        said, words = " ".join(words[1:cut]) + "\n", words[cut + 1 :]
    environment = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    assert words[0] == "edgexpert", f"the test runs commands of edgexpert alone; put a marker before: {line}"
    if "--trace" in words and not (folder / words[words.index("--trace") + 1]).exists():
        shutil.copy(folder / "recorded.parquet", folder / words[words.index("--trace") + 1])  # another page records it
    result = CliRunner().invoke(app, words[1:], input=said, env=environment)
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"


def test_blocks_are_found_and_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n    edgexpert one  # comment\n    EDGEXPERT_KERNELS=torch edgexpert two\n\n"
        "    not a command\n\n```python\nedgexpert = 1\n```\n\n```console\n$ edgexpert three\noutput\n```\n\n"
        "<!-- test: skip, why -->\n\n    edgexpert four\n\n<!-- test: add --short -->\n\n```sh\nedgexpert \\\nfive\n```\n")
    assert to_run(page) == [
        "edgexpert one", "EDGEXPERT_KERNELS=torch edgexpert two", "edgexpert three", "edgexpert  five  --short"]

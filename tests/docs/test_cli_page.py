"""The option tables of docs/cli.md are those of the commands, and no command is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edgexpert.cli.main import app

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_commands() -> None:
    result = subprocess.run([sys.executable, ROOT / "scripts" / "cli_tables.py", "--check"], check=False)
    assert result.returncode == 0, "run scripts/cli_tables.py"


def test_every_command_has_a_section() -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    names = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert len(names) >= 9
    for name in names:
        assert f"<!-- options: {name} -->" in page

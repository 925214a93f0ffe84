#!/usr/bin/env python3
"""Writes the option tables of docs/cli.md from the commands themselves; with --check only says whether they differ.

A table stands between ``<!-- options: NAME -->`` and ``<!-- end -->``: NAME is a command, of which its own options are shown, or
``shared`` for those that generate, chat, bench and trace have in common.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from edgexpert.cli.main import app
from edgexpert.cli.options import Options

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
TABLE = re.compile(r"(<!-- options: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHARED = {field.name for field in fields(Options)}


def command_named(name: str) -> Any:
    command: Any = typer.main.get_command(app)
    for word in name.split():
        command = command.commands[word]
    return command


def table(name: str) -> str:
    """The options of a command as a markdown table."""
    shared = name == "shared"
    parameters = command_named("generate" if shared else name).params
    rows = [row(parameter) for parameter in parameters if (parameter.name in SHARED) == shared or not has_shared(name)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [("option", "default", ""), ("---",) * 3, *rows])


def has_shared(name: str) -> bool:
    return name in ("shared", "generate", "chat", "bench", "trace")


def row(parameter: Any) -> tuple[str, str, str]:
    """Name, default and meaning of an option or argument."""
    help, default = (parameter.help or "").strip(), ""
    if stated := re.search(r"\s*\[default: (.*)\]$", help):
        help, default = help[: stated.start()], stated[1]
    elif parameter.default is not None and parameter.default is not False and not callable(parameter.default):
        default = "on" if parameter.default is True else str(parameter.default)
    if parameter.param_type_name == "argument":
        name = f"`{(parameter.metavar or parameter.name.upper()).strip('[].')}`"
    else:
        kind = parameter.display_type(typer.Context(typer.main.get_command(app))).strip("<>").upper()
        value = "" if parameter.is_flag else f" {parameter.metavar or {'INT': 'N', 'FLOAT': 'X', 'STR': 'NAME'}.get(kind, kind)}"
        name = ", ".join(f"`{option}{value}`" for option in [*parameter.opts, *parameter.secondary_opts])
    return name.replace("|", "\\|"), default.replace("|", "\\|"), help.rstrip(".").replace("|", "\\|")


def main() -> int:
    page = PAGE.read_text("utf-8")
    written = TABLE.sub(lambda found: found[1] + table(found[2]) + found[3], page)
    if "--check" in sys.argv:
        return int(written != page)
    PAGE.write_text(written, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

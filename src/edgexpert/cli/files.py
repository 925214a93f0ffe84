"""Files that a command writes beside what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from edgexpert.core.output import output_file


@contextmanager
def told_output(file: Path | None) -> Iterator[Path | None]:
    """`output_file`, which replaces a file and says so on the error stream; None stands for no file."""
    if file is None:
        yield None
        return
    with output_file(file) as part:
        there = file.exists()
        yield part
    typer.echo(f"{'replaced' if there else 'wrote'} {file}", err=True)

"""The table of architectures in docs/models.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.parity.examine import Row

BEGIN, END = "<!-- table of architectures: written by scripts/parity -->", "<!-- end of table -->"


def written(page: str, rows: Sequence[Row], heading: str) -> str:
    """A page with its table replaced."""
    supported = [row for row in rows if not row.hosted.startswith("refused: ")]
    refused = [row for row in rows if row.hosted.startswith("refused: ")]
    lines = [BEGIN, "", heading, "", "| model type | hosted | changing rotary frequencies | policies | packed | native |",
             "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.hosted} | {row.ropes} | {_policies(row)} | {_short(row.packed)} | {row.native or '-'} |"
        for row in supported
    ]
    lines += ["", "Refused when they are loaded or converted:", "", "| model type | reason |", "|---|---|"]
    lines += [f"| {row.name} | {_short(row.hosted).removeprefix('refused: ')} |" for row in refused]
    before, rest = page.split(BEGIN)
    return before + "\n".join([*lines, "", END]) + rest.split(END)[1]


def _policies(row: Row) -> str:
    return "all" if row.policies == "run" else row.policies.split(":")[0]


def _short(text: str) -> str:
    """Without the name of the folder that the model happened to lie in."""
    return re.sub(r"the model \S+ \(model type \w+\) ", "", text).replace("<", "&lt;").replace("|", "/")

"""`edgexpert reproduce`: the paper's tables and figures, with a report that sets its numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from edgexpert.cli.options import Json
from edgexpert.cli.show import print_json, print_line, print_rich, table


def reproduce(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For figures, numbers and report.")],
    figures: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FIGURE]...", show_default=False,
                       help="all, table2, table3, table5, fig2a, fig2b, fig4b, fig8b, fig9d, fig10b, fig11, fig12a, fig12b, "
                            "fig12c, fig13a, fig13b, fig13c or headline; several at once. [default: all]"),
    ] = None,
    stages: Annotated[
        int, typer.Option(help="Verify stages of each model's synthetic trace; more take longer.", min=1)
    ] = 6,
    json: Json = False,
) -> None:
    """Reproduce the paper's tables and figures: drawings, numbers, and what agrees with the paper."""
    from edgexpert.reproduce.make import Progress as Told
    from edgexpert.reproduce.make import reproduce as make
    from edgexpert.reproduce.make import require_extras
    from edgexpert.reproduce.report import cells, claim_rows

    require_extras()
    from edgexpert.reproduce.workbench import Settings

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("reproducing", total=None)
        made = make(figures or (), out, Settings(stages=stages),
                    Told(lambda count: progress.update(bar, total=count), lambda what: progress.update(bar, description=what),
                         lambda: progress.advance(bar)))
    rows: list[dict[str, Any]] = claim_rows(made)
    if json:
        print_json({"out": str(out), "figures": list(made), "claims": rows})
        return
    shown = table("claim", "paper", "ours", "difference", "", "trace")
    for row in rows:
        _, paper, ours, difference, verdict, trace, _ = cells(row)
        name = f"{row['figure']} {row['claim'].replace('_', ' ')}"
        shown.add_row(name, paper, ours, difference, verdict, trace.partition(":")[0])
    print_rich(shown)
    print_line(f"reasons and figures: {out / 'report.html'} and {out / 'report.md'}")

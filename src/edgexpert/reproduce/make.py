"""Making figures and writing their files."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgexpert.core.errors import UserError
from edgexpert.core.output import output_file, output_folder
from edgexpert.reproduce import report
from edgexpert.reproduce.figure import Figure

if TYPE_CHECKING:
    from edgexpert.reproduce.workbench import Settings

EXTRAS = {"pyarrow": "trace", "matplotlib": "plot"}


@dataclass(frozen=True)
class Progress:
    """What the progress bar is told.

    Attributes:
        begin: so many figures are to be made.
        doing: something begins.
        done: a figure is done.
    """

    begin: Callable[[int], None] = lambda figures: None
    doing: Callable[[str], None] = lambda what: None
    done: Callable[[], None] = lambda: None


def require_extras() -> None:
    """Raises UserError naming the extra that is not installed."""
    for module, extra in EXTRAS.items():
        if find_spec(module) is None:
            raise UserError(f"reproducing figures needs {module}; install it with: pip install 'edgexpert[{extra}]'")


def reproduce(
    names: Sequence[str], out: Path, settings: Settings | None = None, progress: Progress | None = None
) -> dict[str, Figure]:
    """Makes figures and writes each as PNG, SVG, CSV and JSON into ``out``, with a report of their claims.

    Args:
        names: of figures; none for all.

    Raises:
        UserError: there is no such figure, an extra is not installed, or ``out`` cannot be written.
    """
    require_extras()
    from edgexpert.reproduce.registry import FIGURES, chosen, headline_figures

    progress, wanted = progress or Progress(), chosen(names)
    needed = [name for name in FIGURES if name in wanted or ("headline" in wanted and name in headline_figures())]
    with output_folder(out) as place:
        figures = _made(needed, wanted, settings, progress)
        images = {name: _write_figure(name, figure, place) for name, figure in figures.items()}
        rows = report.claim_rows(figures)
        _write(place / "claims.json", (json.dumps({"claims": rows}, indent=1) + "\n").encode())
        _write(place / "claims.csv", table(rows).encode())
        _write(place / "report.md", report.markdown(figures).encode())
        _write(place / "report.html", report.html(figures, images).encode())
    return figures


def _made(needed: Sequence[str], wanted: Sequence[str], settings: Settings | None, progress: Progress) -> dict[str, Figure]:
    """The figures ``wanted``, made of those ``needed``."""
    from edgexpert.reproduce.registry import FIGURES, headline
    from edgexpert.reproduce.workbench import Workbench

    progress.begin(len(needed))
    figures: dict[str, Figure] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Workbench(Path(folder), settings, progress.doing)
        for name in needed:
            progress.doing(name)
            figures[name] = FIGURES[name](bench)
            progress.done()
    if "headline" in wanted:
        figures["headline"] = headline(figures)
    return {name: figure for name, figure in figures.items() if name in wanted}


def _write_figure(name: str, figure: Figure, out: Path) -> bytes:
    """The files of one figure; gives its PNG."""
    _write(out / f"{name}.csv", table(figure.rows).encode())
    content = {"title": figure.title, "trace": figure.trace, "note": figure.note, "rows": [
        {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
        for row in figure.rows], "claims": [answer.row() for answer in figure.answers]}
    _write(out / f"{name}.json", (json.dumps(content, indent=1) + "\n").encode())
    images = _draw(figure)
    for ending, image in images.items():
        _write(out / f"{name}.{ending}", image)
    return images["png"]


def _draw(figure: Figure) -> dict[str, bytes]:
    """By ending of the file's name."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(9, 4.5), layout="constrained")
    figure.draw(drawing)
    drawing.suptitle(f"{figure.title} [{kinds(figure)}]", fontsize=10)
    images = {}
    for ending, metadata in (("svg", {"Date": None}), ("png", None)):
        image = io.BytesIO()
        with rc_context({"svg.hashsalt": "edgexpert"}):  # the same file each time
            drawing.savefig(image, format=ending, dpi=90, metadata=metadata)
        images[ending] = image.getvalue()
        drawing.set_layout_engine("none")  # laid out by the first
    return images


def kinds(figure: Figure) -> str:
    """The kinds of traces behind a figure, in words: synthetic, recorded, or neither."""
    found = [kind for kind in ("synthetic", "recorded") if f"{kind}:" in figure.trace]
    return " and ".join(found) or "no trace"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(file: Path, content: bytes) -> None:
    with output_file(file) as part:
        part.write_bytes(content)

"""The bar chart of `edgexpert bench --plot`; needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.cli.measured import Measured

FORMATS = (".png", ".svg", ".pdf")


def require_matplotlib(file: Path) -> None:
    """Raises UserError when a chart could not be drawn into ``file``: before the measurement, not after it."""
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; install it with: pip install 'edgexpert[plot]'")
    if file.suffix.lower() not in FORMATS:
        raise UserError(f"--plot draws {', '.join(FORMATS)} files, not {file.suffix or 'a file without ending'}; rename it")


def draw_comparison(measured: Sequence[Measured], file: Path, format: str) -> None:
    """A bar a policy: expert bytes per output token, prefill on top of decode, the acceptance length above."""
    from matplotlib.figure import Figure

    names = [row.policy for row in measured]
    decode = [row.decode_bytes / 1e6 for row in measured]
    prefill = [row.prefill_bytes / 1e6 for row in measured]
    figure = Figure(figsize=(1.6 + 1.2 * len(names), 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(names, decode, color="#4c72b0", label="decode")
    bars = axes.bar(names, prefill, bottom=decode, color="#dd8452", label="prefill")
    lengths = [row.acceptance_length for row in measured]
    axes.bar_label(bars, ["" if length is None else f"{length:.2f}" for length in lengths], padding=2)
    axes.margins(y=0.12)
    axes.set_ylabel("expert bytes per output token (MB)")
    axes.set_title("acceptance length above each bar", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, format=format)

"""A reproduced table or figure, and the few kinds of drawings that they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgexpert.reproduce.claims import Answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Figure:
    """Attributes:
        trace: what the numbers are from, for people: recorded, synthetic or none.
        note: what the paper's text states of it, and what we had to choose.
        rows: its numbers, all with the same keys.
        draw: draws them.
    """

    title: str
    trace: str
    note: str
    rows: Rows
    answers: list[Answer]
    draw: Callable[[Drawing], None]


def percent_less(ours: float, before: float) -> float:
    """By how many per cent ``ours`` is below ``before``."""
    return 100 * (1 - ours / before)


def column(rows: Rows, name: str, **where: Any) -> list[Any]:
    """A column of the rows that have the given values."""
    return [row[name] for row in rows if all(row[key] == value for key, value in where.items())]


def bars(axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float]], ylabel: str, stacked: bool = False) -> None:
    """Bars for each label: side by side, or on top of one another."""
    width = 0.8 if stacked else 0.8 / len(series)
    bottom = [0.0] * len(labels)
    for number, (name, values) in enumerate(series.items()):
        shift = 0.0 if stacked else (number - (len(series) - 1) / 2) * width
        axes.bar([place + shift for place in range(len(labels))], values, width, bottom if stacked else 0, label=name)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, labels)) > 8 else {}
    axes.set_xticks(range(len(labels)), labels, fontsize=8, **slanted)
    finish(axes, ylabel, legend=len(series) > 1)


def lines(axes: Axes, x: Sequence[float], series: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> None:
    """A line a series."""
    for name, values in series.items():
        axes.plot(x, values, marker="o", label=name)
    axes.set_xlabel(xlabel)
    finish(axes, ylabel, legend=len(series) > 1)


def finish(axes: Axes, ylabel: str, legend: bool) -> None:
    axes.set_ylabel(ylabel, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))

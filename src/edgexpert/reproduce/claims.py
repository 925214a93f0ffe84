"""What the paper claims (`paper.toml`), and what we answer."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Verdict = Literal["agrees", "differs"]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper.

    Attributes:
        figure: the one of ours that answers it.
        where: section, figure or table of the paper.
        value: a figure that should come out, within ``tolerance`` of itself.
        at_least, at_most: bounds instead of a figure.
        read_as: what words without a figure were taken to mean.
        contradiction: it does not fit other statements of the paper.
        headline: shown in the summary.
    """

    name: str
    figure: str
    where: str
    says: str
    unit: str
    value: float | None = None
    at_least: float = float("-inf")
    at_most: float = float("inf")
    tolerance: float = 0.05
    read_as: str = ""
    contradiction: bool = False
    headline: bool = False

    def difference(self, ours: float) -> float:
        """Ours minus the paper's; how far beyond the bound, or 0 within it."""
        if self.value is not None:
            return ours - self.value
        return ours - min(max(ours, self.at_least), self.at_most)

    def verdict(self, ours: float) -> Verdict:
        return "agrees" if abs(self.difference(ours)) <= self.tolerance * abs(self.value or 0) else "differs"

    @property
    def paper(self) -> str:
        """The paper's figure as text."""
        if self.value is not None:
            return with_unit(self.value, self.unit)
        low, high = self.at_least, self.at_most
        if high == float("inf"):
            return "at least " + with_unit(low, self.unit)
        if low == float("-inf"):
            return "at most " + with_unit(high, self.unit)
        return f"{low:g} to {with_unit(high, self.unit)}"


@dataclass(frozen=True)
class Answer:
    """What comes out here.

    Attributes:
        trace: what it was computed from: recorded, synthetic or none.
        why: reason of a difference, or what an agreement rests on.
    """

    claim: str
    ours: float
    trace: str
    why: str

    def row(self) -> dict[str, Any]:
        """The report's row."""
        claim = claims()[self.claim]
        says = claim.says + (f" (read as: {claim.read_as})" if claim.read_as else "")
        return {"figure": claim.figure, "claim": claim.name, "where": claim.where, "says": says, "paper": claim.paper,
                "ours": self.ours, "unit": claim.unit, "trace": self.trace, "difference": claim.difference(self.ours),
                "verdict": claim.verdict(self.ours), "contradiction": claim.contradiction, "why": self.why}


def with_unit(number: float, unit: str) -> str:
    """Four significant digits at most, and the unit."""
    return f"{number:.4g} {unit}".strip()


@cache
def paper() -> dict[str, Any]:
    """The paper's statements and tables."""
    table: dict[str, Any] = tomllib.loads((files("edgexpert.reproduce") / "paper.toml").read_text("utf-8"))
    return table


@cache
def claims() -> dict[str, Claim]:
    """All claims by name."""
    return {name: Claim(name, **values) for name, values in paper()["claims"].items()}

"""All tables and figures by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgexpert.core.errors import UserError
from edgexpert.reproduce import frameworks, hardware, motivation, results, units
from edgexpert.reproduce.claims import claims
from edgexpert.reproduce.figure import Figure, bars, column
from edgexpert.reproduce.workbench import Workbench

FIGURES: dict[str, Callable[[Workbench], Figure]] = {
    "table2": hardware.table2,
    "table3": hardware.table3,
    "table5": hardware.table5,
    "fig2a": motivation.fig2a,
    "fig2b": motivation.fig2b,
    "fig4b": frameworks.fig4b,
    "fig8b": units.fig8b,
    "fig9d": units.fig9d,
    "fig10b": units.fig10b,
    "fig11": frameworks.fig11,
    "fig12a": results.fig12a,
    "fig12b": results.fig12b,
    "fig12c": results.fig12c,
    "fig13a": results.fig13a,
    "fig13b": results.fig13b,
    "fig13c": results.fig13c,
}
NAMES = (*FIGURES, "headline")


def chosen(names: Sequence[str]) -> list[str]:
    """The figures to make; all of them for ``all`` or for none.

    Raises:
        UserError: there is no such figure; lists those there are.
    """
    for name in names:
        if name not in (*NAMES, "all"):
            raise UserError(f"there is no figure {name!r} to reproduce; choose among all, {', '.join(NAMES)}")
    return [name for name in NAMES if not names or "all" in names or name in names]


def headline_figures() -> set[str]:
    """Figures that answer a claim of the summary."""
    return {claim.figure for claim in claims().values() if claim.headline}


def headline(figures: dict[str, Figure]) -> Figure:
    """The claims of the abstract and of the text's summaries, from the figures that answer them."""
    answers = [answer for figure in figures.values() for answer in figure.answers if claims()[answer.claim].headline]
    rows = []
    for answer in answers:
        claim = claims()[answer.claim]
        assert claim.value is not None, "a headline is a figure"
        rows.append({"claim": claim.name, "unit": claim.unit, "paper": claim.value, "ours": answer.ours,
                     "difference": claim.difference(answer.ours), "trace": answer.trace.partition(":")[0]})
    return Figure(
        "Headline claims", "; ".join(dict.fromkeys(answer.trace for answer in answers)), "Each claim is answered by the figure "
        "that it belongs to.", rows, answers,
        lambda drawing: bars(drawing.subplots(), column(rows, "claim"), {
            "paper": column(rows, "paper"), "ours": column(rows, "ours")}, "in the claim's unit"),
    )

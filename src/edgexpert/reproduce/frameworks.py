"""Figures 4b and 11: kinds of drafts, from the recorded run of ``benchmarks/frameworks.py`` on the bundled model."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from edgexpert.reproduce.claims import Answer
from edgexpert.reproduce.figure import Figure, Rows, bars, column
from edgexpert.reproduce.workbench import Workbench
from edgexpert.simulator.device import load_device

RECORDED = "frameworks-stories.json"
"""A copy of what the benchmark wrote; a test holds both equal."""

KINDS = {
    "plain": "none", "ngram": "n-grams", "eagle3": "self-speculative", "medusa": "self-speculative", "big-little": "big-little",
    "low-bit 2": "quantised", "low-bit 3": "quantised",
}


def recorded() -> dict[str, Any]:
    """What the benchmark measured, and under which conditions."""
    result: dict[str, Any] = json.loads((files("edgexpert.reproduce") / RECORDED).read_text("utf-8"))
    return result


def fig4b(bench: Workbench) -> Figure:
    """Acceptance length and weight traffic a token of each kind of draft."""
    found = recorded()
    rows: Rows = [
        {"framework": name, "kind": KINDS[name], "acceptance_length": row["acceptance_length"],
         "target_kb": row["scaled_target_kb_per_token"], "draft_kb": row["scaled_draft_kb_per_token"],
         "normalised": row["scaled_normalised"]}
        for name, row in found["frameworks"].items()]
    return Figure(
        "Figure 4b: acceptance length and traffic of drafts", _label(found),
        "All weights that are read for a token, at the 4-bit format's bits. The paper's bars are not in the text, and its target "
        "is another one.", rows,
        [Answer("framework_traffic", float(_rank(rows, "normalised")), _label(found), _why(rows, "normalised"))],
        lambda drawing: bars(drawing.subplots(), column(rows, "framework"), {
            "acceptance length": column(rows, "acceptance_length"),
            "weight bytes a token, over plain decoding": column(rows, "normalised")}, ""),
    )


def fig11(bench: Workbench) -> Figure:
    """Energy of external memory a token of each framework."""
    found = recorded()
    dram = load_device("edgexpert").dram
    rows: Rows = []
    for name, row in found["frameworks"].items():
        target, draft = (row[f"scaled_{part}_kb_per_token"] * 8e3 * dram.read_pj_per_bit * 1e-9 for part in ("target", "draft"))
        rows.append({"framework": name, "kind": KINDS[name], "target_mj": target, "draft_mj": draft, "mj": target + draft})
    return Figure(
        "Figure 11: energy of speculative-decoding frameworks", _label(found),
        "External memory alone, at 4.5 pJ a bit: the recorded run has no count of multiplications. The paper's bars are not in "
        "the text.", rows,
        [Answer("framework_energy", float(_rank(rows, "mj")), _label(found), _why(rows, "mj"))],
        lambda drawing: bars(drawing.subplots(), column(rows, "framework"), {
            "target": column(rows, "target_mj"), "draft": column(rows, "draft_mj")}, "mJ a token", stacked=True),
    )


def _label(found: dict[str, Any]) -> str:
    about = found["about"]
    return (f"recorded: {about['model']}, {about['texts']} held-out prompts, {about['new_tokens']} new tokens each, tree "
            f"{about['tree']['size']}/{about['tree']['depth']} (benchmarks/frameworks.py)")


def _ranking(rows: Rows, what: str) -> Rows:
    """Frameworks with a draft that has weights, as the paper compares them."""
    return sorted((row for row in rows if row["kind"] not in ("none", "n-grams")), key=lambda row: float(row[what]))


def _rank(rows: Rows, what: str) -> int:
    return 1 + [row["kind"] for row in _ranking(rows, what)].index("self-speculative")


def _why(rows: Rows, what: str) -> str:
    order = ", ".join(f"{row['framework']} {row[what]:.2f}" for row in _ranking(rows, what))
    others = ", ".join(f"{row['framework']} {row[what]:.2f}" for row in rows if row["kind"] in ("none", "n-grams"))
    missing = "" if "big-little" in column(rows, "kind") else " The recorded run had no big-little draft."
    return f"from least to most: {order}; for comparison {others}.{missing}"

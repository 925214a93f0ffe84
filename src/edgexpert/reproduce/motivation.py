"""Figures 2a and 2b: what naive speculation does to a mixture of experts."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from edgexpert.reproduce.claims import Answer
from edgexpert.reproduce.designs import Measured
from edgexpert.reproduce.figure import Figure, Rows, bars, column, finish
from edgexpert.reproduce.workbench import Workbench
from edgexpert.simulator.energy import GROUPS, grouped, total
from edgexpert.trace.read import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CANDIDATES = (1, 2, 4, 8, 16, 32, 64)


def fig2a(bench: Workbench) -> Figure:
    """Distinct experts a layer by the number of candidates, best candidates first."""
    rows: Rows = []
    for name in bench.settings.models:
        rows += _distinct(bench, name, bench.synthetic(name), "synthetic")
    rows += _distinct(bench, "stories", bench.recorded, "recorded")
    example = bench.settings.example
    grown = rows_of(rows, example)[-1]
    real = rows_of(rows, "stories")[-1]
    plain, naive = (bench.measured(name, example) for name in ("plain", "baseline"))
    computed, traffic = (_per_stage(naive, name) / _per_stage(plain, name) for name in ("macs", "bytes"))
    return Figure(
        "Figure 2a: experts that a stage activates", f"{bench.synthetic_label}; {bench.recorded_label}",
        "The text gives one point: 52.1 experts of Qwen3 with 64 candidates. The root of the tree is counted, too.", rows,
        [
            Answer("activation", grown["ratio"], bench.synthetic_label,
                   f"{grown['experts']:.1f} experts a layer; the synthetic routing was fitted to the paper's 52.1, so this is no "
                   f"evidence. Recorded on stories: {real['experts']:.1f} of {real['of']}, {real['ratio']:.1f} x"),
            Answer("computation", computed, bench.synthetic_label,
                   f"all candidates are multiplied: {computed:.0f} x a stage's multiplications; all of its external traffic, the "
                   f"draft included, grows {traffic:.1f} x. Only the expert loads grow {grown['ratio']:.1f} x"),
        ],
        lambda drawing: _draw_distinct(drawing.subplots(), rows),
    )


def _draw_distinct(axes: Axes, rows: Rows) -> None:
    for name in dict.fromkeys(column(rows, "model")):
        ours = rows_of(rows, name)
        axes.plot([row["candidates"] for row in ours], [row["ratio"] for row in ours], marker="o",
                  label=f"{name} ({ours[0]['trace']})")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("candidates")
    finish(axes, "experts a layer, over top-k", legend=True)


def rows_of(rows: Rows, model: str) -> Rows:
    return [row for row in rows if row["model"] == model]


def _distinct(bench: Workbench, name: str, trace: Trace, kind: str) -> Rows:
    counts: dict[int, list[int]] = {candidates: [] for candidates in CANDIDATES}
    for recorded in trace.stages():
        if recorded.stage.tree is None:
            continue
        likely = recorded.stage.tree.path_log_prob.argsort(descending=True, stable=True)
        for layer in recorded.layers:
            for candidates in CANDIDATES:
                counts[candidates].append(len(layer.exact.experts[likely[: candidates + 1]].unique()))
    top_k = trace.facts.top_k
    return [{"model": name, "trace": kind, "candidates": candidates, "experts": mean(found), "of": trace.facts.num_experts,
             "ratio": mean(found) / top_k} for candidates, found in counts.items()]


def _per_stage(measured: Measured, what: str) -> float:
    decode = measured.decode
    return (sum(decode.macs.values()) if what == "macs" else decode.bytes) / decode.stages


def fig2b(bench: Workbench) -> Figure:
    """Energy a token: plain decoding, speculation if nothing were added, and as it is."""
    example = bench.settings.example
    plain, naive = (bench.measured(name, example) for name in ("plain", "baseline"))
    rows: Rows = []
    for name, measured, tokens in (("plain", plain, plain.tokens), ("ideal speculation", plain, plain.tokens * naive.acceptance),
                                   ("speculation", naive, naive.tokens)):
        for group, kinds in grouped(measured.decode.energy).items():
            rows.append({"model": example, "decoding": name, "part": group, "dram_mj": 1e3 * kinds["dram"] / tokens,
                         "chip_mj": 1e3 * (kinds["sram"] + kinds["logic"]) / tokens})
    spent = {name: _spent(rows, name) for name in dict.fromkeys(column(rows, "decoding"))}
    excess = 100 * (sum(spent["speculation"]) / sum(spent["plain"]) - 1)
    memory = 100 * (spent["speculation"][0] / spent["plain"][0] - 1)
    share = total(naive.decode.energy, "dram") / naive.decode.joules
    labels = list(spent)
    return Figure(
        "Figure 2b: energy a token of naive speculation", bench.synthetic_label,
        "Ideal speculation spreads plain decoding's energy over the accepted tokens and adds nothing. The exact bars are not in "
        "the text.", rows,
        [Answer("speculation_energy", excess, bench.synthetic_label,
                f"{share:.0%} of the speculative energy is external memory, which alone would give {memory:+.1f} %; the rest is "
                "the computation on candidates, charged at Table V's power over the peak rate. Depends on draft sizes and steps "
                "(assumed: 7 steps)")],
        lambda drawing: bars(drawing.subplots(), labels, {
            f"{part}, {kind}": [column(rows, f"{kind}_mj", decoding=label, part=part)[0] for label in labels]
            for part in GROUPS for kind in ("dram", "chip")}, "mJ a token", stacked=True),
    )


def _spent(rows: Rows, decoding: str) -> tuple[float, float]:
    """External memory and chip, mJ a token."""
    return sum(column(rows, "dram_mj", decoding=decoding)), sum(column(rows, "chip_mj", decoding=decoding))


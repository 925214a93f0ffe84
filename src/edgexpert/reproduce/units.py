"""Figures 8b, 9d and 10b: what prompt-wise reuse and coalescing save, and what their units cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING

import torch

from edgexpert.core.plan import LayerPlan
from edgexpert.policy import PRESETS, Policy, Techniques
from edgexpert.policy.hyperparameters import TABLE_III
from edgexpert.reproduce.claims import Answer, paper
from edgexpert.reproduce.figure import Figure, Rows, bars, column, lines, percent_less
from edgexpert.reproduce.workbench import Workbench
from edgexpert.simulator.device import load_device
from edgexpert.simulator.shapes import encoder_matrices, model_named, parameters
from edgexpert.simulator.units.adder_tree import fixed_cycles, reconfigurable_cycles
from edgexpert.simulator.units.partition import sorting_cycles, threshold_cycles
from edgexpert.simulator.workload import PlannedStage
from edgexpert.trace.read import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROMPTS = (128, 256, 512, 1024, 2048, 4096)
"""Tokens that the partitioning units are given."""
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95)
COVERAGE = 0.75  # section IV-C
REUSE = Techniques("prompt-wise reuse", prompt_wise_expert_reuse=True)


def fig8b(bench: Workbench) -> Figure:
    """Expert traffic in prefill with and without reuse, and cycles of both ways to partition a prompt."""
    rows: Rows = [_reuse_row(bench, name, bench.synthetic(name, length, 0))
                  for name in bench.settings.models for length in bench.settings.lengths]
    rows.append(_reuse_row(bench, "stories", bench.recorded))
    units: Rows = [{"tokens": tokens, "threshold": threshold_cycles(tokens), "sorting": sorting_cycles(tokens)}
                   for tokens in PROMPTS]
    example = [row for row in rows if row["model"] == bench.settings.example]
    real = rows[-1]
    ours = example[len(example) // 2]
    real_says = (f"recorded on stories, at its own thresholds: {real['saved_mean_percent']:.1f} % with the mean, "
                 f"{real['saved_max_percent']:.1f} % with the maximum")
    grown = {name: units[-1][name] / units[0][name] for name in ("threshold", "sorting")}
    none = "none: cycles of the unit models"
    every = [{"series": "reuse", **row} for row in rows]
    every += [{"series": "partitioning", **dict.fromkeys(rows[0], ""), **row} for row in units]
    every = [{**dict.fromkeys(("threshold", "sorting"), ""), **row} for row in every]
    return Figure(
        "Figure 8b: prompt-wise expert reuse and its unit", f"{bench.prefill_label}; {bench.recorded_label}",
        "The paper leaves open how attention becomes a weight that is compared with 0.30 to 0.80, and the prompt's length. "
        "Here it is divided by the prompt's mean (the default) and by its maximum.", every,
        [
            Answer("prefill_traffic", ours["saved_mean_percent"], bench.prefill_label,
                   f"{ours['model']}, {ours['tokens']} tokens, attention over its mean: {ours['major_mean_percent']:.0f} % of "
                   f"the tokens are major, and their experts bound the saving; {real_says}. Importance and routing are drawn, "
                   "not fitted to prefill"),
            Answer("prefill_traffic_max", ours["saved_max_percent"], bench.prefill_label,
                   f"{ours['model']}, {ours['tokens']} tokens: {ours['major_max_percent']:.0f} % of the tokens are major; from "
                   f"{min(column(example, 'saved_max_percent')):.0f} to {max(column(example, 'saved_max_percent')):.0f} % over "
                   f"the lengths; {real_says}"),
            Answer("encoder_traffic", ours["encoder_percent"], bench.prefill_label,
                   f"one pass of the encoder against what reuse saves of {ours['model']} with the mean; at most "
                   f"{max(column(rows, 'encoder_percent', trace='synthetic')):.0f} % over models and lengths"),
            Answer("partitioning", grown["threshold"], none, f"from {units[0]['threshold']} to {units[-1]['threshold']} cycles"),
            Answer("sorting", grown["sorting"], none, f"from {units[0]['sorting']} to {units[-1]['sorting']} cycles, for chunks "
                   "are merged level by level"),
        ],
        lambda drawing: _draw_reuse(list(drawing.subplots(1, 2)), example, units),
    )


def _draw_reuse(axes: list[Axes], example: Rows, units: Rows) -> None:
    lines(axes[0], column(example, "tokens"), {f"importance over its {name}": column(example, f"saved_{name}_percent")
                                               for name in ("mean", "max")}, "prompt tokens", "expert traffic saved (%)")
    lines(axes[1], column(units, "tokens"), {name: column(units, name) for name in ("threshold", "sorting")},
          "prompt tokens", "cycles")


def _reuse_row(bench: Workbench, name: str, trace: Trace) -> dict[str, object]:
    """Savings of all prompts of a trace together; the same experts are as many bytes each."""
    exact = _loads(bench, trace, PRESETS["exact"])
    h = trace.resolve(REUSE).hyperparameters
    prompts = [recorded.stage for recorded in trace.stages() if recorded.stage.tree is None]
    row: dict[str, object] = {"model": name, "trace": "synthetic" if trace.synthetic else "recorded",
                              "tokens": round(mean(len(stage.tokens) for stage in prompts)),
                              "experts": exact / len(prompts) / len(trace.facts.layers)}
    for kind in ("mean", "max"):
        policy = replace(REUSE, importance=kind)
        row[f"saved_{kind}_percent"] = percent_less(_loads(bench, trace, policy), exact)
        weights = torch.cat([policy.weigh_prompt(stage.importance) for stage in prompts if stage.importance is not None])
        row[f"major_{kind}_percent"] = 100 * float((weights >= h.theta1).float().mean())
    saved = exact * float(str(row["saved_mean_percent"])) / 100 * parameters(model_named(trace.facts.model).expert)
    row["encoder_percent"] = 100 * len(prompts) * parameters(encoder_matrices()) / saved if saved else float("inf")
    return row


def _loads(bench: Workbench, trace: Trace, policy: Policy) -> int:
    """Experts that the prefill stages load, over layers."""
    return sum(len(plan.routing.loaded) for _, planned in bench.replay(trace, policy) if planned.stage.tree is None
               for plan in _layers(planned))


def fig9d(bench: Workbench) -> Figure:
    """How much of what the accepted token wants is loaded, by selection ratio."""
    traces = {name: bench.synthetic(name, stages=1) for name in bench.settings.models}
    rows: Rows = []
    for name, trace in {**traces, "stories": bench.recorded}.items():
        for ratio, coverage in _coverages(bench, trace).items():
            rows.append({"model": name, "trace": "synthetic" if trace.synthetic else "recorded", "selection_ratio": ratio,
                         "coverage_percent": 100 * coverage})
    at_paper = {name: column(rows, "coverage_percent", model=name, selection_ratio=_paper_ratio(name))[0]
                for name in bench.settings.models}
    largest = {name: max((row["selection_ratio"] for row in rows if row["model"] == name
                          and row["coverage_percent"] >= 100 * COVERAGE), default=0.0) for name in (*traces, "stories")}
    label = f"synthetic: one verify stage a model, seed {bench.settings.seed}"
    return Figure(
        "Figure 9d: channel coverage of the accepted token", f"{label}; {bench.recorded_label}",
        "Share of the channels that fine pruning keeps for an accepted candidate that coalescing loads for its expert, the root "
        "left out; gate/up and down together. Table III's ratios are the paper's choice.", rows,
        [Answer("coverage", min(at_paper.values()), label,
                "at Table III's ratio " + ", ".join(f"{name} {value:.0f} %" for name, value in at_paper.items())
                + "; largest ratio tried with 75 %: " + ", ".join(f"{name} {ratio:g}" for name, ratio in largest.items())
                + ". Channels are drawn with assumed similarity within a depth")],
        lambda drawing: lines(drawing.subplots(), RATIOS, {
            f"{name} ({'recorded' if name == 'stories' else 'synthetic'})": column(rows, "coverage_percent", model=name)
            for name in largest}, "selection ratio", "coverage (%)"),
    )


def _paper_ratio(name: str) -> float:
    shape = model_named(name)
    return TABLE_III[shape.model_type, shape.experts, shape.top_k].selection_ratio


def _coverages(bench: Workbench, trace: Trace) -> dict[float, float]:
    """For each selection ratio, the mean over accepted candidates, layers and matrices."""
    pruned = PRESETS["pruned"]
    wanted = [(recorded.accepted[1:], _layers(planned)) for recorded, planned in bench.replay(trace, pruned)]
    found: dict[float, float] = {}
    for ratio in RATIOS:
        coalesced = replace(pruned, name=f"coalescing at {ratio}", depth_aware_coalescing=True, selection_ratio=ratio)
        loaded = (_layers(planned) for _, planned in bench.replay(trace, coalesced))
        shares = [share for (accepted, before), after in zip(wanted, loaded, strict=True)
                  for want, load in zip(before, after, strict=True) for share in _shares(want, load, torch.tensor(accepted))]
        found[ratio] = mean(shares) if shares else float("nan")
    return found


def _layers(planned: PlannedStage) -> list[LayerPlan]:
    return [plan for plan in planned.plans if isinstance(plan, LayerPlan)]


def _shares(want: LayerPlan, load: LayerPlan, accepted: torch.Tensor) -> Iterator[float]:
    """Of both matrices of a layer: which share of the channels that accepted tokens want is loaded."""
    theirs = torch.isin(want.routing.pairs[0], accepted)
    for before, after in ((want.gate_up, load.gate_up), (want.down, load.down)):
        if before is not None and after is not None and bool(theirs.any()):
            assert before.compute is not None and after.compute is not None
            yield float(after.compute[theirs].sum() / before.compute[theirs].sum())


def fig10b(bench: Workbench) -> Figure:
    """Cycles of the coalescing unit with both adder trees, and expert traffic a token by technique."""
    chip, ours = load_device("edgexpert"), PRESETS["edgexpert"]
    rows: Rows = []
    for name, trace in {**{name: bench.synthetic(name, stages=1) for name in bench.settings.models},
                        "stories": bench.recorded}.items():
        rows.append({"model": name, "trace": "synthetic" if trace.synthetic else "recorded",
                     **_unit_cycles(bench, trace, ours),
                     **dict.fromkeys(("pruning_mb", "coalesced_mb", "edgexpert_mb"), float("nan"))})
    for row in rows[:-1]:
        for design in ("pruning", "coalesced", "edgexpert"):
            measured = bench.measured(design, row["model"])
            row[f"{design}_mb"] = measured.decode.read["experts"] / measured.tokens / 1e6
    example = next(row for row in rows if row["model"] == bench.settings.example)
    label = f"synthetic: one verify stage a model, seed {bench.settings.seed}"
    needed = 1 / (1 - paper()["claims"]["coalescing_latency"]["value"] / 100)
    saved = {row["model"]: f"{percent_less(row['edgexpert_mb'], row['pruning_mb']):.0f} %" for row in rows[:-1]}
    return Figure(
        "Figure 10b: coalescing unit and expert traffic", f"{label}; {bench.recorded_label}; traffic: {bench.synthetic_label}",
        "Cycles to score all channels of all loaded experts, at "
        f"{chip.clock_hz / 1e6:.0f} MHz. Traffic is expert bytes of decoding, a token, with Table IV's acceptance lengths. "
        f"Coalescing with calibration saves of pruning's: {', '.join(f'{name} {share}' for name, share in saved.items())}.", rows,
        [Answer("coalescing_latency", example["saved_percent"], label,
                f"a fixed tree takes a pass for each depth, and an expert's tokens have {example['depths']:.2f} depths on "
                f"average (the paper's figure needs {needed:.2f}); recorded on stories {rows[-1]['saved_percent']:.1f} % with "
                f"{rows[-1]['depths']:.2f}. Depths an expert follow from trees and routing")],
        lambda drawing: _draw_coalescing(list(drawing.subplots(1, 2)), rows),
    )


def _draw_coalescing(axes: list[Axes], rows: Rows) -> None:
    bars(axes[0], column(rows, "model"), {"fixed": column(rows, "fixed_cycles"),
                                          "reconfigurable": column(rows, "reconfigurable_cycles")}, "cycles a stage and layer")
    bars(axes[1], column(rows[:-1], "model"), {name: column(rows[:-1], f"{name}_mb") for name in (
        "pruning", "coalesced", "edgexpert")}, "expert MB a token")


def _unit_cycles(bench: Workbench, trace: Trace, policy: Techniques) -> dict[str, float]:
    """Of the verify stages, a layer and stage on average."""
    channels = trace.facts.hidden, trace.facts.intermediate
    fixed = reconfigurable = depths = experts = layers = 0
    for _, planned in bench.replay(trace, replace(policy, fine_pruning=False, depth_aware_coalescing=False,
                                                  computational_calibration=False)):
        for layer in planned.layers if planned.stage.tree is not None else ():
            fixed += sum(int(fixed_cycles(count, layer.depths).sum()) for count in channels)
            reconfigurable += sum(int(reconfigurable_cycles(count, layer.rows).sum()) for count in channels)
            depths, experts, layers = depths + int(layer.depths.sum()), experts + len(layer.experts), layers + 1
    return {"fixed_cycles": fixed / layers, "reconfigurable_cycles": reconfigurable / layers,
            "saved_percent": percent_less(reconfigurable, fixed), "depths": depths / experts}

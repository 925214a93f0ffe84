"""Figures 12 and 13: latency and energy against the baseline, step by step, and against prior work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgexpert.policy import Hyperparameters, with_settings
from edgexpert.reproduce.claims import Answer, paper
from edgexpert.reproduce.designs import Measured
from edgexpert.reproduce.figure import Figure, Rows, bars, column, percent_less
from edgexpert.reproduce.workbench import Workbench
from edgexpert.simulator.device import Device
from edgexpert.simulator.energy import GROUPS, grouped
from edgexpert.simulator.run import simulate
from edgexpert.simulator.shapes import ModelShape, model_named
from edgexpert.simulator.workload import dense_prefill

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTPUTS = (32, 128, 512)
"""New tokens of a text; the paper's lengths are not in its text."""
OUTPUT = 128
TTFT, TPOT = 0.450, 0.050  # section V-B
STEPS = ("baseline", "pruning", "reuse", "coalesced", "edgexpert", "edgexpert-max")
PRIORS = ("moe-pruner-au", "moe-pruner-sd", "edgemoe-au", "edgemoe-sd", "smolpu")
BASELINES = ("baseline", *PRIORS, "edgexpert", "edgexpert-max")
LENGTHS = "Prompts and new tokens are ours (the paper's are not in its text); acceptance lengths are Table IV's. "
KEPT = (0.7, 0.5)
"""Shares of a token's importance that fine pruning may keep, beside our default; SMoLPU's is not published."""
MAX = ("\"max\" divides the prompt's attention by its maximum instead of its mean; the answers are for the mean, the default, "
       "unless they say otherwise.")


def fig12a(bench: Workbench) -> Figure:
    """End-to-end latency, technique by technique."""
    return _steps(bench, "seconds", "Figure 12a: end-to-end latency by technique", "latency")


def fig13a(bench: Workbench) -> Figure:
    """Energy, technique by technique."""
    return _steps(bench, "joules", "Figure 13a: energy by technique", "energy")


def _steps(bench: Workbench, what: str, title: str, claim: str) -> Figure:
    rows: Rows = []
    for name in bench.settings.models:
        for output in OUTPUTS:
            baseline = _whole(bench.measured("baseline", name), what, output)
            for step in STEPS:
                measured = bench.measured(step, name)
                rows.append({"model": name, "design": measured.design.title, "new_tokens": output,
                             what: _whole(measured, what, output), "normalised": _whole(measured, what, output) / baseline})
    least, most = _extremes(rows, "EdgeXpert ALL")
    with_max = _extremes(rows, "EdgeXpert ALL, max")
    cuts = ", ".join(f"{name} {_cut(bench, name):.0f} %" for name in bench.settings.models)
    why = (f"{{}} with {{}} new tokens. Over models and lengths {saved(least):.1f} to {saved(most):.1f} % with importance over "
           f"the mean, {saved(with_max[0]):.1f} to {saved(with_max[1]):.1f} % over the maximum. Expert bytes a "
           f"token fall in decoding by {cuts}. That follows from routing and channels, which are drawn from assumptions, and "
           "from what pruning keeps, which is our choice")
    return Figure(
        title, bench.synthetic_label, LENGTHS + MAX, rows,
        [Answer(f"{claim}_{end}", saved(row), bench.synthetic_label, why.format(row["model"], row["new_tokens"]))
         for end, row in (("least", least), ("most", most))],
        lambda drawing: bars(drawing.subplots(), [f"{name.split('-')[0]} {output}" for name in bench.settings.models
                                                  for output in OUTPUTS],
                             {title: column(rows, "normalised", design=title)
                              for title in dict.fromkeys(column(rows, "design"))}, f"{claim} over the baseline's"),
    )


def saved(row: dict[str, float]) -> float:
    return 100 * (1 - row["normalised"])


def _extremes(rows: Rows, design: str) -> tuple[dict[str, float], dict[str, float]]:
    """Where a design saves least and most."""
    ours = sorted((row for row in rows if row["design"] == design), key=saved)
    return ours[0], ours[-1]


def _whole(measured: Measured, what: str, output: int) -> float:
    return measured.seconds(output) if what == "seconds" else measured.joules(output)


def fig12b(bench: Workbench) -> Figure:
    """End-to-end latency against prior work."""
    figure = _baselines(bench, "seconds", "Figure 12b: end-to-end latency against prior work", "latency")
    bytes_of = {name: sum(bench.measured(name, model).decode.read["experts"] for model in bench.settings.models)
                for name in ("baseline", "edgemoe-sd")}
    cut = percent_less(bytes_of["edgemoe-sd"], bytes_of["baseline"])
    figure.answers.append(Answer("edgemoe_traffic", cut, bench.synthetic_label, "all models together, decoding; the policy gives "
                                 "2 bits to as many experts as save 35 % of the value bytes, and scales stay"))
    return figure


def fig13b(bench: Workbench) -> Figure:
    """Energy against prior work."""
    return _baselines(bench, "joules", "Figure 13b: energy against prior work", "energy")


def _baselines(bench: Workbench, what: str, title: str, claim: str) -> Figure:
    rows: Rows = []
    for measured in bench.all_measured(BASELINES):
        baseline = _whole(bench.measured("baseline", measured.model), what, OUTPUT)
        rows.append({"model": measured.model, "design": measured.design.title, "family": measured.design.family,
                     "new_tokens": OUTPUT, what: _whole(measured, what, OUTPUT),
                     "normalised": _whole(measured, what, OUTPUT) / baseline})
    gains = sorted((percent_less(ours["normalised"], other["normalised"]), other["design"], ours["model"], ours["design"])
                   for ours in rows if ours["family"] == "ours" for other in rows
                   if other["family"] == "prior" and other["model"] == ours["model"])
    by_design = {name: [gain for gain in gains if gain[3] == name] for name in ("EdgeXpert ALL", "EdgeXpert ALL, max")}
    gain, baseline, model, _ = by_design["EdgeXpert ALL"][-1]
    smolpu = [found for found in by_design["EdgeXpert ALL"] if found[1] == bench.designs["smolpu"].title]
    answer = Answer(f"{claim}_baselines", gain, bench.synthetic_label,
                    f"against {baseline} on {model}; {by_design['EdgeXpert ALL, max'][-1][0]:.1f} % with importance over the "
                    f"maximum; against SMoLPU, the paper's strongest, {smolpu[0][0]:.1f} to {smolpu[-1][0]:.1f} %. The paper "
                    "does not say which baseline, model and length its figure is of, nor SMoLPU's pruning ratios")
    return Figure(
        title, bench.synthetic_label, f"{OUTPUT} new tokens. {LENGTHS}{MAX}", rows, [answer],
        lambda drawing: bars(drawing.subplots(), list(bench.settings.models),
                             {name: column(rows, "normalised", design=name) for name in dict.fromkeys(column(rows, "design"))},
                             f"{claim} over the baseline's"),
    )


def fig12c(bench: Workbench) -> Figure:
    """Time to the first token and time per output token."""
    example = bench.settings.example
    harder = [_pruned_harder(bench, example, kept) for kept in KEPT]
    rows: Rows = [
        {"model": measured.model, "design": measured.design.title, "family": measured.design.family,
         "ttft_ms": 1e3 * measured.ttft, "tpot_ms": 1e3 * measured.tpot,
         "within_limits": measured.ttft < TTFT and measured.tpot < TPOT}
        for measured in [*bench.all_measured(BASELINES), *harder]]
    models = len(bench.settings.models)
    baselines = [bench.designs[name].title for name in BASELINES]
    passed = {name: sum(column(rows, "within_limits", design=name)) for name in baselines}
    ours, ours_max = (passed[bench.designs[name].title] for name in ("edgexpert", "edgexpert-max"))
    others = [name for name, count in passed.items() if count == models
              and name not in (bench.designs["edgexpert"].title, bench.designs["edgexpert-max"].title)]
    qwen = model_named("qwen3-30b-a3b")
    chip = bench.designs["edgexpert"].device
    without_scales = replace(chip, precision=replace(chip.precision, group=0, scale_bits=0))
    after, scaleless = (_after_cut(bench, qwen, qwen.experts, device) for device in (chip, without_scales))
    bound = _experts_within_limit(bench, qwen, chip)
    return Figure(
        "Figure 12c: time to first token and time per output token", bench.synthetic_label,
        f"Limits of {1e3 * TTFT:.0f} ms and {1e3 * TPOT:.0f} ms. {LENGTHS}{MAX}", rows,
        [
            Answer("within_limits", float(ours), bench.synthetic_label,
                   f"of {models}; " + (_misses(rows, bench.designs["edgexpert"].title) or "none is missed")
                   + f"; {ours_max} of {models} with importance over the maximum"
                   + _and(_misses(rows, bench.designs["edgexpert-max"].title))
                   + f"; {_cut(bench, example):.0f} % of the baseline's expert bytes a token are saved on {example}. How much "
                   f"fine pruning keeps is our choice ({Hyperparameters.keep_channels:g} of a token's importance); a stage with "
                   + " and ".join(f"{kept} takes {1e3 * measured.tpot:.1f} ms a token"
                                  for kept, measured in zip(KEPT, harder, strict=True)) + ", at the same acceptance length"),
            Answer("others_within_limits", float(len(others)), bench.synthetic_label,
                   (f"{', '.join(others)} do" if others else "every other design misses a limit on some model")
                   + "; models within both limits: " + ", ".join(f"{name} {count}" for name, count in passed.items())),
            Answer("prefill_limit", 1e3 * after, "synthetic: a prompt that touches all 128 experts of every layer",
                   f"with {bench.settings.prompt} tokens; 55.7 % less is enough only if the prompt would touch at most "
                   f"{bound:.0f} of {qwen.experts} experts a layer. Without reading scales it takes {1e3 * scaleless:.0f} ms"),
        ],
        lambda drawing: _draw_limits(list(drawing.subplots(2, 1, sharex=True)), rows, baselines, list(bench.settings.models)),
    )


def _pruned_harder(bench: Workbench, model: str, kept: float) -> Measured:
    design = bench.designs["edgexpert"]
    policy = with_settings(design.policy, {"keep_channels": kept})
    return bench.alone(replace(design, title=f"{design.title}, {kept:g} of importance kept", policy=policy), model, stages=1)


def _cut(bench: Workbench, model: str) -> float:
    """Per cent of the baseline's expert bytes a token that decoding saves."""
    ours, baseline = (bench.measured(name, model) for name in ("edgexpert", "baseline"))
    return percent_less(ours.decode.read["experts"] / ours.tokens, baseline.decode.read["experts"] / baseline.tokens)


def _draw_limits(axes: list[Axes], rows: Rows, designs: list[str], models: list[str]) -> None:
    for axis, what, limit in zip(axes, ("ttft_ms", "tpot_ms"), (TTFT, TPOT), strict=True):
        bars(axis, models, {name: column(rows, what, design=name) for name in designs},
             what.replace("_ms", " (ms)"))
        axis.axhline(1e3 * limit, color="black", linestyle=":")


def _misses(rows: Rows, design: str) -> str:
    return ", ".join(f"{row['model']} takes {row['ttft_ms']:.0f} and {row['tpot_ms']:.1f} ms" for row in rows
                     if row["design"] == design and not row["within_limits"])


def _and(text: str) -> str:
    return f" ({text})" if text else ""


def _after_cut(bench: Workbench, model: ModelShape, touched: float, device: Device) -> float:
    """Seconds of a prefill that would touch ``touched`` experts a layer and loads as much less as the paper says."""
    result = simulate(model, device, [dense_prefill(model, bench.settings.prompt, touched * _left())], reuse=True)
    return result.prefill.latency


def _left() -> float:
    """Share of the expert traffic that the paper's prompt-wise reuse leaves."""
    return 1 - float(paper()["claims"]["prefill_traffic"]["value"]) / 100


def _experts_within_limit(bench: Workbench, model: ModelShape, device: Device) -> float:
    low, high = model.top_k / _left(), float(model.experts)
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if _after_cut(bench, model, middle, device) < TTFT else (low, middle)
    return low


def fig13c(bench: Workbench) -> Figure:
    """Energy of a text by part and by where it is spent."""
    rows: Rows = []
    for measured in bench.all_measured(("plain", *BASELINES)):
        prefill, decode = grouped(measured.prefill.energy), grouped(measured.decode.energy)
        for group in GROUPS:
            mj = {kind: 1e3 * (prefill[group][kind] / measured.prefill.stages
                               + (OUTPUT - 1) * decode[group][kind] / measured.tokens) for kind in ("dram", "sram", "logic")}
            rows.append({"model": measured.model, "design": measured.design.title, "part": group,
                         **{f"{kind}_mj": value for kind, value in mj.items()}, "mj": sum(mj.values())})
    shares = {name: 100 * _energy(rows, name, "Baseline", "moe") / _energy(rows, name, "Baseline") for name in
              bench.settings.models}
    example = bench.settings.example
    labels = list(dict.fromkeys(column(rows, "design")))
    return Figure(
        "Figure 13c: energy breakdown", bench.synthetic_label,
        f"A prompt of {bench.settings.prompt} tokens and {OUTPUT} new ones; the drawing is of {example}. The paper's bars are "
        "not in the text. " + MAX, rows,
        [Answer("moe_share", min(shares.values()), bench.synthetic_label,
                "share of the MoE layers: " + ", ".join(f"{name} {share:.0f} %" for name, share in shares.items()))],
        lambda drawing: bars(drawing.subplots(), labels, {
            part: [_energy(rows, example, label, part) for label in labels] for part in GROUPS}, "mJ", stacked=True),
    )


def _energy(rows: Rows, model: str, design: str, part: str | None = None) -> float:
    return sum(row["mj"] for row in rows if row["model"] == model and row["design"] == design and part in (None, row["part"]))

"""`edgexpert simulate`: what a chip makes of a trace, or of a synthetic workload: time, traffic and energy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from edgexpert.cli.files import told_output
from edgexpert.cli.options import Json
from edgexpert.cli.show import (
    NOTHING,
    print_json,
    print_line,
    print_rich,
    readable_bytes,
    readable_number,
    readable_seconds,
    table,
)
from edgexpert.core.errors import UserError

if TYPE_CHECKING:
    from edgexpert.simulator.run import RunResult, StageResult
    from edgexpert.simulator.sweep import Case
    from edgexpert.simulator.timeline import Timeline

STAGES_DRAWN = 2
"""Stages in a timeline: a prompt and the first that verifies. A stage of a large model has tens of thousands of events."""

DENSE = "Workload of --dense:"


def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Trace to replay, from edgexpert trace; may be given several times.",
                     show_default=False),
    ] = None,
    dense: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", show_default=False,
                     help="Synthetic workload in which experts are loaded whole: granite-1b-a400m, olmoe-1b-7b, "
                          "deepseek-v2-lite, qwen3-30b-a3b, or a folder with a config.json; may be given several times."),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Device by name, or its .toml file; may be given several times. "
                                               "[default: edgexpert]", show_default=False),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Policy to replay a trace under; may be given several times. [default: the "
                                          "device's own]", show_default=False),
    ] = None,
    importance: Annotated[
        str | None,
        typer.Option(help="How prompt attention becomes a weight in these policies: mean, max or quantile. [default: mean]",
                     show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model that the trace is of, by name or folder. [default: as the trace says]",
                     show_default=False),
    ] = None,
    devices: Annotated[bool, typer.Option("--devices", help="List the devices and exit.")] = False,
    candidates: Annotated[int, typer.Option(help=f"{DENSE} drafted tokens of a stage.")] = 64,
    experts: Annotated[
        float | None, typer.Option(help=f"{DENSE} distinct experts of a layer in a stage. [default: all that its "
                                   "tokens can load]", show_default=False)
    ] = None,
    acceptance_length: Annotated[
        float | None,
        typer.Option(help=f"{DENSE} tokens that a stage gives. [default: 4.3, or 1 without candidates]", show_default=False),
    ] = None,
    draft_steps: Annotated[
        int | None,
        typer.Option(help=f"{DENSE} passes through the draft before a stage. [default: 7, or 0 without candidates]",
                     show_default=False),
    ] = None,
    stages: Annotated[int, typer.Option(help=f"{DENSE} decode stages.")] = 10,
    prompt: Annotated[int, typer.Option(help=f"{DENSE} tokens of the prompt.")] = 64,
    context: Annotated[int, typer.Option(help=f"{DENSE} cached tokens while decoding.")] = 512,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the first stages for Perfetto or chrome://tracing.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet", help="Write the results as a table.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes to use.", min=1)] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to use instead, or: local.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Simulate chips on recorded or synthetic runs, several of each at once if asked."""
    if devices:
        show_devices(json)
        return
    if not trace and not dense:
        raise UserError("nothing to simulate; give --trace FILE or --dense MODEL, or --devices to list the devices")
    from edgexpert.policy import policy_named, with_settings
    from edgexpert.simulator.device import load_device
    from edgexpert.simulator.shapes import model_named
    from edgexpert.trace.cases import Dense, dense_case, trace_case

    if dense and (policy or importance):
        raise UserError("a dense workload loads experts whole whatever the policy; give --policy and --importance with --trace "
                        "alone")
    workload = Dense(prompt, context, stages, candidates, experts, acceptance_length, draft_steps)
    chips = [load_device(name) for name in device or ["edgexpert"]]
    changes = {} if importance is None else {"importance": importance}
    cases = [trace_case(file, chip, with_settings(policy_named(name), changes), model)
             for file in trace or () for chip in chips for name in policy or [chip.policy]]
    cases += [dense_case(model_named(name), chip, workload) for name in dense or () for chip in chips]
    if timeline is not None and len(cases) > 1:
        raise UserError("a timeline is of one run; give one workload, one device and one policy with --timeline")
    with told_output(timeline) as timeline_part, told_output(out) as out_part:
        results = run(cases, timeline_part, jobs, ray)
        if out_part is not None:
            from edgexpert.simulator.sweep import result_row, write_rows

            write_rows([result_row(case, result) for case, result in zip(cases, results, strict=True)], out_part)
    if json:
        print_json({"runs": [run_json(case, result) for case, result in zip(cases, results, strict=True)]})
    else:
        print_results(cases, results)


def run(cases: list[Case], timeline: Path | None, jobs: int, ray: str | None) -> list[RunResult]:
    """All cases, with a progress bar."""
    from edgexpert.simulator.sweep import run_cases

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        if timeline is not None:
            bar = progress.add_task("simulating stages", total=None)
            return [_run_with_timeline(cases[0], timeline, lambda: progress.advance(bar))]
        bar = progress.add_task("simulating", total=len(cases))
        return run_cases(cases, jobs, ray, lambda: progress.advance(bar))


def _run_with_timeline(case: Case, file: Path, advance: Callable[[], None]) -> RunResult:
    from edgexpert.simulator.run import simulate as simulate_run
    from edgexpert.simulator.timeline import ChromeTrace

    chrome = ChromeTrace()

    def watch(stage: StageResult, timeline: Timeline) -> None:
        if chrome.stages < STAGES_DRAWN:
            chrome.add(timeline, stage.kind)
        advance()

    result = simulate_run(case.model, case.device, case.stages(), reuse=case.reuse, watch=watch)
    chrome.write(file)
    return result


def run_json(case: Case, result: RunResult) -> dict[str, Any]:
    return {"workload": case.workload, "synthetic": case.synthetic, "policy": case.policy, **result.to_json()}


def print_results(cases: list[Case], results: list[RunResult]) -> None:
    """A row a run, first its time and traffic, then the energy of decoding."""
    times = table("device", "workload", "policy", "first token", "per token", "acceptance", "experts", "bytes per token")
    energies = table("device", "workload", "policy", "mJ per token", "attention", "MoE", "draft", "other", "DRAM")
    for case, result in zip(cases, results, strict=True):
        decode = result.decode
        workload = result.model if case.workload == "dense" else Path(case.workload).name
        some = decode.stages > 0
        times.add_row(
            result.device, workload, case.policy, readable_seconds(result.ttft), readable_seconds(result.tpot),
            readable_number(result.acceptance_length), f"{decode.experts / decode.stages:.1f}" if some else NOTHING,
            readable_bytes(decode.bytes / decode.emitted if some else None))
        energies.add_row(result.device, workload, case.policy, *_energy_cells(result))
    print_rich(times)
    print_line("experts: what an MoE layer loads in a stage. bytes: all of external memory, in decoding.")
    print_rich(energies)
    print_line("energy of decoding; attention, MoE, draft and other add up to it, and DRAM is the share of external memory.")
    if any(case.synthetic for case in cases):
        made_up = sorted({case.workload for case in cases if case.synthetic})
        print_line(f"note: synthetic workload: {', '.join(made_up)}")
    if any(result.prefill.spill or result.decode.spill for result in results):
        print_line("note: activations did not fit into the shared SRAM and went to external memory; --json has the bytes")


def _energy_cells(result: RunResult) -> list[str]:
    from edgexpert.simulator.energy import GROUPS, grouped, total

    decode = result.decode
    if not decode.stages:
        return [NOTHING] * 6
    groups = grouped(decode.energy)
    shares = [sum(groups[group].values()) for group in GROUPS] + [total(decode.energy, "dram")]
    return [f"{1e3 * decode.joules / decode.emitted:.3g}", *(f"{100 * share / decode.joules:.1f} %" for share in shares)]


def show_devices(json: bool) -> None:
    """The devices with their main figures."""
    from edgexpert.simulator.device import built_in, load_device

    devices = {name: load_device(name) for name in built_in()}
    if json:
        print_json({"devices": [
            {"name": name, "title": d.name, "policy": d.policy, "drafts": d.drafts, "tops": d.tops, "power_w": d.power_w,
             "area_mm2": d.area_mm2 or None, "bandwidth": d.dram.bandwidth, "sram_bytes": d.memory.shared,
             "pj_per_mac": d.pj_per_mac("logic") + d.pj_per_mac("sram"), "source": d.source}
            for name, d in devices.items()]})
        return
    rows = table("device", "policy", "decoding", "TOPS", "W", "mm2", "bandwidth", "SRAM", "pJ/MAC")
    for name, d in devices.items():
        rows.add_row(name, d.policy, "speculative" if d.drafts else "plain", f"{d.tops:.1f}", f"{d.power_w:.2f}",
                     f"{d.area_mm2:.2f}" if d.area_mm2 else NOTHING, readable_bytes(d.dram.bandwidth) + "/s",
                     f"{d.memory.shared // 1024} KB", f"{d.pj_per_mac('logic') + d.pj_per_mac('sram'):.3f}")
    print_rich(rows)
    print_line("figures are the paper's (Tables II and V), except that the baseline's power is that of EdgeMoE's array; W is "
               "the chip without external memory")

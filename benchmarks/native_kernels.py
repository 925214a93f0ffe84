"""Speed of the native kernels against what the machine can do: memory that is read, and multiply-adds in registers alone.

    python benchmarks/native_kernels.py --threads 2 --json benchmarks/results/kernels-avx512.json

One layer of OLMoE's shape at a time (64 experts, top 8, 4 bits in groups of 32; random weights). Every ratio comes from runs that
took turns; each figure is the median of its repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import about, save
from edgexpert.kernels import native
from edgexpert.kernels.reference import Pairs
from edgexpert.weights.matrix import PackedExperts

EXPERTS, PER_TOKEN, HIDDEN, INNER, GROUP = 64, 8, 2048, 1024, 32
LAYERS = 3  # 230 MB each: far more than a cache
BYTES_PER_WEIGHT = 0.5 + 2 / GROUP
WEIGHTS = 3 * HIDDEN * INNER  # of one expert


def random_experts(channels: int, outputs: int) -> PackedExperts:
    values = torch.randint(0, 256, (EXPERTS, channels, outputs // 2), dtype=torch.uint8)
    scales = (torch.rand(EXPERTS, channels // GROUP, outputs) * 0.01).half()
    return PackedExperts(values, scales, None, channels, outputs, 4, GROUP)


def random_pairs(tokens: int) -> Pairs:
    expert = torch.stack([torch.randperm(EXPERTS)[:PER_TOKEN] for _ in range(tokens)]).flatten()
    return Pairs.group(expert, torch.arange(tokens).repeat_interleave(PER_TOKEN))[0]


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def take_turns(runs: dict[str, Callable[[], object]], repetitions: int, label: str) -> dict[str, list[float]]:
    """Seconds of each run in each repetition; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in track(range(repetitions + 1), label):
        for name, run in runs.items():
            took = seconds(run)
            if i:
                times[name].append(took)
    return times


def ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Median of the ratios within a repetition."""
    return median(a / b for a, b in zip(times[above], times[below], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=native.get_threads())
    parser.add_argument("--repetitions", type=int, default=9, help="at least 5")
    parser.add_argument("--json", type=Path, help="write the figures and the machine here")
    args = parser.parse_args()

    path = native.path()
    if path == "torch":
        parser.error("the native kernels are not installed")
    native.set_threads(args.threads)
    torch.manual_seed(0)
    layers = [(random_experts(HIDDEN, 2 * INNER), random_experts(INNER, HIDDEN)) for _ in track(range(LAYERS), "weights")]
    rows: list[dict[str, str | float]] = []

    def row(measure: str, value: float, unit: str, share: float, target: str, met: bool) -> None:
        rows.append(dict(measure=measure, value=value, unit=unit, ratio=share, target=target, met=met))

    # One token: bytes.
    x, weights, passes = torch.randn(1, HIDDEN), torch.rand(PER_TOKEN), 6 * LAYERS
    routes = [random_pairs(1) for _ in range(passes)]
    read = passes * PER_TOKEN * WEIGHTS * BYTES_PER_WEIGHT
    memory = layers[0][0].values
    sweeps = round(read / memory.numel())

    def one_token(keep: float) -> Callable[[], None]:
        up_loaded, down_loaded = (torch.rand(EXPERTS, n) < keep if keep < 1 else None for n in (HIDDEN, INNER))

        def run() -> None:
            for i, pairs in enumerate(routes):
                up, down = layers[i % LAYERS]
                inner = native.gate_up(x, up, pairs, up_loaded)
                native.down(inner, down, pairs, weights, 1, down_loaded)

        return run

    def plain_read() -> None:
        for _ in range(sweeps):
            native._native.read_memory(native.array(memory.flatten()))

    times = take_turns(
        {"read": plain_read, "all": one_token(1), "half": one_token(0.5), "quarter": one_token(0.25)}, args.repetitions, "1 token"
    )
    bandwidth = sweeps * memory.numel() / median(times["read"]) / 1e9
    row("plain read", bandwidth, "GB/s", 1.0, "", True)
    share = ratio(times, "read", "all") * read / (sweeps * memory.numel())
    row("1 token, all channels", read / median(times["all"]) / 1e9, "GB/s", share, ">= 0.85 of the plain read", share >= 0.85)
    for name, limit in (("half", 0.60), ("quarter", 0.38)):
        share = ratio(times, name, "all")
        took = median(times[name]) * 1e3 / passes
        row(f"1 token, {name} of the channels", took, "ms", share, f"<= {limit:.2f} of all", share <= limit)

    # Many rows: operations.
    x, many = torch.randn(64, HIDDEN), random_pairs(64)
    single, _ = Pairs.group(torch.zeros(64, dtype=torch.int64), torch.arange(64))
    weights = torch.rand(64 * PER_TOKEN)
    done = 0

    def peak() -> None:
        nonlocal done
        done = native._native.multiply_in_registers(20_000)

    for name, pairs in (("64 tokens, 8 rows an expert", many), ("64 rows of one expert", single)):
        weights = torch.rand(len(pairs.tokens))

        def run(pairs: Pairs = pairs, weights: torch.Tensor = weights) -> None:
            up, down = layers[0]
            native.down(native.gate_up(x, up, pairs), down, pairs, weights, len(x))

        times = take_turns({"peak": peak, "run": run}, args.repetitions, name)
        operations = len(pairs.tokens) * WEIGHTS
        share = ratio(times, "peak", "run") * operations / done
        row(f"int8 peak beside {name}", done / median(times["peak"]) / 1e9, "G/s", 1.0, "", True)
        row(name, operations / median(times["run"]) / 1e9, "G/s", share, ">= 0.50 of the peak", share >= 0.5)

    table = Table("measure", "value", "ratio", "target", title=f"{path}, {args.threads} threads (random weights, OLMoE's shape)")
    for r in rows:
        mark = "" if not r["target"] else " met" if r["met"] else " missed"
        table.add_row(str(r["measure"]), f"{r['value']:.1f} {r['unit']}", f"{r['ratio']:.2f}", f"{r['target']}{mark}")
    Console().print(table)
    if args.json:
        save(args.json, {"about": about(repetitions=args.repetitions), "rows": rows})


if __name__ == "__main__":
    main()

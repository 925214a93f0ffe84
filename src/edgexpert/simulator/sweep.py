"""Many runs at once: devices, policies and workloads, in processes or on a Ray cluster, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from edgexpert.core.errors import UserError
from edgexpert.simulator.device import Device
from edgexpert.simulator.energy import grouped
from edgexpert.simulator.run import RunResult, simulate
from edgexpert.simulator.shapes import ModelShape
from edgexpert.simulator.workload import PlannedStage


@dataclass(frozen=True)
class Case:
    """One run. It crosses to other processes, so ``stages`` must be a function that can be pickled, and opens its own file.

    Attributes:
        workload: what the stages are from, for people.
        synthetic: whether they are drawn or made up instead of recorded.
        policy: the name of the policy that made the plans.
        reuse: whether that policy reuses experts prompt-wise.
    """

    workload: str
    synthetic: bool
    policy: str
    device: Device
    model: ModelShape
    stages: Callable[[], Iterable[PlannedStage]]
    reuse: bool = False

    def run(self) -> RunResult:
        return simulate(self.model, self.device, self.stages(), reuse=self.reuse)


def run_cases(
    cases: Sequence[Case], jobs: int = 1, ray: str | None = None, advance: Callable[[], None] = lambda: None
) -> list[RunResult]:
    """The results of all cases, in their order.

    Args:
        jobs: processes.
        ray: address of a Ray cluster to use instead, ``local`` for one on this machine.
        advance: called as each result arrives.

    Raises:
        UserError: a case cannot be run, or Ray is not installed.
    """
    results = []
    for result in _on_ray(cases, ray) if ray else _in_processes(cases, jobs):
        results.append(result)
        advance()
    return results


def _in_processes(cases: Sequence[Case], jobs: int) -> Iterator[RunResult]:
    if jobs == 1 or len(cases) == 1:
        yield from (case.run() for case in cases)
        return
    # A fresh interpreter each: a fork of a process that runs threads may hang.
    with ProcessPoolExecutor(min(jobs, len(cases)), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(Case.run, cases)


def _on_ray(cases: Sequence[Case], address: str) -> Iterator[RunResult]:
    try:
        import ray
    except ImportError:
        raise UserError("this needs Ray; install it with: pip install 'edgexpert[ray]', or use --jobs") from None
    ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    try:
        remote = ray.remote(Case.run)
        for reference in [remote.remote(case) for case in cases]:
            try:
                yield ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
    finally:
        ray.shutdown()


def result_row(case: Case, result: RunResult) -> dict[str, Any]:
    """A result as one flat row. Seconds, bytes, joules; None where a phase did not happen."""
    row: dict[str, Any] = {
        "workload": case.workload, "synthetic": case.synthetic, "policy": case.policy, "device": result.device,
        "model": result.model, "ttft_s": result.ttft, "tpot_s": result.tpot, "seconds": result.latency,
        "joules": result.joules, "acceptance_length": result.acceptance_length,
    }
    for name, phase in (("prefill", result.prefill), ("decode", result.decode)):
        some = phase.stages > 0
        row |= {f"{name}_stages": phase.stages, f"{name}_emitted": phase.emitted,
                f"{name}_seconds": phase.latency if some else None, f"{name}_joules": phase.joules if some else None,
                f"{name}_bytes": phase.bytes if some else None,
                f"{name}_expert_bytes": phase.read["experts"] if some else None,
                f"{name}_spilled_bytes": phase.spill if some else None,
                f"{name}_experts_per_layer": phase.experts / phase.stages if some else None}
        energies = grouped(phase.energy) if some else {}
        row |= {f"{name}_{group}_{kind}_joules": energies[group][kind] if some else None
                for group in ("attention", "moe", "draft", "other") for kind in ("dram", "sram", "logic")}
    return row


def write_rows(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Writes results as a Parquet table."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("results as Parquet need pyarrow; install it with: pip install 'edgexpert[trace]'") from None
    pq.write_table(pa.Table.from_pylist(list(rows)), file)

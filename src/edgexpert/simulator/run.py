"""Running a workload through a device, stage by stage: memory does not grow with the length of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgexpert.core.errors import UserError
from edgexpert.simulator.device import Device
from edgexpert.simulator.energy import Energy, energy, grouped, total
from edgexpert.simulator.jobs import PARTS
from edgexpert.simulator.program import Program, Resource, compile_stage
from edgexpert.simulator.shapes import ModelShape
from edgexpert.simulator.timeline import Timeline, schedule
from edgexpert.simulator.workload import PlannedStage


@dataclass(frozen=True)
class StageResult:
    """One stage on a device. Seconds, bytes, joules.

    Attributes:
        experts: loaded experts per MoE layer, on average.
        busy: seconds that each resource worked.
        read, write: bytes of external memory by part.
        spill: bytes of activations among them, moved because the shared SRAM is full.
        macs: multiplications by part, in passes of the array's own precision.
        sram: largest number of bytes of the shared SRAM in use.
    """

    kind: str
    tokens: int
    emitted: int
    experts: float
    latency: float
    busy: dict[str, float]
    read: dict[str, float]
    write: dict[str, float]
    spill: float
    macs: dict[str, float]
    energy: Energy
    sram: float

    @property
    def bound(self) -> str:
        """The resource that is busy longest."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def bytes(self) -> float:
        return sum(self.read.values()) + sum(self.write.values())


@dataclass
class Phase:
    """Sums over the stages of one kind."""

    stages: int = 0
    tokens: int = 0
    emitted: int = 0
    experts: float = 0.0
    latency: float = 0.0
    spill: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)
    write: dict[str, float] = field(default_factory=dict)
    macs: dict[str, float] = field(default_factory=dict)
    energy: Energy = field(default_factory=dict)

    def add(self, stage: StageResult) -> None:
        self.stages += 1
        for name in ("tokens", "emitted", "experts", "latency", "spill"):
            setattr(self, name, getattr(self, name) + getattr(stage, name))
        for name in ("busy", "read", "write", "macs"):
            _accumulate(getattr(self, name), getattr(stage, name))
        for part, kinds in stage.energy.items():
            _accumulate(self.energy.setdefault(part, {}), kinds)

    @property
    def bytes(self) -> float:
        return sum(self.read.values()) + sum(self.write.values())

    @property
    def joules(self) -> float:
        return total(self.energy)


def _accumulate(sums: dict[Any, float], values: dict[Any, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


@dataclass
class RunResult:
    """A workload on a device: what prefill and decoding took in all."""

    device: str
    model: str
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)

    @property
    def ttft(self) -> float | None:
        """Seconds of a prefill stage, on average."""
        return self.prefill.latency / self.prefill.stages if self.prefill.stages else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token that decoding gave."""
        return self.decode.latency / self.decode.emitted if self.decode.emitted else None

    @property
    def acceptance_length(self) -> float | None:
        return self.decode.emitted / self.decode.stages if self.decode.stages else None

    @property
    def latency(self) -> float:
        return self.prefill.latency + self.decode.latency

    @property
    def joules(self) -> float:
        return self.prefill.joules + self.decode.joules

    def to_json(self) -> dict[str, Any]:
        phases: dict[str, Any] = {}
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            if phase.stages:
                phases[name] = {
                    "stages": phase.stages, "tokens": phase.tokens, "emitted": phase.emitted,
                    "experts_per_layer": phase.experts / phase.stages, "seconds": phase.latency, "joules": phase.joules,
                    "busy_seconds": phase.busy, "read_bytes": phase.read, "written_bytes": phase.write,
                    "spilled_bytes": phase.spill, "macs": phase.macs, "energy": phase.energy,
                    "energy_by_group": grouped(phase.energy),
                }
        return {
            "device": self.device, "model": self.model, "ttft_s": self.ttft, "tpot_s": self.tpot,
            "acceptance_length": self.acceptance_length, "seconds": self.latency, "joules": self.joules, **phases,
        }


def simulate_stage(model: ModelShape, device: Device, planned: PlannedStage, reuse: bool = False) -> tuple[StageResult, Timeline]:
    """One stage alone; the timeline for those who want to look at it."""
    program = compile_stage(model, device, planned, reuse)
    timeline = schedule(program)
    result = StageResult(
        kind=planned.stage.kind, tokens=len(planned.stage.tokens), emitted=planned.emitted,
        experts=sum(len(layer.experts) for layer in planned.layers) / len(planned.layers),
        latency=timeline.latency, busy={r.name.lower(): float(timeline.busy[r]) for r in Resource},
        read=_by_part(program, program.read), write=_by_part(program, program.write), spill=_spilled(program),
        macs=_by_part(program, program.macs), energy=energy(program, device), sram=float(program.sram.max()),
    )
    return result, timeline


def simulate(
    model: ModelShape, device: Device, stages: Iterable[PlannedStage], *, reuse: bool = False,
    watch: Callable[[StageResult, Timeline], None] = lambda result, timeline: None,
) -> RunResult:
    """All stages of a workload, each begun when the one before it has ended.

    Args:
        reuse: whether the plans come from a policy with prompt-wise expert reuse.
        watch: called after each stage.

    Raises:
        UserError: there is no stage, or one does not fit the model or the device.
    """
    run = RunResult(device.name, model.name)
    for planned in stages:
        result, timeline = simulate_stage(model, device, planned, reuse)
        (run.prefill if result.kind == "prefill" else run.decode).add(result)
        watch(result, timeline)
    if not run.prefill.stages + run.decode.stages:
        raise UserError("the workload has no stage; record a run that produces text")
    return run


def _by_part(program: Program, values: Any) -> dict[str, float]:
    sums = np.bincount(program.part, values, len(PARTS))
    return {part: float(value) for part, value in zip(PARTS, sums, strict=True)}


def _spilled(program: Program) -> float:
    """Bytes of activations that had to leave the chip: neither embeddings nor keys and values."""
    meant = np.zeros(len(PARTS), bool)
    meant[[PARTS.index(part) for part in ("embeddings", "kv_cache", "draft")]] = True
    jobs = program.jobs[~meant[program.jobs["part"]]]
    return float(jobs["fetch"].sum() + jobs["write"].sum())

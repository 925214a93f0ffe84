"""When each instruction runs: every resource takes its own in order, each as soon as what it waits for has finished."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgexpert.simulator.jobs import PARTS
from edgexpert.simulator.program import Op, Program, Resource

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Seconds from the stage's beginning.

    Attributes:
        finish: of each instruction.
        busy: of each `Resource`.
    """

    program: Program
    finish: Floats
    busy: Floats

    @property
    def start(self) -> Floats:
        return self.finish - self.program.seconds

    @property
    def latency(self) -> float:
        """The longest path."""
        return float(self.finish.max())

    @property
    def bound(self) -> Resource:
        """What is busy longest."""
        return Resource(int(self.busy.argmax()))


def schedule(program: Program) -> Timeline:
    """The timeline of one stage."""
    finish = [0.0] * (len(program) + 1)  # the last one stands for "nothing to wait for"
    free = [0.0] * len(Resource)
    rows = zip(program.resource.tolist(), program.seconds.tolist(), program.first.tolist(), program.second.tolist(), strict=True)
    for index, (resource, seconds, first, second) in enumerate(rows):
        start, a, b = free[resource], finish[first], finish[second]
        if a > start:
            start = a
        if b > start:
            start = b
        finish[index] = free[resource] = start + seconds
    busy = np.bincount(program.resource, program.seconds, len(Resource)).astype(np.float64)
    timeline = Timeline(program, np.array(finish[:-1]), busy)
    assert timeline.latency >= busy.max() * (1 - 1e-9), "faster than the roofline"
    return timeline


class ChromeTrace:
    """Stages one after the other in the format that Perfetto and chrome://tracing read."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": int(r), "args": {"name": r.name}} for r in Resource
        ]
        self.time = 0.0
        self.stages = 0

    def add(self, timeline: Timeline, kind: str) -> None:
        """Appends a stage, in microseconds as the format wants. The blocks of a matrix are drawn as one."""
        program, jobs = timeline.program, timeline.program.jobs
        key = program.job * len(Op) + program.op
        _, first, whose = np.unique(key, return_index=True, return_inverse=True)
        finish = np.zeros(len(first))
        np.maximum.at(finish, whose, timeline.finish)
        moved, busy = (np.bincount(whose, values) for values in (program.read + program.write, program.seconds))
        start = timeline.start[first]
        for index in np.argsort(first).tolist():
            row = int(first[index])
            job, op = program.job[row], Op(program.op[row])
            part = PARTS[jobs["part"][job]]
            facts = {"layer": int(jobs["layer"][job]), "expert": int(jobs["expert"][job]), "bytes": float(moved[index]),
                     "busy_us": float(busy[index]) * 1e6, "sram": float(program.sram[row])}
            self.events.append({
                "ph": "X", "pid": 0, "tid": int(program.resource[row]), "cat": part,
                "name": f"{part}: {op.name.lower().replace('_', ' ')}",
                "ts": (self.time + float(start[index])) * 1e6, "dur": float(finish[index] - start[index]) * 1e6,
                "args": {"stage": f"{kind} {self.stages}"} | {name: value for name, value in facts.items() if value >= 0},
            })
        self.time += timeline.latency
        self.stages += 1

    def write(self, file: Path) -> None:
        file.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ns"}), "utf-8")

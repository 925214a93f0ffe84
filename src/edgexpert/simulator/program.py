"""Jobs become instructions: a table of what each occupies, for how long, and which two it waits for.

Weights stream through two halves of the clusters' memories: a block is fetched while the one before it is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edgexpert.core.errors import UserError
from edgexpert.simulator import dram
from edgexpert.simulator.device import Device
from edgexpert.simulator.jobs import NONE, Jobs, StageJobs
from edgexpert.simulator.shapes import ModelShape
from edgexpert.simulator.workload import PlannedStage

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Resource(IntEnum):
    """What works on one instruction at a time."""

    DRAM = 0
    NOC = 1
    PE = 2
    SIMD = 3
    PRU = 4
    DCU = 5


class Op(IntEnum):
    """The instructions, in the order in which one job issues them."""

    FETCH_ACTIVATIONS = 0
    SCORE_CHANNELS = 1
    UPDATE_MASKS = 2
    LOAD_ACTIVATIONS = 3
    LOAD_WEIGHTS = 4
    MATMUL = 5
    SIMD = 6
    QUANTISE = 7
    PARTITION_TOKENS = 8
    FORM_SHARED_SET = 9
    WRITE_BACK = 10


RESOURCE = np.array([Resource.DRAM, Resource.DCU, Resource.DCU, Resource.NOC, Resource.DRAM, Resource.PE, Resource.SIMD,
                     Resource.SIMD, Resource.PRU, Resource.PRU, Resource.DRAM])
"""The resource of each op."""

COLUMN = {Op.FETCH_ACTIVATIONS: "fetch", Op.SCORE_CHANNELS: "score", Op.UPDATE_MASKS: "update", Op.LOAD_ACTIVATIONS: "inputs",
          Op.SIMD: "simd", Op.QUANTISE: "quantise", Op.PARTITION_TOKENS: "partition", Op.FORM_SHARED_SET: "union"}
"""The ops that a job issues once, if at all, with the column that says how much."""


MOST_INSTRUCTIONS = 10_000_000
"""Of a stage; a large model has tens of thousands. More would take gigabytes and minutes."""


@dataclass(frozen=True, eq=False)
class Program:
    """The instructions of one stage, a row each.

    Attributes:
        jobs: what they belong to.
        job: of each instruction, index into ``jobs``.
        first, second: instructions that must have finished, or `NONE`.
        read, write: bytes from and to external memory.
    """

    jobs: Jobs
    op: NDArray[np.int8]
    job: Indices
    seconds: Floats
    first: Indices
    second: Indices
    read: Floats
    write: Floats
    macs: Floats
    sram: Floats

    def __len__(self) -> int:
        return len(self.op)

    @cached_property
    def resource(self) -> NDArray[np.int64]:
        return RESOURCE[self.op]

    @cached_property
    def part(self) -> NDArray[np.int8]:
        """Index into `PARTS` of each instruction."""
        part: NDArray[np.int8] = self.jobs["part"][self.job]
        return part


def compile_stage(model: ModelShape, device: Device, planned: PlannedStage, reuse: bool = False) -> Program:
    """The program of one stage.

    Args:
        reuse: whether the plans come from a policy with prompt-wise expert reuse.

    Raises:
        UserError: the workload does not fit the model, or the device lacks a unit or a draft that it needs.
    """
    jobs = StageJobs(model, device, planned, reuse).build()
    if (needed := int(jobs["sram"].max())) > device.memory.shared:
        raise UserError(f"the device {device.name} has {device.memory.shared} bytes of shared SRAM, and a token of {model.name} "
                        f"needs {needed}; give it more, or a smaller model")
    return _Layout(jobs, device, broadcast=planned.stage.kind == "prefill").program()


class _Layout:
    """Where each job's instructions stand, and what they wait for.

    What a job writes back is issued after the loads of the next one, so that no load queues behind a result that is not there.
    """

    def __init__(self, jobs: Jobs, device: Device, broadcast: bool) -> None:
        assert jobs["write"][-1] == 0
        self.jobs, self.device = jobs, device
        self.written = np.roll(jobs["write"], 1)  # what the job before wrote
        self.blocks = self._count_blocks(broadcast)
        self.position: dict[Op, Indices] = {}
        after = np.zeros(len(jobs), np.int64)  # instructions of the job so far
        for op in Op:
            self.position[op] = after.copy()
            if op is Op.LOAD_WEIGHTS:
                after += 2 * self.blocks
            elif op is not Op.MATMUL:  # which follows its load
                after += self._amount(op) > 0
        self.begin = np.cumsum(after) - after
        self.length = int(after.sum())
        for op in Op:
            self.position[op] += self.begin
        self.end = self.position[Op.WRITE_BACK] - 1  # the last instruction that makes the job's result

    def _amount(self, op: Op) -> Floats:
        """How much of a single instruction each job's place in the program holds."""
        amount: Floats = self.written if op is Op.WRITE_BACK else self.jobs[COLUMN[op]]
        return amount

    def _count_blocks(self, broadcast: bool) -> Indices:
        """Blocks of each job: half a memory holds one. Broadcast weights are in every cluster's memory."""
        memory, array = self.device.memory, self.device.array
        cores = array.cores * (1 if broadcast else array.clusters)
        weights, scales = (np.ceil(self.jobs[column] / (size * cores / 2))
                           for column, size in (("values", memory.core_weights), ("scales", memory.core_scales)))
        blocks = np.maximum(np.maximum(weights, scales), self.jobs["macs"] > 0)
        if not 2 * blocks.sum() <= MOST_INSTRUCTIONS:
            small = "core_weights" if weights.sum() >= scales.sum() else "core_scales"
            raise UserError(f"the memory.{small} of the device {self.device.name} is so small that a stage takes "
                            f"{2 * blocks.sum():.3g} instructions, of which at most {MOST_INSTRUCTIONS:.0g} are simulated; give "
                            "it more, or a smaller model")
        return blocks.astype(np.int64)

    def program(self) -> Program:
        jobs, n = self.jobs, self.length
        columns = {name: np.zeros(n) for name in ("seconds", "read", "write", "macs")}
        op, first, second = np.zeros(n, np.int8), np.full(n, NONE), np.full(n, NONE)
        job = np.repeat(np.arange(len(jobs)), np.diff(np.append(self.begin, n)))

        source = np.where(jobs["source"] >= 0, self.end[jobs["source"]], NONE)
        for single in (*COLUMN, Op.WRITE_BACK):
            has = self._amount(single) > 0
            at = self.position[single][has]
            op[at] = single
            columns["seconds"][at] = self._seconds(single, self._amount(single)[has])
            first[at] = self._waits_for(single, source)[has]
            if RESOURCE[single] == Resource.DRAM:
                columns["write" if single is Op.WRITE_BACK else "read"][at] = self._amount(single)[has]
        job[self.position[Op.WRITE_BACK][self.written > 0]] -= 1
        both = jobs["union"] > 0  # the shared set needs the groups and the router's scores
        second[self.position[Op.FORM_SHARED_SET][both]] = self.position[Op.PARTITION_TOKENS][both] - 1
        both = (jobs["inputs"] > 0) & (jobs["fetch"] > 0)
        second[self.position[Op.LOAD_ACTIVATIONS][both]] = self.position[Op.FETCH_ACTIVATIONS][both]

        self._stream(op, first, second, columns, source)
        return Program(jobs, op, job, columns["seconds"], first, second, columns["read"], columns["write"], columns["macs"],
                       jobs["sram"][job])

    def _waits_for(self, op: Op, source: Indices) -> Indices:
        """What a job's single instruction waits for first, for every job."""
        if op in (Op.SCORE_CHANNELS, Op.LOAD_ACTIVATIONS, Op.FETCH_ACTIVATIONS):
            return source
        if op is Op.PARTITION_TOKENS:  # the weights of the prompt's tokens are there from the beginning
            return np.full(len(self.jobs), NONE)
        if op is Op.WRITE_BACK:
            return np.roll(self.end, 1)
        return self.position[op] - 1  # the instruction before it

    def _seconds(self, op: Op, amount: Floats) -> Floats:
        """Time of single instructions; activations in external memory lie in one piece."""
        device = self.device
        if RESOURCE[op] == Resource.DRAM:
            bursts = np.ceil(amount / device.dram.burst_bytes)
            rows = np.ceil(amount / device.dram.page_bytes)
            return dram.seconds(device.dram, amount, bursts, rows)
        per_cycle = {Resource.NOC: device.units.noc_bytes_per_cycle, Resource.SIMD: device.units.simd_lanes}
        return np.ceil(amount / per_cycle.get(RESOURCE[op], 1)) / device.clock_hz

    def _stream(self, op: NDArray[np.int8], first: Indices, second: Indices, columns: dict[str, Floats],
                source: Indices) -> None:
        """Fills in the blocks: loads and multiplications in turn."""
        jobs, blocks = self.jobs, self.blocks
        owner = np.repeat(np.arange(len(jobs)), blocks)
        number = np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        load = self.position[Op.LOAD_WEIGHTS][owner] + 2 * number
        matmul = load + 1
        op[load], op[matmul] = Op.LOAD_WEIGHTS, Op.MATMUL
        share = np.maximum(blocks, 1)
        count = jobs["values"] + jobs["scales"]
        columns["read"][load] = (count / share)[owner]
        columns["seconds"][load] = (dram.seconds(self.device.dram, count, jobs["bursts"], jobs["activations"]) / share)[owner]
        columns["macs"][matmul] = (jobs["macs"] / share)[owner]
        columns["seconds"][matmul] = (jobs["pe_cycles"] / share / self.device.clock_hz)[owner]
        first[load[2:]] = matmul[:-2]  # the half of the memory that it goes into is free
        decided = np.where(jobs["decider"] >= 0, self.end[jobs["decider"]], NONE)
        scored = np.where(jobs["update"] > 0, self.position[Op.UPDATE_MASKS], self.position[Op.SCORE_CHANNELS])
        second[load] = np.where(jobs["score"] > 0, scored, decided)[owner]
        first[matmul] = load
        second[matmul] = np.where(jobs["inputs"] > 0, self.position[Op.LOAD_ACTIVATIONS], source)[owner]

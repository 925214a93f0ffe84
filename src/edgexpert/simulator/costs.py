"""What a matrix multiplication loads and computes on a device, as columns of the job table."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgexpert.core.errors import UserError
from edgexpert.simulator import dram
from edgexpert.simulator.device import Device
from edgexpert.simulator.shapes import Matrix, parameters
from edgexpert.simulator.units import adder_tree, mask_update
from edgexpert.simulator.workload import PlannedLayer, PlannedMatrix

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Columns = dict[str, Any]
"""What is given of a job; the rest is 0."""


class Costs:
    """Args:
        model: its name, for messages.
        broadcast: whether all clusters get the same weights, as in prefill.
    """

    def __init__(self, model: str, device: Device, broadcast: bool) -> None:
        self.model, self.device, self.broadcast = model, device, broadcast
        self.activation = device.precision.activation_bits / 8

    def matrices(self, matrices: Sequence[Matrix], rows: int) -> Columns:
        """Whole matrices, multiplied one after the other on the same ``rows``."""
        fmt = self.device.format
        total = parameters(tuple(matrices))
        scales = sum(fmt.read(m.outputs, 0, fmt.groups(m.inputs)) for m in matrices)
        values = total * fmt.value
        pe_cycles = sum(float(self._cycles(m.outputs, np.array([float(m.inputs)]), np.array([rows]))[0]) for m in matrices)
        return {"values": values, "scales": scales, "macs": rows * total, "pe_cycles": pe_cycles,
                "inputs": rows * matrices[0].inputs * self.activation, "quantise": rows * sum(m.outputs for m in matrices),
                **self.whole_accesses(np.array([values + scales]))}

    def _cycles(self, outputs: int, channels: Floats, rows: Counts) -> Floats:
        """Cycles of the PE array for each expert's rows, on ``channels`` input channels a row.

        A line's PEs work on outputs, lines and cores on input channels. Prefill gives all clusters the same weights and each
        its own tokens; decoding gives all clusters the same token and each its own outputs (section IV-A).
        """
        array = self.device.array
        steps = np.ceil(channels / (array.cores * array.lines))
        if self.broadcast:
            return np.asarray(np.ceil(rows / array.clusters) * ceil(outputs / array.pes) * steps, np.float64)
        return np.asarray(rows * ceil(outputs / (array.clusters * array.pes)) * steps, np.float64)

    def whole_accesses(self, count: Floats) -> Columns:
        """Bursts and activations of runs of ``count`` bytes each; nothing where external memory is flat."""
        if self.device.dram.mode == "flat":
            return {}
        lengths, owner = np.ceil(count).astype(np.int64), np.arange(len(count))
        some = lengths > 0
        bursts, activations = dram.count_accesses(self.device.dram, np.zeros_like(lengths)[some], lengths[some], owner[some],
                                                  len(count))
        return {"bursts": bursts, "activations": activations}

    def experts(self, matrix: Matrix, selected: PlannedMatrix | None, plan: PlannedLayer) -> Columns:
        """What one matrix of every expert loads and computes."""
        fmt, device, experts = self.device.format, self.device, len(plan.experts)
        share: Floats | float = 1.0 if plan.value_share is None else plan.value_share
        if selected is None:
            channels = np.full(experts, float(matrix.inputs))
            groups = np.full(experts, float(fmt.groups(matrix.inputs)))
            computed = plan.rows * channels
        else:
            if fmt.group and matrix.inputs % fmt.group:
                raise UserError(f"precision.group {fmt.group} of {device.name} does not divide the {matrix.inputs} channels "
                                f"of {self.model}; give a device with another group")
            channels, computed = selected.channels.astype(float), selected.computed.astype(float)
            groups = selected.touched(fmt.group).sum(1).astype(float) if fmt.group else np.zeros(experts)
        values = fmt.read(matrix.outputs, channels, np.zeros(experts), share, plan.index_bits)
        scales = fmt.read(matrix.outputs, np.zeros(experts), groups)
        if plan.index_bits and device.units.skips_zero_weights:
            computed = computed * share
        columns: Columns = {
            "values": values, "scales": scales, "macs": computed * matrix.outputs,
            "pe_cycles": self._cycles(matrix.outputs, computed / plan.rows, plan.rows),
            "inputs": computed * self.activation,
        }
        if selected is None:
            return columns | self.whole_accesses(values + scales)
        return columns | self._selected_accesses(matrix, selected) | self._score_cycles(selected, plan)

    def _selected_accesses(self, matrix: Matrix, selected: PlannedMatrix) -> Columns:
        """Bursts and activations of the runs of channels, and of the rows of scales that they touch."""
        if self.device.dram.mode == "flat":
            return {}
        fmt = self.device.format
        masks = [(selected.mask, matrix.outputs * fmt.value)]
        if fmt.group:
            masks.append((selected.touched(fmt.group), matrix.outputs * fmt.scale))
        counted = [dram.count_mask_accesses(self.device.dram, mask, row) for mask, row in masks]
        return {"bursts": sum(bursts for bursts, _ in counted), "activations": sum(opened for _, opened in counted)}

    def _score_cycles(self, selected: PlannedMatrix, plan: PlannedLayer) -> Columns:
        """Cycles of the coalescing unit for each expert; 0 for a device without one."""
        kind = self.device.units.adder_tree
        if kind == "none":
            return {}
        if kind == "reconfigurable":
            score = adder_tree.reconfigurable_cycles(selected.total, plan.rows)
        else:
            score = adder_tree.fixed_cycles(selected.total, plan.depths)
        return {"score": score, "update": mask_update.update_cycles(selected.total)}

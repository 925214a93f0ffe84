"""Energy of a program: external memory by the byte, the chip by the multiplication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from edgexpert.simulator.device import Device
from edgexpert.simulator.jobs import PARTS
from edgexpert.simulator.program import Program

Kind = Literal["dram", "sram", "logic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Energy = dict[str, dict[Kind, float]]
"""Joules by part and by where they are spent."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "moe": ("router", "experts", "shared_experts"),
    "draft": ("draft",),
    "other": ("kv_cache", "dense", "lm_head", "embeddings", "encoder"),
}
"""The paper's breakdown (Figure 13c), which counts the LM head and the KV cache as other components."""


def energy(program: Program, device: Device) -> Energy:
    """Energy of one stage by part of the model and by kind."""
    moved = (program.read * device.dram.read_pj_per_bit + program.write * device.dram.write_pj_per_bit) * 8
    per_instruction = {
        "dram": moved,
        "sram": program.macs * device.pj_per_mac("sram"),
        "logic": program.macs * device.pj_per_mac("logic"),
    }
    by_part = {kind: np.bincount(program.part, pj, len(PARTS)) * 1e-12 for kind, pj in per_instruction.items()}
    return {part: {kind: float(by_part[kind][index]) for kind in KINDS} for index, part in enumerate(PARTS)}


def grouped(result: Energy) -> Energy:
    """The same by the paper's four groups."""
    return {group: {kind: sum(result[part][kind] for part in parts) for kind in KINDS} for group, parts in GROUPS.items()}


def total(result: Energy, kind: Kind | None = None) -> float:
    """Joules of everything, or of one kind."""
    return sum(value for kinds in result.values() for name, value in kinds.items() if kind in (None, name))

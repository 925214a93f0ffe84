"""A device as data: a TOML file, read into frozen dataclasses with messages that name the key that is wrong.

A file may start from another device with ``base = "edgexpert"`` and give only what differs.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from edgexpert.core.checked import Range, checked
from edgexpert.core.errors import UserError
from edgexpert.core.shapes import WeightFormat

Unit = Literal["threshold", "sorting", "none"]
Tree = Literal["reconfigurable", "fixed", "none"]
DramMode = Literal["flat", "closed", "inorder"]

Count = Annotated[int, Range(1, 1_000_000)]
Bytes = Annotated[int, Range(1, 2**40)]
Bits = Annotated[int, Range(1, 64)]
Quantity = Annotated[float, Range(0, 1e18, closed=False)]


@dataclass(frozen=True)
class Array:
    """The PE array: clusters x cores x lines x PEs, one multiplication a cycle each."""

    clusters: Count
    cores: Count
    lines: Count
    pes: Count

    @property
    def macs(self) -> int:
        return self.clusters * self.cores * self.lines * self.pes


@dataclass(frozen=True)
class Memory:
    """On-chip memories in bytes: one shared, and in each core one for weights and one for their scales."""

    shared: Bytes
    core_weights: Bytes
    core_scales: Bytes


@dataclass(frozen=True)
class Precision:
    """Bits of what is stored; ``group`` input channels share a row of scales."""

    weight_bits: Bits
    group: Annotated[int, Range(0, 1_000_000)]
    scale_bits: Annotated[int, Range(0, 64)]
    activation_bits: Bits
    accumulator_bits: Bits
    kv_bits: Bits


@dataclass(frozen=True)
class Dram:
    """External memory. Times in cycles of ``clock_ns`` (JEDEC's names); ``bandwidth`` is what the flat mode grants, bytes/s."""

    mode: DramMode
    bandwidth: Quantity
    read_pj_per_bit: Quantity
    write_pj_per_bit: Quantity
    channels: Count
    banks: Count
    page_bytes: Bytes
    burst_bytes: Bytes
    clock_ns: Quantity
    burst_cycles: Count
    trcd: Count
    trp: Count
    trc: Count
    trrd: Count
    tfaw: Count
    trefi: Count
    trfc: Count


@dataclass(frozen=True)
class Units:
    """Units beside the PE array.

    Attributes:
        noc_bytes_per_cycle: activations that the network hands to the clusters in a cycle.
        simd_lanes: elements that the SIMD unit processes in a cycle.
        partitioning: how prompt tokens are grouped; ``none`` where the device has no unit for prompt-wise reuse.
        adder_tree: how channels are scored; ``none`` where the device has no unit for coalescing.
        skips_zero_weights: whether single zero weights cost no multiplication (arbitrary skipping).
    """

    noc_bytes_per_cycle: Count
    simd_lanes: Count
    partitioning: Unit
    adder_tree: Tree
    skips_zero_weights: bool


@dataclass(frozen=True)
class Component:
    """A row of the synthesis table: area in mm2 (0 where nobody published it) and average power in W."""

    name: str
    group: Literal["clusters", "controller", "shared", "whole"]
    kind: Literal["logic", "sram"]
    power_w: Quantity
    area_mm2: Annotated[float, Range(0, 1e6)] = 0.0


@dataclass(frozen=True)
class Device:
    """Attributes:
        policy: the policy that it runs unless told otherwise.
        drafts: whether it decodes speculatively.
        clock_hz: of everything on the chip.
        source: where the numbers are from.
    """

    name: str
    policy: str
    drafts: bool
    clock_hz: Quantity
    source: str
    array: Array
    memory: Memory
    precision: Precision
    dram: Dram
    units: Units
    components: tuple[Component, ...]

    @property
    def format(self) -> WeightFormat:
        """How every weight matrix is stored."""
        precision = self.precision
        return WeightFormat(precision.weight_bits / 8, precision.group, precision.scale_bits / 8)

    @property
    def peak_macs(self) -> float:
        """Multiplications a second."""
        return self.array.macs * self.clock_hz

    @property
    def tops(self) -> float:
        return 2 * self.peak_macs / 1e12

    @property
    def power_w(self) -> float:
        """The whole chip at work, without external memory."""
        return sum(component.power_w for component in self.components)

    @property
    def area_mm2(self) -> float:
        return sum(component.area_mm2 for component in self.components)

    @property
    def bytes_per_weight(self) -> float:
        """A weight of a whole matrix with its share of the scales."""
        precision = self.precision
        return (precision.weight_bits + (precision.scale_bits / precision.group if precision.group else 0)) / 8

    def pj_per_mac(self, kind: Literal["logic", "sram"]) -> float:
        """Energy on the chip for one multiplication.

        Table V gives every component's average power while the chip computes, the controllers' idle time included. So the
        whole chip is charged for each multiplication, and the other instructions cost nothing beyond it.
        """
        return sum(c.power_w for c in self.components if c.kind == kind) / self.peak_macs * 1e12


def built_in() -> list[str]:
    """Names of the devices that come with the package."""
    return sorted(path.name.removesuffix(".toml") for path in (files("edgexpert.simulator") / "devices").iterdir()
                  if path.name.endswith(".toml"))


def load_device(name: str) -> Device:
    """A device by its name, or by the path of its file.

    Raises:
        UserError: there is none, or a key of its file is missing, unknown or nonsensical.
    """
    device = checked(Device, _table(name), f"the device {name}")
    dram = device.dram
    if dram.trfc + dram.trcd >= dram.trefi:
        raise UserError(f"the key dram.trfc of the device {name} leaves no time between refreshes; give less than dram.trefi")
    if dram.page_bytes % dram.burst_bytes:
        raise UserError(f"the key dram.page_bytes of the device {name} must be a multiple of dram.burst_bytes")
    return device


def _table(name: str, below: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of a device file, those of its base included."""
    if name in below:
        raise UserError(f"the device {name} is its own base; remove a base")
    try:
        if name in built_in():
            text = (files("edgexpert.simulator") / "devices" / f"{name}.toml").read_text("utf-8")
        elif Path(name).is_file():
            text = Path(name).read_text("utf-8")
        else:
            raise UserError(f"there is no device {name!r}; give one of {', '.join(built_in())}, or a .toml file")
        table = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"the device file {name} cannot be read ({error.strerror}); give another one") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the device file {name} cannot be read as TOML ({error or type(error).__name__}); correct it") from None
    base = table.pop("base", None)
    return table if base is None else _merged(_table(str(base), (*below, name)), table)


def _merged(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in table.items()}
    return base | both

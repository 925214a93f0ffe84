"""A device as data: a TOML file, read into frozen dataclasses with messages that name the key that is wrong.

A file may start from another device with ``base = "edgexpert"`` and give only what differs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from edgexpert.core.errors import UserError
from edgexpert.core.shapes import WeightFormat

Unit = Literal["threshold", "sorting", "none"]
Tree = Literal["reconfigurable", "fixed", "none"]
DramMode = Literal["flat", "closed", "inorder"]

MAY_BE_ZERO = ("scale_bits", "group")


@dataclass(frozen=True)
class Array:
    """The PE array: clusters x cores x lines x PEs, one multiplication a cycle each."""

    clusters: int
    cores: int
    lines: int
    pes: int

    @property
    def macs(self) -> int:
        return self.clusters * self.cores * self.lines * self.pes


@dataclass(frozen=True)
class Memory:
    """On-chip memories in bytes: one shared, and in each core one for weights and one for their scales."""

    shared: int
    core_weights: int
    core_scales: int


@dataclass(frozen=True)
class Precision:
    """Bits of what is stored; ``group`` input channels share a row of scales."""

    weight_bits: int
    group: int
    scale_bits: int
    activation_bits: int
    accumulator_bits: int
    kv_bits: int


@dataclass(frozen=True)
class Dram:
    """External memory. Times in cycles of ``clock_ns`` (JEDEC's names); ``bandwidth`` is what the flat mode grants, bytes/s."""

    mode: DramMode
    bandwidth: float
    read_pj_per_bit: float
    write_pj_per_bit: float
    channels: int
    banks: int
    page_bytes: int
    burst_bytes: int
    clock_ns: float
    burst_cycles: int
    trcd: int
    trp: int
    trc: int
    trrd: int
    tfaw: int
    trefi: int
    trfc: int


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

    noc_bytes_per_cycle: int
    simd_lanes: int
    partitioning: Unit
    adder_tree: Tree
    skips_zero_weights: bool


@dataclass(frozen=True)
class Component:
    """A row of the synthesis table: area in mm2 (0 where nobody published it) and average power in W."""

    name: str
    group: Literal["clusters", "controller", "shared", "whole"]
    kind: Literal["logic", "sram"]
    power_w: float
    area_mm2: float = 0.0


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
    clock_hz: float
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
    device: Device = _build(Device, _table(name), "", name)
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
    except (OSError, ValueError) as error:
        raise UserError(f"the device file {name} cannot be read: {error}") from None
    base = table.pop("base", None)
    return table if base is None else _merged(_table(str(base), (*below, name)), table)


def _merged(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in table.items()}
    return base | both


def _build(cls: Any, table: Mapping[str, Any], where: str, file: str) -> Any:
    """An instance of a dataclass from a table, every key of which is checked."""
    hints = get_type_hints(cls)
    for key in table:
        if key not in hints:
            near = get_close_matches(key, hints, n=1)
            raise UserError(f"the device {file} has an unknown key {where}{key}; "
                            + (f"did you mean {near[0]}?" if near else f"known are {', '.join(hints)}"))
    for field in fields(cls):
        if field.name not in table and field.default is MISSING:
            raise UserError(f"the device {file} lacks the key {where}{field.name}; add it, or a base that has it")
    return cls(**{key: _value(hints[key], value, where + key, file) for key, value in table.items()})


def _value(hint: Any, value: Any, key: str, file: str) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not value:
            raise UserError(f"the key {key} of the device {file} must be a list of tables, each under [[{key}]]")
        return tuple(_value(get_args(hint)[0], item, key, file) for item in value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UserError(f"the key {key} of the device {file} must be one of {', '.join(get_args(hint))}, not {value!r}")
        return value
    if isinstance(hint, type) and hint not in (int, float, str, bool):
        if not isinstance(value, dict):
            raise UserError(f"the key {key} of the device {file} must be a table")
        return _build(hint, value, f"{key}.", file)
    wanted = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[hint]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = number and (hint is float or isinstance(value, int)) if hint in (int, float) else isinstance(value, hint)
    if not fits:
        raise UserError(f"the key {key} of the device {file} must be {wanted}, not {value!r}")
    if number and not (0 < value < float("inf") or (value == 0 and key.rpartition(".")[2] in MAY_BE_ZERO)):
        raise UserError(f"the key {key} of the device {file} must be above 0, not {value}")
    return value

"""What a user asks of a conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from edgexpert.core.errors import UserError
from edgexpert.weights.rounding import BITS

Method = Literal["rtn", "gptq"]
PACKED_PARTS = ("experts", "attention", "shared_experts", "lm_head")
"""Parts of a model that are quantised; routers, norms, biases and embeddings keep their floats."""


@dataclass(frozen=True)
class PackOptions:
    """Bits of the weights, and how they are rounded.

    Attributes:
        keep: bits of single parts, where they differ from ``bits``.
        zero_point: 4-bit groups have a zero point of their own, instead of codes that are symmetric about zero.
    """

    bits: int = 4
    group_size: int = 32
    method: Method = "rtn"
    zero_point: bool = False
    keep: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bits in (self.bits, *self.keep.values()):
            if bits not in BITS:
                raise UserError(f"weights cannot have {bits} bits; choose {', '.join(map(str, BITS[:-1]))} or {BITS[-1]}")
        if self.group_size < 4 or self.group_size % 4:
            raise UserError(f"--group-size {self.group_size} is no multiple of 4, which the kernels need; 32 is usual")
        if self.method not in ("rtn", "gptq"):
            raise UserError(f"unknown --method {self.method}; choose rtn or gptq")
        if self.zero_point and 4 not in self.bits_by_part.values():
            raise UserError("only 4-bit weights have a zero point; leave --zero-point out or give --bits 4")

    @property
    def bits_by_part(self) -> dict[str, int]:
        return {part: self.keep.get(part, self.bits) for part in PACKED_PARTS}


def parse_keep(items: Sequence[str]) -> dict[str, int]:
    """``["lm_head=8"]`` as ``{"lm_head": 8}``."""
    keep: dict[str, int] = {}
    for item in items:
        part, _, bits = item.partition("=")
        if part not in PACKED_PARTS or not bits.isdigit():
            raise UserError(f"--keep {item} is not understood; give PART=BITS with a part of {', '.join(PACKED_PARTS)}")
        keep[part] = int(bits)
    return keep

"""Traffic counters, in one place: bytes read from or written to the slow side, by what they were for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

Part = Literal[
    "experts", "shared_experts", "router", "attention", "embeddings", "lm_head", "draft", "encoder", "kv_cache"
]
PARTS: tuple[Part, ...] = get_args(Part)
Phase = Literal["prefill", "decode"]


class Reader(Protocol):
    """Something that counts the bytes it has read since it was made."""

    bytes_read: float


def _zeros() -> dict[Part, float]:
    return dict.fromkeys(PARTS, 0.0)


@dataclass
class Ledger:
    """Bytes by phase and part since the ledger was made."""

    prefill: dict[Part, float] = field(default_factory=_zeros)
    decode: dict[Part, float] = field(default_factory=_zeros)

    def add(self, phase: Phase, part: Part, count: float) -> None:
        assert count >= 0
        getattr(self, phase)[part] += count

    def add_all(self, phase: Phase, traffic: Mapping[Part, float]) -> None:
        """What one stage read and wrote."""
        for part, count in traffic.items():
            self.add(phase, part, count)

    @contextmanager
    def reading(self, phase: Phase, part: Part, reader: Reader) -> Iterator[None]:
        """Adds what ``reader`` reads while this is open."""
        before = reader.bytes_read
        yield
        self.add(phase, part, reader.bytes_read - before)

    def total(self, part: Part) -> float:
        return self.prefill[part] + self.decode[part]

    def to_json(self) -> dict[str, dict[Part, int]]:
        return {phase: {part: round(count) for part, count in getattr(self, phase).items()}
                for phase in ("prefill", "decode")}

"""Traffic counters, in one place: bytes read from or written to the slow side, by what they were for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

Part = Literal[
    "experts", "shared_experts", "router", "attention", "embeddings", "lm_head", "draft", "encoder", "kv_cache"
]
PARTS: tuple[Part, ...] = get_args(Part)
Phase = Literal["prefill", "decode"]


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

    def total(self, part: Part) -> float:
        return self.prefill[part] + self.decode[part]

    def to_json(self) -> dict[str, dict[Part, int]]:
        return {phase: {part: round(count) for part, count in getattr(self, phase).items()}
                for phase in ("prefill", "decode")}

"""What `edgexpert bench` measures of one policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgexpert.runtime.results import Generation


@dataclass(frozen=True)
class Measured:
    """What one policy did on all prompts. Bytes are expert bytes for each output token."""

    policy: str
    generations: Sequence[Generation]

    @property
    def new_tokens(self) -> int:
        return sum(g.new_tokens for g in self.generations)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / sum(g.timing.total_s for g in self.generations)

    @property
    def acceptance_length(self) -> float | None:
        stages = sum(g.speculation.stages for g in self.generations)
        return sum(g.speculation.emitted for g in self.generations) / stages if stages else None

    @property
    def prefill_bytes(self) -> float:
        return sum(g.traffic.prefill["experts"] for g in self.generations) / self.new_tokens

    @property
    def decode_bytes(self) -> float:
        return sum(g.traffic.decode["experts"] for g in self.generations) / self.new_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.generations[0].policy,
            "prompts": len(self.generations),
            "new_tokens": self.new_tokens,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_length": self.acceptance_length,
            "expert_bytes_per_token": {
                "prefill": self.prefill_bytes, "decode": self.decode_bytes, "total": self.prefill_bytes + self.decode_bytes
            },
            "approximations": self.generations[0].approximations,
        }

"""The expert union unit and the routing decision of prompt-wise reuse (section IV-B, Algorithm 1, Figure 8a)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil

LANES = 128
"""Tokens whose expert masks the union unit joins in a cycle: what the partitioning network gives it."""


@dataclass
class SharedExpertSet:
    """The shared expert set register: a bit for each expert."""

    bits: int = 0
    cycles: int = field(default=0)

    def __contains__(self, expert: int) -> bool:
        return bool(self.bits >> expert & 1)

    def join(self, tokens: Sequence[Iterable[int]]) -> None:
        """Adds the experts of a group's tokens: a tree of ORs, 128 tokens a cycle."""
        for start in range(0, len(tokens), LANES):
            for experts in tokens[start : start + LANES]:
                for expert in experts:
                    self.bits |= 1 << expert
        self.cycles += union_cycles(len(tokens))


def union_cycles(tokens: int) -> int:
    return ceil(tokens / LANES)


def reuse_route(candidates: Sequence[int], shared: SharedExpertSet, n: int) -> list[int]:
    """The n experts of one token: its best, then shared ones, then others.

    Args:
        candidates: its best k experts, in descending score.
    """
    best, rest = candidates[:1], candidates[1:]
    return [*best, *(e for e in rest if e in shared), *(e for e in rest if e not in shared)][:n]

"""What the engine asks of a draft, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree

TREE_LIMITS = {"size": (0, 1024), "depth": (1, 64), "top_k": (1, 256)}
"""Smallest and largest allowed value of each field of `TreeShape`; a larger tree would cost more than it could bring."""


@dataclass(frozen=True)
class TreeShape:
    """How large a drafted tree may be.

    Attributes:
        size: candidates, the root not counted; 0 for none.
        depth: longest path of candidates.
        top_k: children of a candidate; 1 gives a chain.

    Raises:
        UserError: a value is out of its range.
    """

    size: int = 64
    depth: int = 6
    top_k: int = 10

    def __post_init__(self) -> None:
        for name, (least, most) in TREE_LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UserError(f"`TreeShape.{name}` must be from {least} to {most}, not {value}")


class Draft(Protocol):
    """Proposes candidate tokens.

    For each text the engine first calls `reset`, or `crop` where it begins like the last one, then alternately
    `observe` (the tokens that entered the target's cache, each with its fused features) and `propose` (for the token that was
    sampled last and is not in the cache yet).
    """

    name: str
    """How results name this draft, e.g. ``eagle3``."""

    fused_layers: tuple[int, ...]
    """Target layers whose *input* (the residual stream before the layer, not normed) are the features; () for none."""

    bytes_read: float
    """Weight bytes that this draft has read since it was made; the engine takes differences."""

    def reset(self) -> None:
        """Forgets the text."""

    def crop(self, length: int) -> None:
        """Forgets the text but for its first ``length`` tokens. The token behind them will be the same one again."""

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n], with target features [n, len(fused_layers) * H] (None without layers)."""

    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""

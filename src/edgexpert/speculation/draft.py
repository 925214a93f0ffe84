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
        UserError: a value is no whole number, or out of its range.
    """

    size: int = 64
    depth: int = 6
    top_k: int = 10

    def __post_init__(self) -> None:
        for name, (least, most) in TREE_LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise UserError(f"`TreeShape.{name}` must be a whole number from {least} to {most}, not {value!r}")


class DraftState(Protocol):
    """What a draft knows of one text.

    The engine alternately calls `observe` (the tokens that entered the target's cache, each with its fused features) and
    `propose` (for the token that was sampled last and is not in the cache yet).
    """

    bytes_read: float
    """Weight bytes that were read for this text; the engine takes differences."""

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n], with target features [n, len(fused_layers) * H] (None without layers)."""

    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""

    def fork(self, length: int) -> DraftState:
        """The state of another text that has the first ``length`` tokens and the one behind them in common with this one."""


class Draft(Protocol):
    """Proposes candidate tokens. It holds weights alone; `start` gives the state of a text."""

    name: str
    """How results name this draft, e.g. ``eagle3``."""

    fused_layers: tuple[int, ...]
    """Target layers whose *input* (the residual stream before the layer, not normed) are the features; () for none."""

    def start(self) -> DraftState:
        """The state of a text that begins."""

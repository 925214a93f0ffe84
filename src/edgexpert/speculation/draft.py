"""What the engine asks of a draft, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from edgexpert.stage import TokenTree


@dataclass(frozen=True)
class TreeShape:
    """How large a drafted tree may be. ``size`` counts candidates, the root not included; a ``top_k`` of 1 gives a chain."""

    size: int = 64
    depth: int = 6
    top_k: int = 10


class Draft(Protocol):
    """Proposes candidate tokens.

    The engine calls `reset` once per text, then alternately `observe` (the tokens that entered the target's cache, each
    with its fused features) and `propose` (for the token that was sampled last and is not in the cache yet).
    """

    name: str
    """How results name this draft, e.g. ``eagle3``."""

    fused_layers: tuple[int, ...]
    """Target layers whose *input* (the residual stream before the layer, not normed) are the features; () for none."""

    bytes_read: float
    """Weight bytes that this draft has read since it was made; the engine takes differences."""

    def reset(self) -> None:
        """Forgets the text."""

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n], with target features [n, len(fused_layers) * H] (None without layers)."""

    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""

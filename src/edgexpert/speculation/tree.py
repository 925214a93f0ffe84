"""Dynamic token trees: expand the likeliest nodes level by level, then keep the likeliest candidates of all.

Source: EAGLE-2 (arXiv 2406.16858), section 4: expansion and reranking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.speculation.draft import TreeShape


class Level(NamedTuple):
    """The nodes of one depth that are to be expanded; the first level is the root alone.

    Attributes:
        tokens: int64 [n].
        parents: where each node's parent stands in the level before, int64 [n]; 0 for the root.
    """

    tokens: Tensor
    parents: Tensor


Expand = Callable[[Level], tuple[Tensor, Tensor]]
"""Gives for each node of a level k distinct next tokens, int64 [n, k], and their log-probabilities [n, k]; -inf for none."""


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of the highest scores; of equal scores the first win."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def build_tree(root: int, expand: Expand, shape: TreeShape, expand_all: bool = False) -> TokenTree:
    """Builds the tree of at most ``shape.size`` likeliest candidates, none deeper than ``shape.depth``.

    Each level expands its ``shape.top_k`` likeliest nodes, but for those whose children cannot enter the tree any more, since it
    is full of likelier candidates. ``expand`` is called once a level, and no more once there are no such nodes.

    A kept node's parent is always kept: a child is never likelier than its parent, scores are float32, and where rounding
    makes them equal the parent wins because it was there first.

    Args:
        expand_all: expands the likeliest nodes even where their children cannot enter, which gives the same tree: for an
            ``expand`` that draws at random, so that traces drawn before stay as they are.
    """
    tokens, parents, scores = np.array([root]), np.array([-1]), np.zeros(1, np.float32)
    frontier = np.array([0])  # nodes that are to be expanded, [n]
    kept = np.array([], np.int64)  # candidates that the tree would hold if it ended here
    level = Level(torch.tensor([root]), torch.tensor([0]))
    for _ in range(shape.depth if shape.size > 0 else 0):
        drafted, log_probs = expand(level)
        child_tokens = drafted.cpu().numpy()  # [n, k]
        child_scores = scores[frontier, None] + log_probs.float().clamp(max=0).cpu().numpy()
        slots, ranks = np.nonzero(child_scores > -np.inf)
        new = child_scores[slots, ranks]
        first = len(tokens)
        tokens = np.concatenate([tokens, child_tokens[slots, ranks]])
        parents = np.concatenate([parents, frontier[slots]])
        scores = np.concatenate([scores, new])

        kept = 1 + _best(scores[1:], shape.size)
        chosen = _best(new, shape.top_k)
        least = scores[kept].min() if len(kept) == shape.size else -np.inf
        can_enter = new[chosen] > least  # children are no likelier, and of equals the first win
        if not can_enter.any():
            break
        chosen = chosen if expand_all else chosen[can_enter]
        frontier = first + chosen
        level = Level(torch.from_numpy(tokens[frontier]), torch.from_numpy(slots[chosen]))
    return TokenTree(*map(torch.from_numpy, (tokens, parents, scores))).subtree([0, *kept.tolist()])

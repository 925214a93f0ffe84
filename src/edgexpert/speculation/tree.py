"""Dynamic token trees: expand the likeliest nodes level by level, then keep the likeliest candidates of all.

Source: EAGLE-2 (arXiv 2406.16858), section 4: expansion and reranking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from edgexpert.speculation.draft import TreeShape
from edgexpert.stage import TokenTree


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


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens [n, k] of logits [n, V] and their log-probabilities, float32 [n, k]."""
    log_probs, tokens = logits.float().log_softmax(-1).topk(min(k, logits.shape[-1]))
    return tokens, log_probs


def _best(scores: Tensor, count: int) -> Tensor:
    """Ascending indices of the highest scores; of equal scores the first win."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def build_tree(root: int, expand: Expand, shape: TreeShape) -> TokenTree:
    """Builds the tree of at most ``shape.size`` likeliest candidates, none deeper than ``shape.depth``.

    Each level expands its ``shape.top_k`` likeliest nodes. ``expand`` is called once a level, and no more once deeper
    candidates cannot enter the tree.

    A kept node's parent is always kept: a child is never likelier than its parent, scores are float32, and where rounding
    makes them equal the parent wins because it was there first.
    """
    tokens, parents, scores = torch.tensor([root]), torch.tensor([-1]), torch.zeros(1)
    frontier = torch.tensor([0])  # nodes that are to be expanded, [n]
    kept = torch.tensor([], dtype=torch.int64)  # candidates that the tree would hold if it ended here
    level = Level(tokens, torch.tensor([0]))
    for _ in range(shape.depth if shape.size > 0 else 0):
        child_tokens, log_probs = (x.cpu() for x in expand(level))  # [n, k]
        child_scores = scores[frontier, None] + log_probs.float().clamp(max=0)
        slots, ranks = torch.nonzero(child_scores > -torch.inf, as_tuple=True)
        new = child_scores[slots, ranks]
        first = len(tokens)
        tokens = torch.cat([tokens, child_tokens[slots, ranks]])
        parents = torch.cat([parents, frontier[slots]])
        scores = torch.cat([scores, new])

        chosen = _best(new, shape.top_k)
        frontier = first + chosen
        level = Level(tokens[frontier], slots[chosen])
        kept = 1 + _best(scores[1:], shape.size)
        if len(frontier) == 0 or (len(kept) == shape.size and scores[frontier].max() <= scores[kept].min()):
            break
    return TokenTree(tokens, parents, scores).subtree([0, *kept.tolist()])

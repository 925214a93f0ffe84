"""Token trees of a draft that does not exist: dynamic trees as EAGLE-3 builds them, as likely to be accepted as wanted.

A node's candidates are as likely as 1 / rank ** sharpness, where the sharpness varies from node to node: a draft is sure of
some words and not of others. The draft is taken to be calibrated: a candidate is accepted as often as it says, so that the
acceptance length is the sum of the tree's path probabilities.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.tree import Level, build_tree
from edgexpert.trace.channels import generator

TREE = TreeShape(size=64, depth=6, top_k=10)
CANDIDATES = 1000  # ranks that share a node's probability
SPREAD = 0.5  # standard deviation of the logarithm of a node's sharpness


def draw_tree(sharpness: float, vocabulary: int, random: torch.Generator) -> TokenTree:
    """A tree of random tokens."""
    ranks = torch.arange(1, CANDIDATES + 1).log()

    def expand(level: Level) -> tuple[Tensor, Tensor]:
        nodes = len(level.tokens)
        own = sharpness * (SPREAD * torch.randn(nodes, 1, generator=random)).exp()
        first = torch.randint(vocabulary, (nodes, 1), generator=random)
        tokens = (first + torch.arange(TREE.top_k)) % vocabulary  # distinct among siblings
        return tokens, (-own * ranks).log_softmax(-1)[:, : TREE.top_k]

    return build_tree(0, expand, TREE, expand_all=True)


def expected_length(tree: TokenTree) -> float:
    """Tokens that a stage with this tree emits on average, the target's own included."""
    return float(tree.path_log_prob.exp().sum())


def walk(tree: TokenTree, random: torch.Generator) -> list[int]:
    """An accepted path, the root first, drawn by the tree's own probabilities."""
    prob = tree.path_log_prob.exp()
    path = [0]
    while True:
        draw = float(torch.rand((), generator=random)) * float(prob[path[-1]])
        for child in torch.nonzero(tree.parents == path[-1]).flatten().tolist():
            draw -= float(prob[child])
            if draw < 0:
                path.append(child)
                break
        else:
            return path


@cache
def fit_sharpness(acceptance: float, trees: int = 32) -> float:
    """The sharpness whose trees emit ``acceptance`` tokens a stage on average.

    Raises:
        UserError: no tree of this shape does.
    """
    if not 1.2 <= acceptance <= TREE.depth + 0.5:
        raise UserError(f"an `acceptance` length of {acceptance} cannot be synthesised with trees of depth {TREE.depth}; give "
                        f"one from 1.2 to {TREE.depth + 0.5}")
    low, high = 0.3, 10.0
    for _ in range(10):
        middle = (low * high) ** 0.5
        random = generator("sharpness")
        length = sum(expected_length(draw_tree(middle, 1000, random)) for _ in range(trees)) / trees
        low, high = (middle, high) if length < acceptance else (low, middle)
    return (low * high) ** 0.5

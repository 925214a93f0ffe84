"""Verification of a token tree: the same tokens as without speculation, several at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.speculation.sampling import Sampler


def accept(tree: TokenTree, logits: Tensor, sampler: Sampler, context: Sequence[int]) -> tuple[list[int], int]:
    """Walks from the root along the tokens that the target itself picks.

    Every emitted token is the target's own pick for its position. So the text is that of plain decoding, for greedy decoding
    and for sampling, whatever the tree holds.

    Args:
        tree: the drafted tree.
        logits: the target's logits at each node, [N, V].
        sampler: picks a token from logits.
        context: all tokens of the text so far; the last one is the tree's root.

    Returns:
        The accepted nodes, root first, and the pick after the last of them, which is the next root.
    """
    assert context[-1] == tree.tokens[0]
    assert len(logits) == len(tree)
    text, path = list(context), [0]
    while True:
        token = sampler.pick(logits[path[-1]], text, len(text))
        child = tree.children[path[-1]].get(token)
        if child is None:
            return path, token
        path.append(child)
        text.append(token)

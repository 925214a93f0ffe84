"""Speculative decoding with a given acceptance length, to time real shapes without a trained model or draft.

A recorded text supplies the tokens. Each tree is drafted as usual, at its usual cost; then its likeliest path is given the next
tokens of the text, and as many of them are accepted as bring the acceptance length asked for. Nothing but time and bytes means
anything here, and every result says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.stage import TokenTree
from edgexpert.model.measure import calibration_text
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.results import Generation
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.sampling import SamplingParams


class ReplayVerifier:
    """Accepts the recorded ``text`` at a given length a stage. A tree that is too shallow owes tokens, which later ones bring."""

    def __init__(self, text: Sequence[int], acceptance: float) -> None:
        self._text, self._acceptance = text, acceptance
        self._owed = 0.0
        self._path = [0]
        self.done = 1  # tokens of the text that are out

    def begin(self, logits: Tensor, context: Sequence[int]) -> int:
        return self._text[0]

    def extend(self, tree: TokenTree) -> TokenTree:
        self._owed += self._acceptance - 1
        left = len(self._text) - self.done - 1
        accepted = min(int(self._owed + 1e-9), int(tree.depth.max()), left)
        self._owed -= accepted
        if self._owed > 3 * self._acceptance + 3:
            raise UserError(f"the drafted trees are too shallow for an acceptance length of {self._acceptance}; give a draft, "
                            "and larger trees")
        tree, self._path = relabelled(tree, self._text[self.done : self.done + accepted])
        return tree

    def accept(self, tree: TokenTree, logits: Tensor, context: Sequence[int]) -> tuple[list[int], int]:
        self.done += len(self._path)
        return self._path, self._text[self.done - 1]


def replay(engine: Engine, prompt: Sequence[int], text: Sequence[int], acceptance: float, shape: TreeShape) -> Generation:
    """Decodes ``text`` after ``prompt``, both token ids, as if drafts were accepted to ``acceptance`` tokens a stage.

    Raises:
        UserError: trees of this shape cannot bring that acceptance length.
    """
    if not 1 <= acceptance <= shape.depth + 1:
        raise UserError(f"an acceptance length of {acceptance} needs a tree of that depth less one; give one from 1 to "
                        f"{shape.depth + 1}, or a larger `TreeShape.depth`")
    params = SamplingParams(max_new_tokens=len(text), ignore_eos=True)
    stream = engine.stream(prompt, params, shape, verifier=ReplayVerifier(text, acceptance))
    for _ in stream:
        pass
    note = f"replayed: {acceptance} tokens of a recorded text a stage; only time and bytes count"
    return replace(stream.generation, text="", finish="replayed", notes=[*engine.notes, note])


def recorded_tokens(engine: Engine, count: int) -> list[int]:
    """The first ``count`` tokens of the recorded text: the package's calibration text, again and again."""
    ids = engine.encode(" ".join(calibration_text()))
    return (ids * (count // len(ids) + 1))[:count]


def relabelled(tree: TokenTree, tokens: Sequence[int]) -> tuple[TokenTree, list[int]]:
    """The tree with ``tokens`` on the path to its likeliest node of that depth, and the nodes of the path, the root first."""
    labels, depth = tree.tokens.clone(), len(tokens)
    likeliest = torch.where(tree.depth == depth, tree.path_log_prob, -torch.inf).argmax()
    path = tree.mask[likeliest].nonzero().flatten().tolist()
    assert len(path) == depth + 1, "the caller looked at the tree's depth"
    for parent, node, token in zip(path, path[1:], tokens, strict=False):
        for sibling in tree.children[parent].values():
            if int(labels[sibling]) == token:
                labels[sibling] = labels[node]  # siblings stay distinct
        labels[node] = token
    return TokenTree(labels, tree.parents, tree.path_log_prob), path

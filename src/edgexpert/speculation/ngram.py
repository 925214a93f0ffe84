"""Prompt look-up: the text drafts itself, from what followed the same words before."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import torch
from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.tree import Level, build_tree

LONGEST_MATCH = 4


class NgramDraft:
    """Drafts what followed the same words earlier in the text; it has no weights."""

    name = "ngram"
    fused_layers: tuple[int, ...] = ()

    def start(self) -> NgramState:
        """The state of a text that begins."""
        return NgramState()


class NgramState:
    """Finds earlier occurrences of the longest suffix of the text, up to four tokens, and drafts what followed them.

    All occurrences count: where their continuations part, the tree branches, and a branch is as likely as it was frequent.
    """

    bytes_read = 0.0

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> where it ended

    def fork(self, length: int) -> NgramState:
        """The state of a text that begins with the first ``length`` tokens of this one."""
        other = NgramState()
        other.observe(torch.tensor(self._text[:length]), None)
        return other

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        """Takes in committed tokens, int64 [n]."""
        for token in tokens.tolist():
            self._text.append(token)
            for length in range(1, min(LONGEST_MATCH, len(self._text)) + 1):
                self._ends[tuple(self._text[-length:])].append(len(self._text) - 1)

    def _matches(self, text: list[int]) -> list[int]:
        """Where the longest suffix of ``text`` that occurred before ended, latest first."""
        for length in range(min(LONGEST_MATCH, len(text)), 0, -1):
            if ends := self._ends.get(tuple(text[-length:])):
                return ends[::-1]
        return []

    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        """A tree of at most ``shape.size`` candidates below ``root``."""
        text = [*self._text, root]
        places = [[end - 1 for end in self._matches(text)]]  # for each node of a level, where its token stands in the text

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            nonlocal places
            places = [[place + 1 for place in places[parent] if text[place + 1:place + 2] == [token]]
                      for token, parent in zip(level.tokens.tolist(), level.parents.tolist(), strict=True)]
            tokens = torch.zeros(len(places), shape.top_k, dtype=torch.int64)
            log_probs = torch.full(tokens.shape, -torch.inf)
            for node, counts in enumerate(Counter(text[p + 1] for p in ps if p + 1 < len(text)) for ps in places):
                for rank, (token, count) in enumerate(counts.most_common(shape.top_k)):
                    tokens[node, rank], log_probs[node, rank] = token, math.log(count / counts.total())
            return tokens, log_probs

        return build_tree(root, expand, shape)

"""What goes through the target model at once: a prompt (prefill) or a token tree (verify).

Plain decoding is a verify stage whose tree is its root alone. A tree's root is the last token that was emitted and is not
in the cache yet; the other nodes are drafted candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Candidates as a tree. A parent stands before its children; node 0 is the root.

    Attributes:
        tokens: token id of each node, int64 [N].
        parents: index of each node's parent, int64 [N]; -1 for the root.
        path_log_prob: log of the product of draft probabilities from the root to the node, float32 [N]; 0 for the root.
    """

    tokens: Tensor
    parents: Tensor
    path_log_prob: Tensor

    def __post_init__(self) -> None:
        nodes = torch.arange(len(self.tokens))
        assert len(nodes) > 0 and self.tokens.shape == self.parents.shape == self.path_log_prob.shape == nodes.shape
        assert self.parents[0] == -1 and bool((self.parents[1:] >= 0).all()), "one root, and it stands first"
        assert bool((self.parents < nodes).all()), "a parent stands before its children"

    @classmethod
    def of_root(cls, token: int) -> TokenTree:
        """The tree of plain decoding."""
        return cls(torch.tensor([token]), torch.tensor([-1]), torch.zeros(1))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def candidates(self) -> int:
        """Drafted tokens: the nodes without the root."""
        return len(self) - 1

    @cached_property
    def depth(self) -> Tensor:
        """Distance of each node from the root, int64 [N]."""
        return self.mask.sum(1) - 1

    @cached_property
    def mask(self) -> Tensor:
        """Who attends to whom, bool [N, N]: row i is True at node i and its ancestors."""
        mask = torch.eye(len(self), dtype=torch.bool)
        mask[:, 0] = True
        ancestor = self.parents.clamp(min=0)  # of each node 1, 2, 4, ... levels up, or the root
        while ancestor.any():
            mask |= mask[ancestor]  # so far a row knows as many levels as that ancestor is away
            ancestor = ancestor[ancestor]
        return mask

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each node, its children as ``{token id: node}``."""
        children: list[dict[int, int]] = [{} for _ in range(len(self))]
        for node, (token, parent) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            if parent >= 0:
                children[parent].setdefault(token, node)
        return children

    def subtree(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of ``nodes`` alone: sorted, holding the root and, with every node, its parent."""
        kept = torch.tensor(list(nodes))
        index = torch.full((len(self),), -1)
        index[kept] = torch.arange(len(kept))
        parents = index[self.parents[kept]]
        parents[0] = -1
        return TokenTree(self.tokens[kept], parents, self.path_log_prob[kept])

    def with_path(self, tokens: Sequence[int]) -> tuple[TokenTree, list[int]]:
        """Adds ``tokens`` as a path from the root, where they are not in the tree yet (used by forced decoding).

        An added node is as likely as its parent lets it be: it gets the parent's least likely child's path probability, or
        the parent's own where the parent has no child.

        Returns the tree and the nodes of the path, the root first.
        """
        new_tokens, new_parents = self.tokens.tolist(), self.parents.tolist()
        log_prob = self.path_log_prob.tolist()
        path = [0]
        for token in tokens:
            parent = path[-1]
            child = self.children[parent].get(token) if parent < len(self) else None
            if child is None:
                siblings = self.children[parent].values() if parent < len(self) else ()
                log_prob.append(min((log_prob[s] for s in siblings), default=log_prob[parent]))
                child = len(new_tokens)
                new_tokens.append(token)
                new_parents.append(parent)
            path.append(child)
        return TokenTree(torch.tensor(new_tokens), torch.tensor(new_parents), torch.tensor(log_prob)), path


@dataclass(frozen=True, eq=False)
class Stage:
    """One pass through the target model.

    Attributes:
        kind: ``prefill`` runs prompt tokens, ``verify`` runs a token tree.
        tokens: int64 [T].
        prefix: number of tokens already in the cache.
        tree: the token tree of a verify stage.
        importance: weight of each prompt token, float32 [T], for prompt-wise expert reuse; None when nobody measured it.
    """

    kind: Literal["prefill", "verify"]
    tokens: Tensor
    prefix: int = 0
    tree: TokenTree | None = None
    importance: Tensor | None = None

    def __post_init__(self) -> None:
        assert (self.kind == "verify") == (self.tree is not None)
        assert self.tree is None or len(self.tree) == len(self.tokens)
        assert self.importance is None or len(self.importance) == len(self.tokens)
        assert len(self.tokens) > 0 and self.prefix >= 0

    @classmethod
    def prefill(cls, tokens: Tensor, prefix: int = 0, importance: Tensor | None = None) -> Stage:
        return cls("prefill", tokens, prefix, None, importance)

    @classmethod
    def verify(cls, tree: TokenTree, prefix: int) -> Stage:
        return cls("verify", tree.tokens, prefix, tree)

    @property
    def depth(self) -> Tensor:
        """Distance of each token from the first, int64 [T]."""
        return torch.arange(len(self.tokens)) if self.tree is None else self.tree.depth

    @property
    def positions(self) -> Tensor:
        """Position of each token in the text, int64 [T]."""
        return self.prefix + self.depth

    @property
    def is_tree(self) -> bool:
        """Whether attention needs a mask of its own: the tokens are not one path."""
        return self.tree is not None and bool((self.tree.depth != torch.arange(len(self.tokens))).any())

"""Drafts whose quality is known, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.kernels.dense import top_log_probs
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.tree import Level, build_tree


class OracleDraft:
    """Drafts a known continuation as a chain: every candidate is right.

    Args:
        continuation: the tokens after the prompt; the first proposal comes when the prompt has been observed.
    """

    name = "oracle"
    fused_layers: tuple[int, ...] = ()

    def __init__(self, continuation: Sequence[int]) -> None:
        self.continuation = list(continuation)

    def start(self) -> OracleState:
        return OracleState(self.continuation)


class OracleState:
    bytes_read = 0.0

    def __init__(self, continuation: Sequence[int]) -> None:
        self.continuation = continuation
        self.observed = 0
        self.prompt: int | None = None

    def fork(self, length: int) -> OracleState:
        return OracleState(self.continuation)

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        self.observed += len(tokens)

    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        if self.prompt is None:
            self.prompt = self.observed
        first = self.observed - self.prompt + 1
        chain = self.continuation[first : first + min(shape.size, shape.depth)]
        nodes = torch.arange(1 + len(chain))
        return TokenTree(torch.tensor([root, *chain]), nodes - 1, torch.zeros(len(nodes)))


class RandomDraft:
    """Drafts random tokens in trees of random form; each text gets the same ones."""

    name = "random"
    fused_layers: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def start(self) -> RandomState:
        return RandomState(self)


class RandomState:
    bytes_read = 0.0

    def __init__(self, draft: RandomDraft) -> None:
        self.draft = draft
        self.generator = torch.Generator().manual_seed(draft.seed)

    def fork(self, length: int) -> RandomState:
        return type(self)(self.draft)

    def observe(self, tokens: Tensor, features: Tensor | None) -> None:
        pass

    def expand(self, level: Level, k: int) -> tuple[Tensor, Tensor]:
        logits = 3 * torch.randn(len(level.tokens), self.draft.vocab_size, generator=self.generator)
        return top_log_probs(logits, k)

    def propose(self, root: int, shape: TreeShape) -> TokenTree:
        return build_tree(root, lambda level: self.expand(level, shape.top_k), shape)


class GarbageDraft(RandomDraft):
    """Drafts the same few tokens below every node, and is sure of them."""

    name = "garbage"

    def start(self) -> GarbageState:
        return GarbageState(self)


class GarbageState(RandomState):
    def expand(self, level: Level, k: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(min(k, self.draft.vocab_size)).expand(len(level.tokens), -1)
        return tokens, torch.zeros(tokens.shape)

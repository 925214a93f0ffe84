"""Verification of a token tree: the same tokens as without speculation, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from edgexpert.core.stage import TokenTree
from edgexpert.speculation.sampling import Sampler, TokenLogprob


class Verifier(Protocol):
    """Says which tokens a text gets: the first one, and of each drafted tree the accepted nodes and the token behind them."""

    def begin(self, logits: Tensor, context: Sequence[int]) -> int:
        """The first token, from the logits [V] behind the prompt ``context``."""

    def extend(self, tree: TokenTree) -> TokenTree:
        """The tree that goes through the target: ``tree``, and behind its nodes those that the verifier adds."""

    def accept(self, tree: TokenTree, logits: Tensor, context: Sequence[int]) -> tuple[list[int], int]:
        """The accepted nodes, root first, and the token after the last of them, which is the next root.

        Args:
            tree: what `extend` gave.
            logits: the target's logits at each node, [N, V].
            context: all tokens of the text so far; the last one is the tree's root.
        """


class SamplingVerifier:
    """Accepts what the target itself picks. So the text is that of plain decoding, greedy or sampled, whatever the tree holds.

    Attributes:
        logprobs: of the tokens so far, where the sampling parameters ask for them.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.logprobs: list[TokenLogprob] = []

    def begin(self, logits: Tensor, context: Sequence[int]) -> int:
        """What the target picks after ``context``, from logits [V]."""
        token = self.sampler.pick(logits, context, len(context))
        if self.sampler.params.logprobs is not None:
            self.logprobs.append(TokenLogprob.of(logits, token, self.sampler.params.logprobs))
        return token

    def extend(self, tree: TokenTree) -> TokenTree:
        return tree

    def accept(self, tree: TokenTree, logits: Tensor, context: Sequence[int]) -> tuple[list[int], int]:
        """Walks from the root along the tokens that the target picks."""
        assert context[-1] == tree.tokens[0]
        assert len(logits) == len(tree)
        text, path = list(context), [0]
        while True:
            token = self.begin(logits[path[-1]], text)
            child = tree.children[path[-1]].get(token)
            if child is None:
                return path, token
            path.append(child)
            text.append(token)


class ForcedVerifier:
    """Accepts a known continuation, also where the draft did not think of it, and reads its log-probabilities (forced decoding).

    Attributes:
        log_probs: natural-log probability of each token so far.
    """

    def __init__(self, truth: Sequence[int], depth: int) -> None:
        self._truth, self._depth = list(truth), depth
        self._path = [0]
        self.log_probs: list[float] = []

    @property
    def finished(self) -> bool:
        return len(self.log_probs) == len(self._truth)

    @property
    def _ahead(self) -> list[int]:
        """What one stage can give: the tokens of a path, and the one behind it."""
        return self._truth[len(self.log_probs) :][: self._depth + 1]

    def begin(self, logits: Tensor, context: Sequence[int]) -> int:
        first = self._truth[0]
        self.log_probs.append(float(logits.log_softmax(-1)[first]))
        return first

    def extend(self, tree: TokenTree) -> TokenTree:
        extended, self._path = tree.with_path(self._ahead[:-1])
        return extended

    def accept(self, tree: TokenTree, logits: Tensor, context: Sequence[int]) -> tuple[list[int], int]:
        ahead = self._ahead
        scores = logits[self._path].log_softmax(-1)  # [path, V]
        self.log_probs += [float(scores[i, token]) for i, token in enumerate(ahead)]
        return self._path, ahead[-1]

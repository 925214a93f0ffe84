"""How a token is picked from logits: greedy or sampled, with the usual filters.

One uniform number belongs to each position of the text, whatever drafted it. So sampling with speculation gives the very
tokens that plain sampling gives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgexpert.core.errors import UserError

LEAST_TEMPERATURE = 1e-4
"""Logits divided by less leave the range of float32."""
MOST_LOGPROBS = 100


@dataclass(frozen=True)
class SamplingParams:
    """What to generate.

    Attributes:
        temperature: 0 for greedy decoding.
        top_k: only the k likeliest tokens; 0 for all.
        top_p: only the smallest set of likeliest tokens with this share of the probability.
        repetition_penalty: above 1 makes tokens of the text so far less likely.
        stop: generation ends before the first of these strings; one string stands for itself alone.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: log-probabilities of each new token and of so many likeliest ones beside it; None for none.

    Raises:
        UserError: a value is of another type, or out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for names, kind, what in ((("max_new_tokens", "top_k", "seed"), int, "a whole number"),
                                  (("temperature", "top_p", "repetition_penalty"), (int, float), "a number")):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise UserError(f"`{name}` must be {what}, not {value!r}")
        rules = (
            (self.max_new_tokens >= 1, f"`max_new_tokens` must be at least 1, not {self.max_new_tokens}"),
            (self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < math.inf,
             f"`temperature` must be 0 (greedy) or from {LEAST_TEMPERATURE} up, not {self.temperature}"),
            (self.top_k >= 0, f"`top_k` must be 0 (off) or above, not {self.top_k}"),
            (0 < self.top_p <= 1, f"`top_p` must be above 0 and at most 1 (off), not {self.top_p}"),
            (0 < self.repetition_penalty < math.inf,
             f"`repetition_penalty` must be above 0 (1 is off), not {self.repetition_penalty}"),
            (self.seed >= 0, f"`seed` must be 0 or above, not {self.seed}"),
            (all(isinstance(stop, str) and stop for stop in self.stop), "`stop` must hold strings, none of them empty"),
            (self.logprobs is None or (isinstance(self.logprobs, int) and 0 <= self.logprobs <= MOST_LOGPROBS),
             f"`logprobs` must be a whole number from 0 to {MOST_LOGPROBS}, not {self.logprobs!r}"),
        )
        for holds, message in rules:
            if not holds:
                raise UserError(message)


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probabilities at one position, from the model's own logits, before any filter.

    Attributes:
        top: the likeliest tokens and their log-probabilities, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: Tensor, token: int, count: int) -> TokenLogprob:
        """From logits [V]."""
        scores = logits.float().log_softmax(-1)
        best = scores.topk(min(count, len(scores)))
        return cls(token, float(scores[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def uniform(seed: int, position: int) -> float:
    """The random number of a position: in [0, 1), always the same for the same arguments."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


class Sampler:
    """Picks tokens by ``params``. Filters and their order are those of transformers."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._filters = LogitsProcessorList()
        if params.repetition_penalty != 1:
            self._filters.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.temperature > 0:
            if params.temperature != 1:
                self._filters.append(TemperatureLogitsWarper(float(params.temperature)))
            if params.top_k:
                self._filters.append(TopKLogitsWarper(params.top_k))
            if params.top_p < 1:
                self._filters.append(TopPLogitsWarper(params.top_p))

    def pick(self, logits: Tensor, context: Sequence[int], position: int) -> int:
        """The token at ``position`` of the text.

        Args:
            logits: [V], as the target gave them.
            context: all tokens before, which the repetition penalty looks at.
            position: which random number to use; the length of ``context`` in a text that is generated from its start.
        """
        scores = logits.float()[None]  # [1, V]
        if self._filters:
            text = torch.tensor([list(context)], device=scores.device)
            scores = self._filters(cast("torch.LongTensor", text), cast("torch.FloatTensor", scores))
        if self.params.temperature == 0:
            return int(scores.argmax())
        cumulative = scores[0].double().softmax(0).cumsum(0)
        # Inverse of the distribution function. With right=True a token of probability 0 is never found.
        point = uniform(self.params.seed, position) * cumulative[-1:]
        return int(torch.searchsorted(cumulative, point, right=True))

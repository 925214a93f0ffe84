"""One text as it is produced, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from edgexpert.runtime.results import Generation, Timing
from edgexpert.runtime.session import Session
from edgexpert.speculation.sampling import SamplingParams
from edgexpert.speculation.verify import SamplingVerifier, Verifier

Decode = Callable[[Sequence[int]], str]
"""Text of new tokens, without special ones."""


class TextStream(Iterator[str]):
    """Iterates over the text; ``generation`` holds the result so far, also after an interruption.

    Args:
        ids: the prompt.
        after: a finished or interrupted stream whose text this prompt begins with; see `Session.prefill`.
        ends: tokens that end a text.
        name, notes: of the model, for the result.
    """

    def __init__(
        self, session: Session, ids: Sequence[int], params: SamplingParams, verifier: Verifier, decode: Decode,
        ends: set[int], *, after: TextStream | None = None, name: str = "", notes: Sequence[str] = (),
    ) -> None:
        self.session, self.params = session, params
        self._ids, self._decode, self._ends = ids, decode, ends
        self._after, self._name, self._notes = after, name, notes
        self._verifier = verifier
        self._started = time.perf_counter()
        self._new: list[int] = []
        self._times: list[float] = []
        self._text = ""
        self._finish = "interrupted"
        self._pieces = self._produce()

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def generation(self) -> Generation:
        """The result so far: complete once the iteration has ended."""
        session, times, verifier = self.session, self._times, self._verifier
        timing = Timing(token_s=list(times), total_s=times[-1] if times else time.perf_counter() - self._started)
        return Generation(
            text=self._text,
            token_ids=list(self._new),
            logprobs=verifier.logprobs[: len(self._new)] if isinstance(verifier, SamplingVerifier) else [],
            prompt_tokens=len(self._ids),
            prompt_tokens_cached=session.prompt_tokens_cached,
            finish=self._finish,
            model=self._name,
            draft="none" if session.draft is None else session.draft.name,
            policy=session.policy.to_json(),
            sampling=self.params,
            timing=timing,
            speculation=session.speculation,
            traffic=session.ledger,
            expert_bytes_plain=session.host.plain_decode_expert_bytes,
            expert_bytes_exact_prefill=session.exact_prefill_experts,
            experts_per_layer_per_stage=session.experts_per_layer_per_stage,
            approximations=session.policy.approximations(),
            notes=[*self._notes, *_unsteady(session)],
        )

    def _produce(self) -> Iterator[str]:
        session, after = self.session, self._after
        self._after = None  # or every turn of a chat would hold the cache of the one before
        first = session.begin(self._verifier, self._ids, self.params.max_new_tokens, None if after is None else after.session)
        yield from self._take([first])
        while self._finish == "interrupted":
            yield from self._take(session.step(self._verifier))

    def _take(self, emitted: Sequence[int]) -> Iterator[str]:
        """Appends tokens up to the first reason to end, and yields the text that is certain by now."""
        params, now = self.params, time.perf_counter() - self._started
        for token in emitted:
            self._new.append(token)
            self._times.append(now)
            if token in self._ends and not params.ignore_eos:
                self._finish = "eos"
                break
            if len(self._new) == params.max_new_tokens:
                self._finish = "length"
                break
            if params.stop and any(s in self._decode(self._new) for s in params.stop):
                self._finish = "stop"
                break
        text = self._decode(self._new)
        stops = [text.index(s) for s in params.stop if s in text]
        if stops:
            text, self._finish = text[: min(stops)], "stop"
        if self._finish == "interrupted":
            # the last bytes may be half a character, or the beginning of a stop string
            held = max((n for s in params.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
            text = text[: len(text) - held].rstrip("\ufffd")
        piece, self._text = text[len(self._text) :], text
        if piece:
            yield piece


def _unsteady(session: Session) -> list[str]:
    """What to say where another run may give another text: trees follow the clock, and the policy decides within them."""
    chosen = session.speculation.mode == "auto" and session.speculation.drafted > 0
    if not chosen or not session.policy.approximations():
        return []
    return ["approximated within trees that were chosen by time, so the text may differ from run to run; a fixed size keeps it"]

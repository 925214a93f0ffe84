"""One text while it is being produced, piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgexpert.core.traffic import Ledger
from edgexpert.model.cache import TreeCache
from edgexpert.runtime.results import Generation, Speculation, Timing
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from edgexpert.runtime.engine import Engine


@dataclass
class Run:
    """State of one text while it is being decoded."""

    cache: TreeCache
    committed: list[int]  # tokens in the cache, and the root behind them
    ledger: Ledger
    speculation: Speculation = field(default_factory=Speculation)
    prompt_tokens_cached: int = 0
    exact_prefill_experts: float = 0.0
    experts_loaded: int = 0

    @property
    def root(self) -> int:
        return self.committed[-1]

    def begin_like(self, earlier: Run, ids: Sequence[int]) -> None:
        """Takes what the prompt ``ids`` has in common with an earlier text from that one's cache.

        One token fewer than they have in common: the last one is run again, to have its logits, and so that the draft meets
        it together with the target's features.
        """
        pairs = zip(ids, earlier.committed, strict=False)
        common = next((i for i, (new, old) in enumerate(pairs) if new != old), min(len(ids), len(earlier.committed)))
        self.prompt_tokens_cached = max(0, common - 1)
        self.cache.take(earlier.cache, self.prompt_tokens_cached)


class TextStream:
    """Iterates over the text as it is produced; ``generation`` holds the result so far, also after an interruption."""

    def __init__(self, engine: Engine, ids: list[int], params: SamplingParams, shape: TreeShape,
                 reuse_cache: bool = False) -> None:
        self._reuse_cache = reuse_cache
        self._engine, self._ids, self._params, self._shape = engine, ids, params, shape
        self._started = time.perf_counter()
        self._first: float | None = None
        self._new: list[int] = []
        self._text = ""
        self._finish = "interrupted"
        self._ended: float | None = None
        self._run: Run | None = None
        self._pieces = self._produce()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def started(self) -> bool:
        """Whether there is anything to tell yet: the prompt has gone through."""
        return self._first is not None

    @property
    def generation(self) -> Generation:
        assert self._run is not None, "nothing has been produced yet"
        now = self._ended or time.perf_counter()
        first = self._first if self._first is not None else now
        timing = Timing(ttft_s=first - self._started, total_s=now - self._started)
        if len(self._new) > 1:
            timing.tpot_s = (now - first) / (len(self._new) - 1)
        return self._engine.result(self._run, self._ids, self._new, self._text, self._finish, timing)

    def _produce(self) -> Iterator[str]:
        engine, params = self._engine, self._params
        sampler = Sampler(params)
        self._run, logits = engine.prefill(self._ids, params.max_new_tokens + self._shape.size, self._reuse_cache)
        run = self._run
        token = sampler.pick(logits, run.committed, len(run.committed))
        run.committed.append(token)
        self._first = time.perf_counter()
        emitted = [token]
        while True:
            yield from self._take(emitted)
            if self._finish != "interrupted":
                self._ended = time.perf_counter()
                if self._reuse_cache:
                    engine.keep(run)
                return
            emitted = engine.decode_stage(run, self._shape, sampler)

    def _take(self, emitted: list[int]) -> Iterator[str]:
        """Appends tokens up to the first reason to end, and yields the text that is certain by now."""
        params, ends = self._params, self._engine.end_of_sequence
        for token in emitted:
            self._new.append(token)
            if token in ends and not params.ignore_eos:
                self._finish = "eos"
                break
            if len(self._new) == params.max_new_tokens:
                self._finish = "length"
                break
            if params.stop and any(s in self._decode() for s in params.stop):
                self._finish = "stop"
                break
        text = self._decode()
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

    def _decode(self) -> str:
        return self._engine.tokenizer.decode(self._new, skip_special_tokens=True)

"""The prefill and decode loop: an MoE model that answers through token trees, under a policy.

    prompt -> prefill stage -> first token
    loop: draft proposes a tree below the last token -> verify stage -> accepted path + next token
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from edgexpert.encoder.encoder import ImportanceEncoder
from edgexpert.errors import UserError
from edgexpert.generation import Generation, Score, Speculation, Timing
from edgexpert.ledger import Ledger
from edgexpert.model.cache import TreeCache
from edgexpert.model.host import HostedModel, StageOutput
from edgexpert.policy import Policy
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.sampling import Sampler, SamplingParams
from edgexpert.speculation.verify import accept
from edgexpert.stage import Stage, TokenTree

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages."""


@dataclass
class _Run:
    """State of one text while it is being decoded."""

    cache: TreeCache
    committed: list[int]  # tokens in the cache, and the root behind them
    ledger: Ledger
    speculation: Speculation = field(default_factory=Speculation)
    exact_prefill_experts: float = 0.0
    experts_loaded: int = 0

    @property
    def root(self) -> int:
        return self.committed[-1]


class Engine:
    """An MoE model with a draft and a policy. Made by `edgexpert.load`.

    Attributes:
        policy: decides the next generations; assign through `set_policy`.
    """

    def __init__(
        self,
        host: HostedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        draft: Draft | None = None,
        encoder: ImportanceEncoder | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.tokenizer = tokenizer
        self.name = name
        self.draft = draft
        self.notes = list(notes)
        self._encoder = encoder
        self.end_of_sequence = _end_tokens(host, tokenizer)

    @property
    def policy(self) -> Policy:
        return self.host.policy

    def set_policy(self, policy: Policy) -> None:
        self.host.set_policy(policy)

    @property
    def encoder(self) -> ImportanceEncoder:
        """The importance encoder; the bundled one is loaded when it is first needed."""
        if self._encoder is None:
            self._encoder = ImportanceEncoder.bundled()
        return self._encoder

    # -- generating ------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, tree: TreeShape | None = None, **options: Any) -> Generation:
        """Answers a prompt: text, token ids, or chat messages for the model's chat template.

        Args:
            options: fields of `SamplingParams`, as keywords.
        """
        stream = self.stream(prompt, params, tree, **options)
        for _ in stream:
            pass
        return stream.generation

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, tree: TreeShape | None = None, **options: Any) -> TextStream:
        """Like `generate`, piece by piece: iterate over the text, then read ``.generation``."""
        params = replace(params or SamplingParams(), **options)
        shape = tree or TreeShape()
        ids = self.encode(prompt)
        self._check_context(len(ids), params.max_new_tokens)
        return TextStream(self, ids, params, shape)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError("the prompt is empty; give some text to go on from")
            return self.tokenizer(prompt)["input_ids"]
        if not prompt:
            raise UserError("the prompt is empty; give at least one token or message")
        if isinstance(prompt[0], int):
            return [int(token) for token in prompt]  # type: ignore[call-overload]
        if self.tokenizer.chat_template is None:
            raise UserError(f"{self.name} has no chat template, so it cannot take messages; give plain text instead")
        return list(self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)["input_ids"])

    def _check_context(self, prompt: int, new: int) -> None:
        if prompt + new > self.host.max_context:
            raise UserError(
                f"the prompt has {prompt} tokens and {new} new ones are asked for, but the model's context is "
                f"{self.host.max_context}; shorten the prompt or lower --max-new-tokens"
            )

    # -- stages ----------------------------------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int], room: int) -> tuple[_Run, Tensor]:
        """Runs a prompt; ``room`` is how many tokens will follow it at once or in total. Returns the run and logits [V]."""
        self.host.ledger = ledger = Ledger()
        run = _Run(self.host.new_cache(len(ids) + room), [], ledger)
        tokens = torch.tensor(ids)
        importance = self._importance(ids, ledger) if self.policy.prompt_wise_expert_reuse else None
        output = self._stage(Stage.prefill(tokens, importance=importance), run)
        run.exact_prefill_experts = sum(
            n * block.shape.expert for n, block in zip(output.exact_experts, self.host.blocks, strict=True)
        )
        run.committed = list(ids)
        if self.draft is not None:
            self.draft.reset()
            self.draft.observe(tokens, output.features)
        return run, output.logits[-1]

    def _stage(self, stage: Stage, run: _Run) -> StageOutput:
        fused = self.draft.fused_layers if self.draft is not None else ()
        output = self.host.run(stage, run.cache, fused)
        if stage.kind == "verify":
            run.experts_loaded += sum(len(plan.routing.loaded) for plan in output.plans)
        return output

    def _importance(self, ids: Sequence[int], ledger: Ledger) -> Tensor:
        """Weight of each prompt token, float32 [T]; the encoder's bytes go into ``ledger``."""
        before = self.encoder.bytes_read
        attention = self.encoder.weigh(*text_and_offsets(self.tokenizer, ids))
        ledger.add("prefill", "encoder", self.encoder.bytes_read - before)
        return self.policy.weigh_prompt(attention)

    def propose(self, run: _Run, shape: TreeShape) -> TokenTree:
        """A tree below the last token, no larger than the cache has room for."""
        room = run.cache.capacity - run.cache.length - 1
        if self.draft is None or min(shape.size, room) < 1:
            return TokenTree.of_root(run.root)
        before = self.draft.bytes_read
        tree = self.draft.propose(run.root, replace(shape, size=min(shape.size, room)))
        run.ledger.add("decode", "draft", self.draft.bytes_read - before)
        return tree

    def commit(self, run: _Run, tree: TokenTree, path: Sequence[int], output: StageOutput, next_token: int) -> list[int]:
        """Keeps an accepted path (nodes, the root first) and makes ``next_token`` the new root. Returns the new tokens."""
        prefix = len(run.committed) - 1
        run.cache.keep(prefix, path)
        nodes = torch.tensor(path)
        if self.draft is not None:
            self.draft.observe(tree.tokens[nodes], None if output.features is None else output.features[nodes])
        new = [*tree.tokens[nodes[1:]].tolist(), next_token]
        run.committed += new
        return new

    def decode_stage(self, run: _Run, shape: TreeShape, sampler: Sampler) -> list[int]:
        """One verify stage: drafts, verifies, commits. Returns the tokens it emits, at least one."""
        tree = self.propose(run, shape)
        output = self._stage(Stage.verify(tree, run.cache.length), run)
        path, next_token = accept(tree, output.logits, sampler, run.committed)
        new = self.commit(run, tree, path, output, next_token)
        run.speculation.record(tree.candidates, len(path) - 1, len(new))
        return new

    # -- forced decoding -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, prompt: str | Sequence[int], continuation: str | Sequence[int], tree: TreeShape | None = None) -> Score:
        """Log-probabilities of a known continuation under the policy, read where decoding would read them.

        The prompt is prefilled under the policy. Then verify stages run along the continuation: each tree is drafted as
        usual and the true next tokens are added as a path; log-probabilities are read at the true nodes.
        """
        shape = tree or TreeShape()
        ids = self.encode(prompt)
        truth = self.tokenizer(continuation, add_special_tokens=False)["input_ids"] if isinstance(continuation, str) else list(continuation)
        if not truth:
            raise UserError("the continuation is empty; give the text to score")
        self._check_context(len(ids), len(truth))
        run, logits = self.prefill(ids, len(truth) + shape.size + shape.depth + 1)
        log_probs = [float(logits.log_softmax(-1)[truth[0]])]
        run.committed.append(truth[0])
        while len(log_probs) < len(truth):
            ahead = truth[len(log_probs) : len(log_probs) + shape.depth + 1]
            drafted = self.propose(run, shape)
            forced, path = drafted.with_path(ahead[:-1])
            output = self._stage(Stage.verify(forced, run.cache.length), run)
            scores = output.logits[torch.tensor(path)].log_softmax(-1)  # [path, V]
            log_probs += [float(scores[i, token]) for i, token in enumerate(ahead)]
            found = next((i for i, node in enumerate(path) if node >= len(drafted)), len(path)) - 1
            self.commit(run, forced, path, output, ahead[-1])
            run.speculation.record(drafted.candidates, found, found + 1)
        return Score(log_probs, run.speculation, run.ledger, self.policy.to_json())

    def result(self, run: _Run, ids: Sequence[int], new: list[int], text: str, finish: str, timing: Timing) -> Generation:
        """Everything that is known about a run."""
        layers = len(self.host.blocks) * run.speculation.stages
        return Generation(
            text=text,
            token_ids=new,
            prompt_tokens=len(ids),
            finish=finish,
            model=self.name,
            draft=self.draft.name if self.draft is not None else "none",
            policy=self.policy.to_json(),
            timing=timing,
            speculation=run.speculation,
            traffic=run.ledger,
            expert_bytes_plain=self.host.plain_decode_expert_bytes,
            expert_bytes_exact_prefill=run.exact_prefill_experts,
            experts_per_layer_per_stage=run.experts_loaded / layers if layers else None,
            approximations=self.policy.approximations(),
            notes=self.notes,
        )


class TextStream:
    """Iterates over the text as it is produced; ``generation`` holds the result so far, also after an interruption."""

    def __init__(self, engine: Engine, ids: list[int], params: SamplingParams, shape: TreeShape) -> None:
        self._engine, self._ids, self._params, self._shape = engine, ids, params, shape
        self._started = time.perf_counter()
        self._first: float | None = None
        self._new: list[int] = []
        self._text = ""
        self._finish = "interrupted"
        self._ended: float | None = None
        self._run: _Run | None = None
        self._pieces = self._produce()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

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
        self._run, logits = engine.prefill(self._ids, params.max_new_tokens + self._shape.size)
        run = self._run
        token = sampler.pick(logits, run.committed, len(run.committed))
        run.committed.append(token)
        self._first = time.perf_counter()
        emitted = [token]
        while True:
            yield from self._take(emitted)
            if self._finish != "interrupted":
                self._ended = time.perf_counter()
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


def text_and_offsets(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a prompt and where each of its tokens stands in it."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if encoded["input_ids"] == list(ids):
        return text, [tuple(pair) for pair in encoded["offset_mapping"]]
    offsets, start = [], 0  # the text does not tokenise back to the same ids: decode growing prefixes instead
    for n in range(1, len(ids) + 1):
        end = len(tokenizer.decode(ids[:n], skip_special_tokens=False).rstrip("\ufffd"))
        offsets.append((start, max(start, end)))
        start = max(start, end)
    return text, offsets


def _end_tokens(host: HostedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(host.model.generation_config, "eos_token_id", None)
    ends = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return {int(end) for end in ends if end is not None}

"""The prefill and decode loop: an MoE model that answers through token trees, under a policy.

    prompt -> prefill stage -> first token
    loop: draft proposes a tree below the last token -> verify stage -> accepted path + next token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.core.traffic import Ledger, Phase
from edgexpert.encoder.encoder import ImportanceEncoder
from edgexpert.model.host import HostedModel
from edgexpert.model.running import StageOutput
from edgexpert.model.storage import calibration_text, measure_experts
from edgexpert.policy import Policy
from edgexpert.runtime.results import Generation, Score, Timing
from edgexpert.runtime.session import Run, TextStream
from edgexpert.runtime.tokens import Prompt, encode_prompt, end_tokens, text_and_offsets
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.sampling import Sampler, SamplingParams
from edgexpert.speculation.verify import accept


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
        self._kept: tuple[Run, Policy, Draft | None] | None = None  # the last text, and what its states are of
        self.end_of_sequence = end_tokens(host.model, tokenizer)

    @property
    def policy(self) -> Policy:
        return self.host.policy

    def set_policy(self, policy: Policy) -> None:
        """Decides by ``policy`` from now on; a policy that prepares weights has the experts' use measured once."""
        if policy.stores_otherwise and self.host.statistics is None:
            self.host.statistics = measure_experts(self.host, [self.encode(text) for text in calibration_text()])
        self.host.set_policy(policy)

    @property
    def encoder(self) -> ImportanceEncoder:
        """The importance encoder; the bundled one is loaded when it is first needed."""
        if self._encoder is None:
            self._encoder = ImportanceEncoder.bundled()
        return self._encoder

    # -- generating ------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, tree: TreeShape | None = None, **options: Any
    ) -> Generation:
        """Answers a prompt: text, token ids, or chat messages for the model's chat template.

        Args:
            options: fields of `SamplingParams`, and ``reuse_cache`` of `stream`, as keywords.
        """
        stream = self.stream(prompt, params, tree, **options)
        for _ in stream:
            pass
        return stream.generation

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tree: TreeShape | None = None,
        *,
        reuse_cache: bool = False,
        **options: Any,
    ) -> TextStream:
        """Like `generate`, piece by piece: iterate over the text, then read ``.generation``.

        Args:
            reuse_cache: what this prompt has in common with the text before it, if that was run with ``reuse_cache`` too,
                is not run again. For the turns of a chat.
        """
        params = replace(params or SamplingParams(), **options)
        shape = tree or TreeShape()
        ids = self.encode(prompt)
        self._check_context(len(ids), params.max_new_tokens)
        return TextStream(self, ids, params, shape, reuse_cache)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(self.tokenizer, prompt, self.name)

    def _check_context(self, prompt: int, new: int) -> None:
        if prompt + new > self.host.max_context:
            raise UserError(
                f"the prompt has {prompt} tokens and {new} new ones are asked for, but the model's context is "
                f"{self.host.max_context}; shorten the prompt or lower `max_new_tokens`"
            )

    # -- stages ----------------------------------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int], room: int, reuse_cache: bool = False) -> tuple[Run, Tensor]:
        """Runs a prompt; ``room`` is how many tokens will follow it at once or in total. Returns the run and logits [V].

        With ``reuse_cache``, the tokens that the kept text begins with too are taken from its cache. Prompt-wise expert reuse
        weighs the others within the whole prompt; those in the cache stay as they were computed.
        """
        self.host.ledger = ledger = Ledger()
        run = Run(self.host.new_cache(len(ids) + room), [], ledger)
        kept, self._kept = self._kept, None
        if reuse_cache and kept is not None and kept[1:] == (self.policy, self.draft):
            run.begin_like(kept[0], ids)
        cached = run.prompt_tokens_cached
        if self.draft is not None and cached:
            self.draft.crop(cached)
        elif self.draft is not None:
            self.draft.reset()
        tokens = torch.tensor(ids[cached:])
        importance = None
        if self.policy.prompt_wise_expert_reuse:
            importance = self._importance(ids, ledger)[cached:]
        elif self.host.recorder is not None:  # for replay; the run itself did not need the encoder
            importance = self._importance(ids, Ledger())[cached:]
        stage = Stage.prefill(tokens, cached, importance)
        output = self.run_stage(stage, run)
        if self.host.recorder is not None:
            self.host.recorder.stage(stage, (), 1, 0)
        run.exact_prefill_experts = sum(
            exact.count * block.shape.expert for exact, block in zip(output.exact, self.host.blocks, strict=True)
        )
        run.committed = list(ids)
        self._observe(run, "prefill", tokens, output.features)
        return run, output.logits[-1]

    def keep(self, run: Run) -> None:
        """Keeps a finished text's cache for a prompt that begins like it."""
        self._kept = run, self.policy, self.draft

    def run_stage(self, stage: Stage, run: Run) -> StageOutput:
        """One stage through the target, with the features that the draft wants."""
        fused = self.draft.fused_layers if self.draft is not None else ()
        output = self.host.run(stage, run.cache, fused)
        if stage.kind == "verify":
            run.experts_loaded += output.experts_loaded
        return output

    def _importance(self, ids: Sequence[int], ledger: Ledger) -> Tensor:
        """Weight of each prompt token, float32 [T]; the encoder's bytes go into ``ledger``."""
        with ledger.reading("prefill", "encoder", self.encoder):
            attention = self.encoder.weigh(*text_and_offsets(self.tokenizer, ids))
        return self.policy.weigh_prompt(attention)

    def propose(self, run: Run, shape: TreeShape) -> TokenTree:
        """A tree below the last token, no larger than the cache has room for."""
        room = run.cache.capacity - run.cache.length - 1
        if self.draft is None or min(shape.size, room) < 1:
            return TokenTree.of_root(run.root)
        with run.ledger.reading("decode", "draft", self.draft):
            return self.draft.propose(run.root, replace(shape, size=min(shape.size, room)))

    def _observe(self, run: Run, phase: Phase, tokens: Tensor, features: Tensor | None) -> None:
        """Shows the draft what entered the target's cache."""
        if self.draft is not None:
            with run.ledger.reading(phase, "draft", self.draft):
                self.draft.observe(tokens, features)

    def commit(self, run: Run, stage: Stage, path: Sequence[int], output: StageOutput, next_token: int) -> list[int]:
        """Keeps an accepted path (nodes, the root first) and makes ``next_token`` the new root. Returns the new tokens."""
        tree = stage.tree
        assert tree is not None
        prefix = len(run.committed) - 1
        run.cache.keep(prefix, path)
        nodes = torch.tensor(path)
        self._observe(run, "decode", tree.tokens[nodes], None if output.features is None else output.features[nodes])
        new = [*tree.tokens[nodes[1:]].tolist(), next_token]
        run.committed += new
        if self.host.recorder is not None:
            reads = self.draft is not None and self.draft.bytes_read > 0
            self.host.recorder.stage(stage, path, len(new), int(tree.depth.max()) if reads else 0)  # a pass for each level
        return new

    def decode_stage(self, run: Run, shape: TreeShape, sampler: Sampler) -> list[int]:
        """One verify stage: drafts, verifies, commits. Returns the tokens it emits, at least one."""
        tree = self.propose(run, shape)
        stage = Stage.verify(tree, run.cache.length)
        output = self.run_stage(stage, run)
        path, next_token = accept(tree, output.logits, sampler, run.committed)
        new = self.commit(run, stage, path, output, next_token)
        run.speculation.record(tree.candidates, len(path) - 1, len(new))
        return new

    # -- forced decoding -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(self, prompt: str | Sequence[int], continuation: str | Sequence[int], tree: TreeShape | None = None) -> Score:
        """Forced decoding: log-probabilities of a known continuation under the policy, read inside token trees.

        The prompt is prefilled under the policy. Then verify stages run along the continuation: each tree is drafted as
        usual, the true next tokens are added as a path, and log-probabilities are read at all true nodes, up to ``depth + 1`` a
        stage: also at those that the draft did not think of.
        """
        shape = tree or TreeShape()
        ids = self.encode(prompt)
        if isinstance(continuation, str):
            continuation = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
        truth: list[int] = list(continuation)  # type: ignore[arg-type]
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
            stage = Stage.verify(forced, run.cache.length)
            output = self.run_stage(stage, run)
            scores = output.logits[torch.tensor(path)].log_softmax(-1)  # [path, V]
            log_probs += [float(scores[i, token]) for i, token in enumerate(ahead)]
            found = next((i for i, node in enumerate(path) if node >= len(drafted)), len(path)) - 1
            self.commit(run, stage, path, output, ahead[-1])
            run.speculation.record(drafted.candidates, found, found + 1)
        return Score(log_probs, run.speculation, run.ledger, self.policy.to_json())

    def result(self, run: Run, ids: Sequence[int], new: list[int], text: str, finish: str, timing: Timing) -> Generation:
        """Everything that is known about a run."""
        layers = len(self.host.blocks) * run.speculation.stages
        return Generation(
            text=text,
            token_ids=new,
            prompt_tokens=len(ids),
            prompt_tokens_cached=run.prompt_tokens_cached,
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

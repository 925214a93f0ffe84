"""An MoE model that answers through token trees, under a policy. It owns weights; a `Session` owns a text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from edgexpert.core.errors import UserError
from edgexpert.encoder.encoder import ImportanceEncoder
from edgexpert.model.host import HostedModel
from edgexpert.model.measure import calibration_text, measure_experts
from edgexpert.model.recorder import Recorder
from edgexpert.policy import Policy, policy_named
from edgexpert.runtime.defaults import sampling_defaults
from edgexpert.runtime.results import Generation, Score
from edgexpert.runtime.session import Session
from edgexpert.runtime.stream import TextStream
from edgexpert.runtime.tokens import Prompt, encode_prompt, end_tokens, is_batch, text_and_offsets
from edgexpert.speculation.controller import Controller, Experience
from edgexpert.speculation.draft import Draft, TreeShape
from edgexpert.speculation.sampling import Sampler, SamplingParams
from edgexpert.speculation.verify import ForcedVerifier, SamplingVerifier, Verifier

Tree = TreeShape | Literal["auto"]
"""The shape of all trees of a text, or ``auto``: chosen stage by stage from what stages cost here and what they bring."""


class Engine:
    """An MoE model with a draft and a policy, for any number of texts at a time. Made by `edgexpert.load`.

    Attributes:
        policy: decides texts that name no policy of their own; assign through `set_policy`. Texts that have begun keep theirs.
        draft: drafts for texts that begin from now on; None for plain decoding.
        sampling: what the checkpoint's generation_config.json wants, such as its temperature; options of a call go before it.
    """

    def __init__(
        self,
        host: HostedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        policy: str | Policy = "exact",
        draft: Draft | None = None,
        encoder: ImportanceEncoder | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.tokenizer = tokenizer
        self.name = name
        self.draft = draft
        self.sampling, ignored = sampling_defaults(host.model.generation_config)
        self.notes = [*notes, *ignored]
        self.end_of_sequence = end_tokens(host.model, tokenizer)
        self._encoder = encoder
        self._experience: dict[str, Experience] = {}
        self._preparing = threading.Lock()  # the encoder is loaded, and the experts' use measured, by one thread alone
        self.set_policy(policy)

    def set_policy(self, policy: str | Policy) -> None:
        """Decides by ``policy`` the texts that begin from now on."""
        self.policy = self.resolve(policy)

    def resolve(self, policy: str | Policy) -> Policy:
        """The policy, ready for this model: what it needs to know of the model or of a prompt is loaded or measured first.

        Raises:
            UserError: there is no such policy, or it does not suit this model.
        """
        chosen = policy_named(policy) if isinstance(policy, str) else policy
        if not isinstance(chosen, Policy):
            raise UserError(f"`policy` must be a policy or the name of one, not {policy!r}")
        with self._preparing:
            if chosen.stores_otherwise and self.host.statistics is None:
                self.host.statistics = measure_experts(self.host, [self.encode(text) for text in calibration_text()])
        resolved = self.host.resolve(chosen)
        if resolved.needs_importance:
            _ = self.encoder
        return resolved

    @property
    def encoder(self) -> ImportanceEncoder:
        """The importance encoder; the bundled one is loaded when it is first needed."""
        with self._preparing:
            if self._encoder is None:
                self._encoder = ImportanceEncoder.bundled()
            return self._encoder

    # -- generating ------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = ..., tree: Tree = ..., **options: Any
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = ..., tree: Tree = ..., **options: Any
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None, tree: Tree = "auto",
        n: int = 1, **options: Any,
    ) -> Generation | list[Generation]:
        """Answers a prompt: text, token ids, or chat messages for the model's chat template. Of a list of prompts, a list.

        Args:
            n: so many answers of each prompt, which is run once; a list even for one prompt. The seeds are those from
                `SamplingParams.seed` up.
            options: fields of `SamplingParams`, and ``policy``, ``after`` and ``recorder`` of `stream`, as keywords.
        """
        if not isinstance(n, int) or n < 1:
            raise UserError(f"`n` must be a whole number from 1 up, not {n!r}")
        if not is_batch(prompt):
            answers = self._answers(prompt, params, tree, n, options)  # type: ignore[arg-type]
            return answers[0] if n == 1 else answers
        return [answer for one in prompt for answer in self._answers(one, params, tree, n, options)]  # type: ignore[arg-type]

    def _answers(
        self, prompt: Prompt, params: SamplingParams | None, tree: Tree, n: int, options: dict[str, Any]
    ) -> list[Generation]:
        answers: list[Generation] = []
        stream: TextStream | None = None
        for _ in range(n):
            if stream is not None:
                options = {**options, "seed": stream.params.seed + 1, "after": stream}
            stream = self.stream(prompt, params, tree, **options)
            for _piece in stream:
                pass
            answers.append(stream.generation)
        return answers

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tree: Tree = "auto",
        *,
        policy: str | Policy | None = None,
        after: TextStream | None = None,
        recorder: Recorder | None = None,
        verifier: Verifier | None = None,
        **options: Any,
    ) -> TextStream:
        """Like `generate`, piece by piece: iterate over the text, then read ``.generation``.

        Args:
            policy: decides this text; the engine's unless given.
            after: an earlier stream; what this prompt has in common with its text is not run again. For the turns of a chat.
            recorder: is told of every layer and stage.
            verifier: says which tokens the text gets; the target itself, by the sampling parameters, unless given.
            options: fields of `SamplingParams` as keywords.
        """
        params = self._params(params, options)
        ids = self.encode(prompt)
        self._check_context(len(ids), params.max_new_tokens)
        return TextStream(
            self.session(tree, policy, recorder), ids, params, verifier or SamplingVerifier(Sampler(params)), self._decode,
            self.end_of_sequence, after=after, name=self.name, notes=self.notes,
        )

    def _params(self, params: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        known = [field.name for field in fields(SamplingParams)]
        unknown = next((name for name in options if name not in known), None)
        if unknown is not None:
            raise UserError(f"there is no option {unknown!r}; there are {', '.join(known)}")
        if params is not None and not isinstance(params, SamplingParams):
            raise UserError(f"`params` must be a SamplingParams, not {params!r}")
        return replace(params or self.sampling, **options)

    def session(
        self, tree: Tree = "auto", policy: str | Policy | None = None, recorder: Recorder | None = None
    ) -> Session:
        """The state of a text that begins, to be advanced step by step; `stream` does that for you."""
        if tree != "auto" and not isinstance(tree, TreeShape):
            raise UserError(f"`tree` must be 'auto' or a TreeShape, such as TreeShape(size=64), not {tree!r}")
        chosen = self.policy if policy is None else self.resolve(policy)
        shape = self._controller(chosen) if tree == "auto" else tree
        return Session(self.host, chosen, self.draft, shape, self._weigh, recorder)

    def _controller(self, policy: Policy) -> Controller | TreeShape:
        """Chooses the trees of a text that begins, with what earlier ones taught."""
        if self.draft is None:
            return TreeShape(0)
        key = f"{policy.to_json()} {self.draft.name}"
        return Controller(self._experience.setdefault(key, Experience()))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return encode_prompt(self.tokenizer, prompt, self.name, self.host.vocab_size)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _weigh(self, ids: Sequence[int]) -> tuple[Tensor, float]:
        encoder = self.encoder
        with self._preparing:
            before = encoder.bytes_read
            return encoder.weigh(*text_and_offsets(self.tokenizer, ids)), encoder.bytes_read - before

    def _check_context(self, prompt: int, new: int) -> None:
        if prompt + new > self.host.max_context:
            raise UserError(
                f"the prompt has {prompt} tokens and {new} new ones are asked for, but the model's context is "
                f"{self.host.max_context}; shorten the prompt or lower `max_new_tokens`"
            )

    # -- forced decoding -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score(
        self, prompt: Prompt, continuation: str | Sequence[int], tree: TreeShape | None = None, policy: str | Policy | None = None
    ) -> Score:
        """Forced decoding: log-probabilities of a known continuation under the policy, read inside token trees.

        The prompt is prefilled under the policy. Then verify stages run along the continuation: each tree is drafted as
        usual, the true next tokens are added as a path, and log-probabilities are read at all true nodes, up to ``depth + 1`` a
        stage: also at those that the draft did not think of.
        """
        ids = self.encode(prompt)
        if isinstance(continuation, str):
            continuation = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
        if not len(continuation):
            raise UserError("the continuation is empty; give the text to score")
        self._check_context(len(ids), len(continuation))
        session = self.session(TreeShape() if tree is None else tree, policy)
        verifier = ForcedVerifier(continuation, session.tree.depth)  # type: ignore[arg-type]
        session.begin(verifier, ids, len(continuation))
        while not verifier.finished:
            session.step(verifier)
        return Score(verifier.log_probs, session.speculation, session.ledger, session.policy.to_json())

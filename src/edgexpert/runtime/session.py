"""One text while it is decoded: all state that belongs to it, and the loop that every way of decoding runs.

    prompt -> prefill stage -> first token
    step: draft proposes a tree below the last token -> verify stage -> accepted path + next token
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.core.traffic import Ledger, Phase
from edgexpert.model.cache import TreeCache
from edgexpert.model.finite import explain_not_finite
from edgexpert.model.host import HostedModel
from edgexpert.model.recorder import Recorder
from edgexpert.model.running import StageOutput
from edgexpert.policy import Policy
from edgexpert.runtime.results import Speculation
from edgexpert.speculation.controller import LARGEST, Controller
from edgexpert.speculation.draft import Draft, DraftState, TreeShape
from edgexpert.speculation.verify import Verifier

Weigh = Callable[[Sequence[int]], tuple[Tensor, float]]
"""CLS attention that each token of a prompt receives, float32 [T], and the bytes that were read to know it."""


class Session:
    """One text: its cache, ledger, policy, draft state and recorder. What it shares with others are weights alone.

    Sessions of one engine can be advanced in turns and from several threads; each gives what it would give alone.

    Attributes:
        policy: resolved for the model; decides all stages of this text.
        tree: the shape of all trees, or of the largest that the controller may choose.
        committed: tokens in the cache, and behind them the root of the next tree.
        prompt_tokens_cached: how many tokens of the prompt came from another session's cache.
        exact_prefill_experts: expert bytes that the router alone would have loaded in prefill.
        experts_loaded: experts that the MoE layers loaded in verify stages, all together.
    """

    def __init__(
        self, host: HostedModel, policy: Policy, draft: Draft | None, tree: TreeShape | Controller, weigh: Weigh,
        recorder: Recorder | None = None,
    ) -> None:
        self.host, self.policy, self.draft, self.recorder = host, policy, draft, recorder
        self._controller = tree if isinstance(tree, Controller) else None
        self.tree = LARGEST if isinstance(tree, Controller) else tree
        self.ledger = Ledger()
        self.speculation = Speculation("fixed" if self._controller is None else "auto")
        self.committed: list[int] = []
        self.prompt_tokens_cached = 0
        self.exact_prefill_experts = 0.0
        self.experts_loaded = 0
        self._weigh = weigh
        self._whole = False  # not in the middle of a stage, where it may have been interrupted
        self._state: DraftState | None = None if draft is None else draft.start()
        self._cache: TreeCache = host.new_cache(0)

    @property
    def experts_per_layer_per_stage(self) -> float | None:
        """Mean number of experts that an MoE layer loaded in a verify stage; None before the first."""
        layers = len(self.host.blocks) * self.speculation.stages
        return self.experts_loaded / layers if layers else None

    def begin(self, verifier: Verifier, ids: Sequence[int], new: int, after: Session | None = None) -> int:
        """Runs a prompt. Returns the first token, which is the root of the first tree.

        Args:
            new: tokens that will follow.
            after: what the prompt has in common with this session's text is taken from its cache, if policy and draft are the
                same. Prompt-wise expert reuse weighs the others within the whole prompt; those in the cache stay as they were
                computed.
        """
        room = 0 if self.draft is None else self.tree.size + self.tree.depth + 1  # forced decoding adds a path to a full tree
        self._cache = self.host.new_cache(len(ids) + new + room)
        if after is not None and (after.policy, after.draft) == (self.policy, self.draft):
            self._begin_like(after, ids)
        cached = self.prompt_tokens_cached
        stage = Stage.prefill(torch.tensor(ids[cached:]), cached, self._importance(ids, cached))
        output = self._run(stage)
        if self.recorder is not None:
            self.recorder.stage(stage, (), 1, 0)
        pairs = zip(output.exact, self.host.blocks, strict=True)
        self.exact_prefill_experts = sum(exact.count * block.shape.expert for exact, block in pairs)
        self._observe("prefill", stage.tokens, output.features)
        self._check_finite(output.logits[-1:])
        first = verifier.begin(output.logits[-1], ids)
        self.committed, self._whole = [*ids, first], True
        return first

    def _begin_like(self, earlier: Session, ids: Sequence[int]) -> None:
        """Takes over what the prompt has in common with an earlier text.

        One token fewer than they have in common: the last one is run again, to have its logits, and so that the draft meets
        it together with the target's features.
        """
        if not earlier._whole:
            return
        pairs = zip(ids, earlier.committed, strict=False)
        common = next((i for i, (new, old) in enumerate(pairs) if new != old), min(len(ids), len(earlier.committed)))
        cached = self.prompt_tokens_cached = max(0, common - 1)
        self._cache.take(earlier._cache, cached)
        if earlier._state is not None and cached:
            self._state = earlier._state.fork(cached)

    def _importance(self, ids: Sequence[int], cached: int) -> Tensor | None:
        """Importance of the prompt's tokens behind the cached ones, for a policy that needs it, and for the replay of any."""
        needed = self.policy.needs_importance
        if not needed and self.recorder is None:
            return None
        attention, read = self._weigh(ids)
        if needed:
            self.ledger.add("prefill", "encoder", read)
        return self.policy.weigh_prompt(attention)[cached:]

    def propose(self) -> TokenTree:
        """A tree below the last token, no larger than the cache has room for; the root alone where none is to be drafted."""
        shape = self.tree if self._controller is None else self._controller.choose()
        room = self._cache.capacity - self._cache.length - 1
        root = self.committed[-1]
        if self._state is None or shape is None or min(shape.size, room) < 1:
            return TokenTree.of_root(root)
        with self.ledger.reading("decode", "draft", self._state):
            return self._state.propose(root, replace(shape, size=min(shape.size, room)))

    def step(self, verifier: Verifier) -> list[int]:
        """One verify stage: drafts, verifies, commits. Returns the tokens that it emits, at least one."""
        self._whole = False
        started = time.perf_counter()
        drafted = self.propose()
        tree = verifier.extend(drafted)
        stage = Stage.verify(tree, self._cache.length)
        output = self._run(stage)
        self.experts_loaded += output.experts_loaded
        path, next_token = verifier.accept(tree, output.logits, self.committed)
        new = self._commit(stage, path, output, next_token)
        accepted = sum(node < len(drafted) for node in path) - 1
        self.speculation.record(drafted.candidates, accepted, accepted + 1)
        if self._controller is not None:
            self._controller.record(accepted, time.perf_counter() - started)
        self._whole = True
        return new

    def _run(self, stage: Stage) -> StageOutput:
        """One stage through the target, with the features that the draft wants."""
        fused = self.draft.fused_layers if self.draft is not None else ()
        output = self.host.run(stage, self._cache, self.policy, fused, self.recorder)
        self.ledger.add_all("prefill" if stage.tree is None else "decode", output.traffic)
        return output

    def _commit(self, stage: Stage, path: Sequence[int], output: StageOutput, next_token: int) -> list[int]:
        """Keeps an accepted path (nodes, the root first) and makes ``next_token`` the new root. Returns the new tokens."""
        tree, nodes = stage.tree, torch.tensor(path)
        assert tree is not None
        self._check_finite(output.logits[nodes])
        self._cache.keep(len(self.committed) - 1, path)
        self._observe("decode", tree.tokens[nodes], None if output.features is None else output.features[nodes])
        new = [*tree.tokens[nodes[1:]].tolist(), next_token]
        self.committed += new
        if self.recorder is not None:
            reads = self._state is not None and self._state.bytes_read > 0
            self.recorder.stage(stage, path, len(new), int(tree.depth.max()) if reads else 0)  # a pass for each level
        return new

    def _check_finite(self, logits: Tensor) -> None:
        if not (logits.amax(1) < torch.inf).all():  # also false for NaN
            raise UserError(explain_not_finite(self.host))

    def _observe(self, phase: Phase, tokens: Tensor, features: Tensor | None) -> None:
        """Shows the draft what entered the target's cache."""
        if self._state is not None:
            with self.ledger.reading(phase, "draft", self._state):
                self._state.observe(tokens, features)

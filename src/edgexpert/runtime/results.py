"""What a run gives back: text, statistics and traffic, as one object that prints and serialises."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from edgexpert.core.traffic import Ledger, Part
from edgexpert.speculation.sampling import SamplingParams, TokenLogprob


@dataclass
class Timing:
    """Seconds since the text began.

    Attributes:
        total_s: until the last token.
        token_s: until each token was there; the tokens of one stage come together.
    """

    total_s: float = 0.0
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_s[0] if self.token_s else self.total_s

    @property
    def tpot_s(self) -> float | None:
        """Mean over the tokens after the first; None when there is only one."""
        return (self.total_s - self.ttft_s) / (len(self.token_s) - 1) if len(self.token_s) > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {"ttft_s": self.ttft_s, "total_s": self.total_s, "tpot_s": self.tpot_s, "token_s": self.token_s}


@dataclass
class Speculation:
    """What drafting brought.

    Attributes:
        mode: whether all trees had one shape, or each was chosen from what stages cost and bring.
        stages: verify stages.
        drafted: candidates that went through the target.
        emitted: tokens that verify stages gave, each stage's own token included.
        accepted_per_depth: for each depth from 1, how many stages accepted a candidate there.
        widths: how many stages had so many tokens: the candidates and their root.
    """

    mode: Literal["auto", "fixed"] = "fixed"
    stages: int = 0
    drafted: int = 0
    emitted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    widths: dict[int, int] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify stage, the target's own included."""
        return self.emitted / self.stages if self.stages else None

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        self.stages += 1
        self.drafted += drafted
        self.emitted += emitted
        self.widths[drafted + 1] = self.widths.get(drafted + 1, 0) + 1
        self.accepted_per_depth += [0] * (accepted - len(self.accepted_per_depth))
        for depth in range(accepted):
            self.accepted_per_depth[depth] += 1

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "stages": self.stages,
            "widths": {str(width): count for width, count in sorted(self.widths.items())},
            "acceptance_length": self.acceptance_length,
            "accepted_per_depth": self.accepted_per_depth,
            "drafted": self.drafted,
        }


@dataclass
class Generation:
    """The result of one generation, complete or interrupted.

    Attributes:
        prompt_tokens: length of the prompt.
        prompt_tokens_cached: how many of them were in the cache, since the text before began with them too.
        token_ids: new tokens, an end-of-sequence token included if one was emitted.
        finish: why it ended: ``length``, ``eos``, ``stop`` or ``interrupted``.
        sampling: how tokens were picked.
        logprobs: of the new tokens, where `SamplingParams.logprobs` asks for them.
        expert_bytes_plain: expert bytes that plain exact decoding loads for every token of this model.
        expert_bytes_exact_prefill: expert bytes that the router alone would have loaded in prefill, for the same states.
        experts_per_layer_per_stage: mean number of experts that an MoE layer loaded in a verify stage.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    prompt_tokens_cached: int
    finish: str
    model: str
    draft: str
    policy: dict[str, Any]
    sampling: SamplingParams
    timing: Timing
    speculation: Speculation
    traffic: Ledger
    expert_bytes_plain: float
    expert_bytes_exact_prefill: float
    experts_per_layer_per_stage: float | None
    approximations: list[str]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def expert_bytes_per_token(self) -> float | None:
        """Expert bytes of the decode stages for each token that they emitted."""
        return self.traffic.decode["experts"] / self.speculation.emitted if self.speculation.emitted else None

    @property
    def prefill_expert_bytes_per_token(self) -> float:
        """Expert bytes of prefill for each new token."""
        return self.traffic.prefill["experts"] / max(1, self.new_tokens)

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        traffic: dict[str, dict[Part, int]] = self.traffic.to_json()
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.prompt_tokens_cached,
            "finish": self.finish,
            "policy": self.policy,
            "model": self.model,
            "draft": self.draft,
            "sampling": asdict(self.sampling),
            "timing": self.timing.to_json(),
            "speculation": self.speculation.to_json(),
            "traffic": traffic,
            "expert_bytes_per_token": self.expert_bytes_per_token,
            "expert_bytes_per_token_plain": self.expert_bytes_plain,
            "expert_bytes_exact_prefill": self.expert_bytes_exact_prefill,
            "experts_per_layer_per_stage": self.experts_per_layer_per_stage,
            "approximations": self.approximations,
            "logprobs": [asdict(logprob) for logprob in self.logprobs],
            "notes": self.notes,
        }


@dataclass
class Score:
    """Forced decoding of a known continuation: what a policy costs where it acts.

    Attributes:
        log_probs: natural-log probability of each continuation token.
    """

    log_probs: list[float]
    speculation: Speculation
    traffic: Ledger
    policy: dict[str, Any]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.log_probs) / len(self.log_probs))

    @property
    def expert_bytes_per_token(self) -> float:
        return self.traffic.decode["experts"] / len(self.log_probs)

"""What determines a training, as data: the recipes of the models that come with the package, and those of drafts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import torch

from edgexpert.core.errors import UserError
from edgexpert.training.capture import Captured


@dataclass(frozen=True)
class Phase:
    """A stretch of training: how many steps, on which shares of the domains, with sequences of which length.

    Attributes:
        balance: weight of the load-balancing loss.
        peak: a phase with a peak begins a new warm-up and cosine of the learning rate, which lasts until the next such phase.
        width: the experts' width from here on: wider ones are split into two (`growth.py`) as the phase begins.
    """

    steps: int
    shares: Mapping[str, float]
    length: int
    balance: float = 0.004
    peak: float | None = None
    width: int | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained model, its corpus apart."""

    domains: Mapping[str, Sequence[str]]
    config: Mapping[str, Any]
    phases: Sequence[Phase]
    tokens_per_step: int = 4096
    warmup: int = 150
    final_rate: float = 0.05  # of the peak
    weight_decay: float = 0.1
    seed: int = 1

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences; held-out windows have it throughout, so that their losses compare."""
        return max(phase.length for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.phases[-1]


LATER = {"simple": 0.45, "tales": 0.12, "books": 0.43}
STORIES = Recipe(
    domains={
        "simple": [
            "tinystories_sample.txt",
            "synthetic_fables_permissive.txt",
            "african_storybook_en.txt",
            "pratham_storyweaver_en.txt",
        ],
        "tales": ["fairytaleqa_stories.txt", "grimm_fairy_tales.txt", "aesop_for_children.txt"],
        "books": ["gutenberg_simple_1.txt", "gutenberg_simple_2.txt"],
    },
    config=dict(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        moe_intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    ),
    phases=[
        Phase(2100, {"simple": 0.5, "tales": 0.15, "books": 0.35}, 512, peak=2e-3),
        Phase(700, {"simple": 0.75, "tales": 0.15, "books": 0.1}, 1024),
        # Trained on with a weaker balance, so that one text may keep to fewer experts, as in models of many domains.
        Phase(400, {"simple": 0.65, "tales": 0.2, "books": 0.15}, 1024, balance=0.0005, peak=1e-3),
        # 64 experts of which a token takes 4 become 128 of which it takes 8, as in the larger Qwen3-MoE models.
        Phase(1300, LATER, 256, balance=0.001, peak=1.5e-3, width=64),
        Phase(600, LATER, 512, balance=0.001),
        Phase(100, LATER, 1024, balance=0.001),
    ],
)
DENSE = replace(
    STORIES,
    config={**STORIES.config, "mlp_only_layers": list(range(8)), "intermediate_size": 4 * 96},
    phases=STORIES.phases[:3],  # a dense layer has no experts to split
)
"""The dense twin: as many active parameters, the same batches and schedule; stopped early, it shows what the experts bring."""
LITTLE = replace(
    STORIES,
    config={
        **STORIES.config, "hidden_size": 128, "num_hidden_layers": 2, "mlp_only_layers": [0, 1], "intermediate_size": 384,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    phases=[Phase(500, {"simple": 0.7, "tales": 0.15, "books": 0.15}, 256, peak=3e-3)],
)
"""A small dense model with the same tokenizer, as the little one beside `stories` in benchmarks/frameworks.py."""
RECIPES = {"stories": STORIES, "stories-dense": DENSE, "stories-little": LITTLE}


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine to ``final_rate`` of the peak; anew from each phase that has a peak."""
    starts = np.cumsum([0, *(phase.steps for phase in recipe.phases)]).tolist()
    cycles = [(start, phase.peak) for start, phase in zip(starts, recipe.phases, strict=False) if phase.peak is not None]
    start, peak = next(cycle for cycle in reversed(cycles) if cycle[0] <= step)
    end = next((later for later, _ in cycles if later > start), recipe.steps)
    warmup = min(recipe.warmup, (end - start) // 10)
    return warm_cosine(step - start, end - start, warmup, peak, recipe.final_rate)


def warm_cosine(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """A linear warm-up to ``peak``, then a cosine that ends at ``final`` of it after ``steps`` steps."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that determines a trained draft, target and captured states apart.

    Attributes:
        ttt: steps of the training-time test; for Medusa, the number of heads.
        learning_rate: peak of a cosine that ends at 5 % of it, after a linear warm-up of ``warmup`` steps.
        step_decay: step i weighs ``step_decay ** i`` (0.8 in the official code).
        draft_vocab: how many tokens the draft can propose; None for all of the target's.
        intermediate_size: None for three times the hidden size.
        num_attention_heads, num_key_value_heads: None for as many as the target's attention heads.
    """

    steps: int = 2000
    ttt: int = 7
    learning_rate: float = 1e-3
    warmup: int = 100
    tokens_per_batch: int = 4096
    step_decay: float = 0.8
    draft_vocab: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "ttt", "learning_rate", "tokens_per_batch", "step_decay"):
            if not 0 < getattr(self, name) < inf:
                raise UserError(f"`{name}` must be positive and finite, not {getattr(self, name)}")
        if self.learning_rate > 1:
            raise UserError(f"`learning_rate` {self.learning_rate:g} moves weights by more than 1 a step; give one below 0.1")

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return warm_cosine(step, self.steps, self.warmup, self.learning_rate, final=0.05)

    def sequences(self, step: int, captured: Captured) -> list[int]:
        """Which sequences one step learns: the next ones of an endless row of permutations."""
        size = max(1, self.tokens_per_batch // captured.longest)
        chosen = []
        for place in range(step * size, (step + 1) * size):
            epoch, index = divmod(place, len(captured))
            order = torch.randperm(len(captured), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
            chosen.append(int(order[index]))
        return chosen

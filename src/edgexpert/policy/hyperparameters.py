"""The numbers that tune the techniques: Table III of the paper, a choice for every other model, and the rules they obey."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from edgexpert.core.errors import UserError


@dataclass(frozen=True)
class Hyperparameters:
    """Attributes:
        k_min, n_min: a minor token chooses ``n_min`` experts among its best ``k_min``.
        k_tri, n_tri: the same for a trivial token.
        theta1, theta2: a token is major from weight ``theta1`` up, minor from ``theta2`` up, trivial below.
        selection_ratio: the paper's ``sr``; a channel is loaded when its salience exceeds this share of its channel score.
        keep_channels: share of a token's importance that fine pruning keeps.
        keep_mass: share of the tree's path probability (root included) whose experts coarse pruning keeps.
    """

    k_min: int
    n_min: int
    k_tri: int
    n_tri: int
    theta1: float
    theta2: float
    selection_ratio: float
    keep_channels: float = 0.9
    keep_mass: float = 0.95

    def check(self, num_experts: int, top_k: int) -> None:
        """Raises UserError naming the first rule that is broken, for a model that routes to ``top_k`` of ``num_experts``."""
        rules = [
            (self.k_min >= top_k, f"`k_min` ({self.k_min}) must be at least the model's top-k ({top_k})"),
            (self.k_tri >= self.k_min, f"`k_tri` ({self.k_tri}) must be at least `k_min` ({self.k_min})"),
            (num_experts >= self.k_tri, f"`k_tri` ({self.k_tri}) must be at most the model's experts ({num_experts})"),
            (top_k >= self.n_min, f"`n_min` ({self.n_min}) must be at most the model's top-k ({top_k})"),
            (self.n_min >= self.n_tri, f"`n_tri` ({self.n_tri}) must be at most `n_min` ({self.n_min})"),
            (self.n_tri >= 1, f"`n_tri` ({self.n_tri}) must be at least 1"),
            (self.theta1 > self.theta2, f"`theta1` ({self.theta1}) must be above `theta2` ({self.theta2})"),
            (self.theta2 >= 0, f"`theta2` ({self.theta2}) must not be negative"),
            # At 1 not even a channel that every token wants would pass, since its salience equals its channel score.
            (0 <= self.selection_ratio < 1, f"`selection_ratio` ({self.selection_ratio}) must be from 0 to below 1"),
            (0 < self.keep_channels <= 1, f"`keep_channels` ({self.keep_channels}) must be above 0 and at most 1"),
            (0 < self.keep_mass <= 1, f"`keep_mass` ({self.keep_mass}) must be above 0 and at most 1"),
        ]
        for holds, rule in rules:
            if not holds:
                raise UserError(rule)


TABLE_III: dict[tuple[str, int, int], Hyperparameters] = {
    ("granitemoe", 32, 8): Hyperparameters(8, 7, 10, 6, theta1=0.65, theta2=0.45, selection_ratio=0.70),
    ("olmoe", 64, 8): Hyperparameters(10, 6, 12, 4, theta1=0.80, theta2=0.40, selection_ratio=0.90),
    # The paper prints a top-k of 8, which counts the two shared experts: six are routed.
    ("deepseek_v2", 64, 6): Hyperparameters(6, 5, 8, 3, theta1=0.55, theta2=0.30, selection_ratio=0.90),
    ("qwen3_moe", 128, 8): Hyperparameters(10, 6, 12, 4, theta1=0.80, theta2=0.55, selection_ratio=0.90),
}
"""The paper's four models, by model type, number of routed experts and routed top-k."""


def choose_hyperparameters(model_type: str, num_experts: int, top_k: int) -> Hyperparameters:
    """Table III for the paper's own four models; for any other, OLMoE's and Qwen3's ratios to the top-k.

    Those two rows agree on 1.25, 0.75, 1.5 and 0.5 times the top-k, and alone obey the strict order of section IV-B.
    Candidates are rounded up and routed experts down, so that no rounding undoes the saving; theta and sr are OLMoE's.
    """
    if row := TABLE_III.get((model_type, num_experts, top_k)):
        return row
    return Hyperparameters(
        k_min=min(ceil(1.25 * top_k), num_experts),
        n_min=max(floor(0.75 * top_k), 1),
        k_tri=min(ceil(1.5 * top_k), num_experts),
        n_tri=max(floor(0.5 * top_k), 1),
        theta1=0.80,
        theta2=0.40,
        selection_ratio=0.90,
    )

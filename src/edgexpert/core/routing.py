"""What a router says and what is chosen from it: scores, the experts of each token, and channels of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """A router's opinion of every expert, in the form that all policies see.

    Attributes:
        choice: what the router ranks experts by, float32 [T, E]; -inf where its rules forbid an expert (group limits).
        gate: weight of each expert before renormalisation, float32 [T, E], never negative.
        normalise: whether the weights of a token's experts are divided by their sum.
        scale: factor on the weights after that.
    """

    choice: Tensor
    gate: Tensor
    normalise: bool
    scale: float = 1.0

    def weights(self, experts: Tensor) -> Tensor:
        """Routing weights of chosen experts as the model itself would compute them, [T, k]; 0 where there is no expert.

        Args:
            experts: int64 [T, k]; E or above stands for no expert.
        """
        chosen = experts < self.gate.shape[1]
        weights = self.gate.gather(1, experts.clamp(max=self.gate.shape[1] - 1)) * chosen
        if self.normalise:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
        return weights * self.scale


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token computes with.

    Attributes:
        experts: int64 [T, k]; ``num_experts`` stands for no expert.
        weights: [T, k]; 0 where there is no expert.
        complete: known to have no gaps, as every router's own.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    complete: bool = False

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some token lacks some of its k experts."""
        return not self.complete and int(self.experts.max()) >= self.num_experts

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The (token, slot) of every routed expert, sorted by token: two int64 tensors [P]."""
        token, slot = torch.nonzero(self.experts < self.num_experts, as_tuple=True)
        return token, slot

    @cached_property
    def pair_token(self) -> Tensor:
        """Token of each pair, ascending, int64 [P]."""
        if self.has_gaps:
            return self.pairs[0]
        tokens, k = self.experts.shape
        return torch.arange(tokens * k, device=self.experts.device) // k

    @cached_property
    def pair_expert(self) -> Tensor:
        """Expert of each pair, int64 [P]."""
        return self.experts[self.pairs] if self.has_gaps else self.experts.flatten()

    @cached_property
    def pair_weight(self) -> Tensor:
        """Routing weight of each pair, [P]."""
        return self.weights[self.pairs] if self.has_gaps else self.weights.flatten()

    @cached_property
    def count(self) -> int:
        """How many experts are loaded."""
        return self.experts.shape[1] if self.complete and len(self.experts) == 1 else len(self.loaded)

    @cached_property
    def loaded(self) -> Tensor:
        """Experts that some token computes with, ascending, int64 [U]."""
        experts: Tensor = torch.unique(self.pair_expert)
        return experts


@dataclass(frozen=True, eq=False)
class ChannelSelection:
    """Which input channels of one matrix (gate/up, or down) are loaded, and which of them a token computes on.

    Attributes:
        loaded: bool [E, C]; rows of experts that are not routed are False.
        compute: bool [P, C], for each pair of the routing; None where every pair computes on all that its expert loads.
    """

    loaded: Tensor
    compute: Tensor | None

    @cached_property
    def channels(self) -> int:
        """Loaded channels of all experts."""
        return int(self.loaded.sum())

    def groups(self, size: int) -> int:
        """Groups of ``size`` channels that hold a loaded one: each needs its row of scales. Counted once."""
        known: dict[int, int] = vars(self).setdefault("_groups", {})
        if size not in known:
            known[size] = int(self.loaded.view(len(self.loaded), -1, size).any(2).sum())
        return known[size]

"""Prompt-wise expert reuse (section IV-B, Algorithm 1): less important prompt tokens take experts that are loaded anyway."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgexpert.core.routing import Routing, Scores
from edgexpert.policy.importance import Tier


def reuse_experts(
    routing: Routing, scores: Scores, tiers: Tensor, minor: tuple[int, int], trivial: tuple[int, int]
) -> Routing:
    """Algorithm 1. Major tokens keep their routing; their experts begin the shared set, which each later tier extends.

    The tokens of one tier choose together, against the set as it stood before them: the paper's group FIFO and union unit
    work on groups, and so the order of tokens within a tier does not matter.

    Args:
        tiers: `Tier` of each token, int64 [T].
        minor: (k_min, n_min). A token takes its best expert, then those of its best k that are shared, then the rest of its
            best k, each in descending score, until it has n.
        trivial: (k_tri, n_tri).
    """
    experts, weights = routing.experts, routing.weights
    shared = _as_set(experts[tiers == Tier.MAJOR], routing.num_experts)
    for tier, (k, n) in ((Tier.MINOR, minor), (Tier.TRIVIAL, trivial)):
        tokens = torch.nonzero(tiers == tier).squeeze(1)
        if len(tokens) == 0:
            continue
        chosen = _choose(scores.choice[tokens], shared, k, n)
        chosen = pad(chosen, (0, experts.shape[1] - n), value=routing.num_experts)  # [t, top-k]
        experts = experts.index_copy(0, tokens, chosen)
        shared = shared | _as_set(chosen, routing.num_experts)
    if experts is routing.experts:
        return routing
    major = (tiers == Tier.MAJOR)[:, None]
    weights = torch.where(major, weights, scores.weights(experts).to(weights.dtype))
    return Routing(experts, weights, routing.num_experts)


def _choose(choice: Tensor, shared: Tensor, k: int, n: int) -> Tensor:
    """The n experts that each token takes, int64 [t, n]; ``num_experts`` where the router forbids all that are left."""
    num_experts = choice.shape[1]
    score, candidate = choice.topk(k, dim=1)  # [t, k], descending
    order = torch.arange(k, device=choice.device) + k * ~shared[candidate]
    order[:, 0] = -1
    allowed = score > -torch.inf
    order = order.masked_fill(~allowed, 2 * k)
    slot = order.argsort(dim=1, stable=True)[:, :n]
    return candidate.masked_fill(~allowed, num_experts).gather(1, slot)


def _as_set(experts: Tensor, num_experts: int) -> Tensor:
    """Membership of each expert, bool [E]."""
    member = torch.zeros(num_experts + 1, dtype=torch.bool, device=experts.device)
    member[experts.flatten()] = True
    return member[:num_experts]

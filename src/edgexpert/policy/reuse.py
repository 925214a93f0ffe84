"""Prompt-wise expert reuse (section IV-B, Algorithm 1): less important prompt tokens take experts that are loaded anyway."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgexpert.core.routing import Routing, Scores
from edgexpert.kernels import native
from edgexpert.kernels.layers import StageRule, choose_experts
from edgexpert.policy.importance import Tier


def reuse_experts(
    routing: Routing, scores: Scores, tiers: Tensor, minor: tuple[int, int], trivial: tuple[int, int]
) -> Routing:
    """Algorithm 1. Major tokens keep their routing; their experts begin the shared set, which each later tier extends.

    The tokens of one tier choose together, against the set as it stood before them: the paper's group FIFO and union unit
    work on groups, and so the order of tokens within a tier does not matter. Experts rank as in `rank_experts`, so no token
    loses its first choice, and no expert is loaded that the router chose for nobody. A token whose experts stay keeps their
    weights.

    Args:
        tiers: `Tier` of each token, int64 [T].
        minor: (k_min, n_min). A token takes its best expert, then those of its best k that are shared, then the rest of its
            best k, each in descending score, until it has n.
        trivial: (k_tri, n_tri).
    """
    if not bool((tiers != Tier.MAJOR).any()):
        return routing
    if native.computes(scores.choice) and routing.weights.dtype == torch.float32:
        return choose_experts(StageRule(torch.zeros_like(tiers), tiers, minor, trivial), routing, scores)
    experts = routing.experts
    shared = _as_set(experts[tiers == Tier.MAJOR], routing.num_experts)
    ranked = rank_experts(routing, scores, max(minor[0], trivial[0]))
    for tier, (k, n) in ((Tier.MINOR, minor), (Tier.TRIVIAL, trivial)):
        tokens = torch.nonzero(tiers == tier).squeeze(1)
        if len(tokens) == 0:
            continue
        chosen = _choose(ranked[tokens, :k], shared, n)
        chosen = pad(chosen, (0, experts.shape[1] - n), value=routing.num_experts)  # [t, top-k]
        experts = experts.index_copy(0, tokens, chosen)
        shared = shared | _as_set(chosen, routing.num_experts)
    stays = ((tiers == Tier.MAJOR) | (experts == ranked[:, : experts.shape[1]]).all(1))[:, None]
    if stays.all():
        return routing
    experts = torch.where(stays, routing.experts, experts)
    weights = torch.where(stays, routing.weights, scores.weights(experts).to(routing.weights.dtype))
    return Routing(experts, weights, routing.num_experts)


def rank_experts(routing: Routing, scores: Scores, ranks: int) -> Tensor:
    """The best experts of each token, int64 [T, ranks]; ``num_experts`` where the router forbids all that are left.

    The router's own choice comes first, whatever rounding made of the scores since; within it, and behind it, the higher score,
    and of equal ones the lower number.
    """
    own = torch.zeros(len(scores.choice), routing.num_experts + 1, dtype=torch.bool, device=scores.choice.device)
    own = own.scatter(1, routing.experts, True)[:, :-1]
    order = scores.choice.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~own.gather(1, order)).int().argsort(dim=1, stable=True))[:, :ranks]
    allowed = own.gather(1, order) | (scores.choice.gather(1, order) > -torch.inf)
    return order.masked_fill(~allowed, routing.num_experts)


def _choose(candidate: Tensor, shared: Tensor, n: int) -> Tensor:
    """The n experts that each token takes of its candidates [t, k], best first; ``num_experts`` where there are too few."""
    k, none = candidate.shape[1], len(shared)
    order = torch.arange(k, device=candidate.device) + k * ~pad(shared, (0, 1))[candidate]
    order[:, 0] = -1
    order = order.masked_fill(candidate == none, 2 * k)
    return candidate.gather(1, order.argsort(dim=1, stable=True)[:, :n])


def _as_set(experts: Tensor, num_experts: int) -> Tensor:
    """Membership of each expert, bool [E]."""
    member = torch.zeros(num_experts + 1, dtype=torch.bool, device=experts.device)
    member[experts.flatten()] = True
    return member[:num_experts]

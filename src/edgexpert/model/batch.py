"""A policy's decisions for several sequences that share a pass: each sequence is decided by itself, as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.stage import Stage
from edgexpert.policy import Policy
from edgexpert.policy.decide import channels_of, routing_of


def route(policy: Policy, exact: Routing, scores: Scores, stages: Sequence[Stage]) -> Routing:
    """The routing of all tokens of a pass; ``exact`` itself where the policy changes nothing."""
    if len(stages) == 1:
        return routing_of(policy, exact, scores, stages[0])
    own = _split(exact, stages)
    lengths = [len(stage.tokens) for stage in stages]
    parts = zip(own, scores.choice.split(lengths), scores.gate.split(lengths), stages, strict=True)
    decided = [
        routing_of(policy, part, Scores(choice, gate, scores.normalise, scores.scale), stage)
        for part, choice, gate, stage in parts
    ]
    if all(new is part for new, part in zip(decided, own, strict=True)):
        return exact
    return Routing(torch.cat([r.experts for r in decided]), torch.cat([r.weights for r in decided]), exact.num_experts)


def select_channels(
    policy: Policy, activations: Tensor, routing: Routing, stages: Sequence[Stage], received: Tensor | None
) -> ChannelSelection | None:
    """The channels of all tokens of a pass: loaded where some sequence wants them, computed on by its own tokens."""
    if len(stages) == 1:
        return channels_of(policy, activations, routing, stages[0], received)
    own = _split(routing, stages)
    pairs = activations.split([len(part.pair_expert) for part in own])
    selections = [channels_of(policy, x, part, stage) for x, part, stage in zip(pairs, own, stages, strict=True)]
    if any(selection is None for selection in selections):
        return None
    known = [(s, part) for s, part in zip(selections, own, strict=True) if s is not None]
    compute = [s.loaded[part.pair_expert] if s.compute is None else s.compute for s, part in known]
    return ChannelSelection(torch.stack([s.loaded for s, _ in known]).any(0), torch.cat(compute))


def _split(routing: Routing, stages: Sequence[Stage]) -> list[Routing]:
    lengths = [len(stage.tokens) for stage in stages]
    return [
        Routing(experts, weights, routing.num_experts, routing.complete)
        for experts, weights in zip(routing.experts.split(lengths), routing.weights.split(lengths), strict=True)
    ]

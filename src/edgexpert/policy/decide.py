"""Asking a policy, the same way everywhere: of a stage that it acts on, with its answer checked before anybody computes by it."""

from __future__ import annotations

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.stage import Stage
from edgexpert.policy.protocol import Policy


def routing_of(policy: Policy, routing: Routing, scores: Scores, stage: Stage) -> Routing:
    """`Policy.route`; ``routing`` itself where the policy leaves the stage alone.

    Raises:
        UserError: the answer is no routing of these tokens.
    """
    if not policy.acts_on(stage):
        return routing
    decided = policy.route(routing, scores, stage)
    if decided is routing:
        return routing
    experts, weights, shape = decided.experts, decided.weights, routing.experts.shape
    if decided.num_experts != routing.num_experts or experts.shape != shape or weights.shape != shape:
        raise _wrong(policy, "route", f"experts and weights of {tuple(shape)} for {routing.num_experts} experts")
    if experts.dtype != torch.int64 or int(experts.min()) < 0 or int(experts.max()) > routing.num_experts:
        raise _wrong(policy, "route", f"experts as int64 from 0 to {routing.num_experts}, which stands for none")
    return decided


def channels_of(
    policy: Policy, activations: Tensor, routing: Routing, stage: Stage, received: Tensor | None = None
) -> ChannelSelection | None:
    """`Policy.select_channels`; None where the policy leaves the stage alone, and for every prompt.

    Raises:
        UserError: the answer is no selection of these channels.
    """
    if stage.tree is None or not policy.selects_channels or not policy.acts_on(stage):
        return None
    selection = policy.select_channels(activations, routing, stage, received)
    if selection is None:
        return None
    pairs, channels = activations.shape
    for name, mask, shape in (("loaded", selection.loaded, (routing.num_experts, channels)),
                              ("compute", selection.compute, (pairs, channels))):
        if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
            raise _wrong(policy, "select_channels", f"`{name}` as bool {shape}, not {mask.dtype} {tuple(mask.shape)}")
    return selection


def _wrong(policy: Policy, method: str, expected: str) -> UserError:
    return UserError(f"policy {policy.name} is at fault: its `{method}` must give {expected}; mend {type(policy).__module__}")

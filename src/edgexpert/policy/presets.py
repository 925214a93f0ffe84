"""Policies by name: the paper's ladder, each step adding one technique (the rows of Table IV), and the baselines of Table II."""

from __future__ import annotations

from dataclasses import replace

from edgexpert.core.errors import UserError
from edgexpert.policy.baselines import EdgeMoe, MoePruner
from edgexpert.policy.plugins import GROUP, plugin_named, plugin_names
from edgexpert.policy.protocol import Policy
from edgexpert.policy.techniques import Techniques

EXACT = Techniques("exact")
_PRUNED = Techniques("pruned", coarse_pruning=True, fine_pruning=True)
_REUSE = replace(_PRUNED, name="reuse", prompt_wise_expert_reuse=True)
_COALESCED = replace(_REUSE, name="coalesced", depth_aware_coalescing=True)
_EDGEXPERT = replace(_COALESCED, name="edgexpert", computational_calibration=True)

PRESETS: dict[str, Techniques] = {
    policy.name: policy for policy in (EXACT, _PRUNED, _REUSE, _COALESCED, _EDGEXPERT)
}
"""exact, pruned (the paper's Baseline, after SMoLPU), reuse (EdgeXpert_PR), coalesced (EdgeXpert_DC) and edgexpert
(EdgeXpert_ALL)."""

BASELINES: dict[str, Policy] = {policy.name: policy for policy in (MoePruner(), EdgeMoe())}
"""Policies of other work that decide before inference."""


def policy_named(name: str) -> Policy:
    """A policy of this package or, by its entry point, of another.

    Raises:
        UserError: there is no such policy, which lists those there are; or a package offers it and is at fault.
    """
    own: dict[str, Policy] = {**PRESETS, **BASELINES}
    offered = plugin_names()
    if name in own and name in offered:
        raise UserError(f"an installed package offers a policy {name!r}, which EdgeXpert has itself; remove it, or rename its "
                        f"entry point of the group {GROUP}")
    if name in offered:
        return plugin_named(name)
    if name not in own:
        raise UserError(f"there is no policy {name!r}; choose one of {', '.join([*own, *offered])}")
    return own[name]

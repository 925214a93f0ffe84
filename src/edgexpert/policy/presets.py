"""Policies by name: the paper's ladder, each step adding one technique (the rows of Table IV), and the baselines of Table II."""

from __future__ import annotations

from dataclasses import replace

from edgexpert.core.errors import UserError
from edgexpert.policy.baselines import EdgeMoe, MoePruner
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
    """Raises UserError listing the policies there are."""
    known: dict[str, Policy] = {**PRESETS, **BASELINES}
    if name not in known:
        raise UserError(f"there is no policy {name!r}; choose one of {', '.join(known)}")
    return known[name]

"""Policies by name; each adds one technique to the one before it (the rows of Table IV)."""

from __future__ import annotations

from dataclasses import replace

from edgexpert.errors import UserError
from edgexpert.policy.policy import Policy

_PRUNED = Policy("pruned", coarse_pruning=True, fine_pruning=True)
_REUSE = replace(_PRUNED, name="reuse", prompt_wise_expert_reuse=True)
_COALESCED = replace(_REUSE, name="coalesced", depth_aware_coalescing=True)
_EDGEXPERT = replace(_COALESCED, name="edgexpert", computational_calibration=True)

PRESETS: dict[str, Policy] = {
    policy.name: policy for policy in (Policy("exact"), _PRUNED, _REUSE, _COALESCED, _EDGEXPERT)
}
"""exact, pruned (the paper's Baseline), reuse (EdgeXpert_PR), coalesced (EdgeXpert_DC), edgexpert (EdgeXpert_ALL)."""


def policy_named(name: str) -> Policy:
    """Raises UserError listing the policies there are."""
    if name not in PRESETS:
        raise UserError(f"there is no policy {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]

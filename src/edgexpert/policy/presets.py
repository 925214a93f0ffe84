"""Policies by name: the paper's ladder, each step adding one technique (the rows of Table IV), and the rivals of Table II."""

from __future__ import annotations

from dataclasses import replace

from edgexpert.core.errors import UserError
from edgexpert.policy.policy import Policy

_PRUNED = Policy("pruned", coarse_pruning=True, fine_pruning=True)
_REUSE = replace(_PRUNED, name="reuse", prompt_wise_expert_reuse=True)
_COALESCED = replace(_REUSE, name="coalesced", depth_aware_coalescing=True)
_EDGEXPERT = replace(_COALESCED, name="edgexpert", computational_calibration=True)

PRESETS: dict[str, Policy] = {
    policy.name: policy for policy in (Policy("exact"), _PRUNED, _REUSE, _COALESCED, _EDGEXPERT)
}
"""exact, pruned (the paper's Baseline, after SMoLPU), reuse (EdgeXpert_PR), coalesced (EdgeXpert_DC) and edgexpert
(EdgeXpert_ALL)."""

BASELINES: dict[str, Policy] = {
    policy.name: policy
    for policy in (Policy("moe-pruner", weight_sparsity=0.5), Policy("edgemoe", low_bit_saving=0.35))
}
"""Policies of other work that decide before inference. The paper gives 30-35 % for EdgeMoE: 35 % of the value
bytes are 31 % of all where 4-bit weights have a scale of 16 bits for each 32."""


def policy_named(name: str) -> Policy:
    """Raises UserError listing the policies there are."""
    known = PRESETS | BASELINES
    if name not in known:
        raise UserError(f"there is no policy {name!r}; choose one of {', '.join(known)}")
    return known[name]

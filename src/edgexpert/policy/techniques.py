"""The paper's techniques as one policy: a switch for each, and the numbers that tune them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Literal, Self, get_args

from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.stage import Stage
from edgexpert.kernels.layers import StageRule
from edgexpert.policy.coalescing import salient_channels
from edgexpert.policy.hyperparameters import Hyperparameters, choose_hyperparameters
from edgexpert.policy.importance import Normalisation, token_tiers
from edgexpert.policy.protocol import Policy
from edgexpert.policy.pruning import expected_candidates, needed_channels, prune_experts, union_by_expert
from edgexpert.policy.reuse import reuse_experts

TokenWeight = Literal["routing", "path", "attention"]


@dataclass(frozen=True)
class Techniques(Policy):
    """Which techniques act, and how strongly; none unless switched on. `resolved` fills in what was left to the model.

    Attributes:
        importance: how the CLS attention of a prompt token becomes its weight, see `importance_weights`.
        token_weight: A_t of the channel score, which the paper leaves open for decoding: the token's routing weight for the
            expert, its path probability, or the attention that it received.

    The hyperparameters are those of `Hyperparameters`.
    """

    name: str = "custom"
    coarse_pruning: bool = False
    fine_pruning: bool = False
    prompt_wise_expert_reuse: bool = False
    depth_aware_coalescing: bool = False
    computational_calibration: bool = False
    k_min: int | None = None
    n_min: int | None = None
    k_tri: int | None = None
    n_tri: int | None = None
    theta1: float | None = None
    theta2: float | None = None
    selection_ratio: float | None = None
    keep_channels: float | None = None
    keep_mass: float | None = None
    importance: Normalisation = "mean"
    token_weight: TokenWeight = "routing"

    @property
    def is_exact(self) -> bool:
        return not (self.coarse_pruning or self.fine_pruning or self.prompt_wise_expert_reuse)

    def acts_on(self, stage: Stage) -> bool:
        return self.prompt_wise_expert_reuse if stage.tree is None else self.coarse_pruning or self.fine_pruning

    @property
    def selects_channels(self) -> bool:
        return self.fine_pruning

    @property
    def needs_importance(self) -> bool:
        return self.prompt_wise_expert_reuse

    @property
    def needs_received_attention(self) -> bool:
        return self.depth_aware_coalescing and self.token_weight == "attention"

    @property
    def hyperparameters(self) -> Hyperparameters:
        values = {field.name: getattr(self, field.name) for field in fields(Hyperparameters)}
        assert None not in values.values(), "resolve the policy for a model first"
        return Hyperparameters(**values)

    def resolved(
        self, *, model_type: str, num_experts: int, top_k: int, calibrated: Hyperparameters | None = None
    ) -> Self:
        """Fills in what is None from ``calibrated``, else by `choose_hyperparameters`; then checks every rule."""
        self._check_switches()
        chosen = asdict(calibrated or choose_hyperparameters(model_type, num_experts, top_k))
        policy = replace(self, **{name: value for name, value in chosen.items() if getattr(self, name) is None})
        policy.hyperparameters.check(num_experts, top_k)
        return policy

    def _check_switches(self) -> None:
        if self.depth_aware_coalescing and not self.fine_pruning:
            raise UserError("depth-aware coalescing needs the channel masks of fine pruning; switch fine pruning on, too")
        if self.computational_calibration and not self.depth_aware_coalescing:
            raise UserError("computational calibration repairs depth-aware coalescing; switch coalescing on, too")
        for option, value, allowed in (("importance", self.importance, get_args(Normalisation)),
                                       ("token_weight", self.token_weight, get_args(TokenWeight))):
            if value not in allowed:
                raise UserError(f"`{option}` must be one of {', '.join(allowed)}, not {value!r}")

    def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
        """Prompt-wise expert reuse in prefill, coarse pruning in verification."""
        if stage.tree is not None:
            if not self.coarse_pruning:
                return routing
            return prune_experts(routing, scores, expected_candidates(stage.tree, self.hyperparameters.keep_mass))
        if not self.prompt_wise_expert_reuse:
            return routing
        if stage.importance is None:
            raise UserError("prompt-wise expert reuse needs the importance of the prompt's tokens; give an encoder, or "
                            "switch the technique off")
        h = self.hyperparameters
        tiers = token_tiers(stage.importance.to(routing.experts.device), h.theta1, h.theta2)
        return reuse_experts(routing, scores, tiers, (h.k_min, h.n_min), (h.k_tri, h.n_tri))

    def select_channels(
        self, activations: Tensor, routing: Routing, stage: Stage, received: Tensor | None = None
    ) -> ChannelSelection | None:
        """Fine pruning, and depth-aware coalescing, in verification."""
        if stage.tree is None or not self.fine_pruning:
            return None
        h = self.hyperparameters
        mask = needed_channels(activations, routing, h.keep_channels)
        if not self.depth_aware_coalescing:
            return ChannelSelection(union_by_expert(mask, routing.pair_expert, routing.num_experts), mask)
        score = activations.float().abs() * _candidate_weight(self.token_weight, routing, stage, received)[:, None]
        pair_depth = stage.depth.to(activations.device)[routing.pairs[0]]
        loaded = salient_channels(score, mask, routing.pair_expert, pair_depth, routing.num_experts, h.selection_ratio)
        compute = None if self.computational_calibration else mask & loaded[routing.pair_expert]
        return ChannelSelection(loaded, compute)

    def stage_rule(self, stage: Stage) -> StageRule | None:
        h = self.hyperparameters
        if stage.tree is None:
            if stage.importance is None or not self.prompt_wise_expert_reuse:
                return None
            tiers = token_tiers(stage.importance, h.theta1, h.theta2)
            return StageRule(stage.depth, tiers, (h.k_min, h.n_min), (h.k_tri, h.n_tri))
        if self.needs_received_attention:
            return None
        return StageRule(
            stage.depth,
            keep=expected_candidates(stage.tree, h.keep_mass) if self.coarse_pruning else None,
            keep_channels=h.keep_channels if self.fine_pruning else None,
            selection_ratio=h.selection_ratio if self.depth_aware_coalescing else None,
            calibrated=self.computational_calibration,
            token_weight=stage.tree.path_log_prob.exp() if self.token_weight == "path" else None,
        )

    def approximations(self) -> list[str]:
        if self.is_exact:
            return []
        h = self.hyperparameters
        lines = {
            "prompt_wise_expert_reuse":
                f"prompt-wise expert reuse: prompt tokens weighing below {h.theta1} (over the {self.importance}) route to "
                f"{h.n_min} of their best {h.k_min} experts, below {h.theta2} to {h.n_tri} of {h.k_tri}",
            "coarse_pruning":
                f"coarse pruning: experts that no candidate within {h.keep_mass} of the path probability wants are skipped",
            "fine_pruning":
                f"fine pruning: each candidate needs the channels that hold {h.keep_channels} of its importance",
            "depth_aware_coalescing":
                f"depth-aware coalescing: channels are loaded whose salience exceeds {h.selection_ratio} of their depth's "
                f"channel score (candidates weighed by {self.token_weight})",
            "computational_calibration":
                "computational calibration: each candidate computes on every channel loaded for its expert",
        }
        return [line for switch, line in lines.items() if getattr(self, switch)]


def _candidate_weight(kind: TokenWeight, routing: Routing, stage: Stage, received: Tensor | None) -> Tensor:
    """A_t of each pair, float32 [P]."""
    if kind == "routing":
        weight = routing.pair_weight
    elif kind == "path":
        assert stage.tree is not None
        weight = stage.tree.path_log_prob.exp().to(routing.weights.device)[routing.pairs[0]]
    elif received is None:
        raise UserError("`token_weight` attention needs the attention that tokens receive, which was not measured; use "
                        "routing or path")
    else:
        weight = received.to(routing.weights.device)[routing.pairs[0]]
    # Only ratios within a depth count; a weight that rounds to nothing must not hide the channels of a lone token.
    return weight.float().abs().clamp(min=1e-20)

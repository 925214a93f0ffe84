"""One dataclass that composes the techniques and answers a layer's two questions: which experts, and which channels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.shapes import Storage
from edgexpert.core.stage import Stage
from edgexpert.kernels.layers import StageRule
from edgexpert.policy.baselines import BITMAP_BITS, HIGH_BITS, LOW_BITS, ExpertUse, low_bit_experts
from edgexpert.policy.coalescing import salient_channels
from edgexpert.policy.hyperparameters import Hyperparameters, choose_hyperparameters
from edgexpert.policy.importance import Normalisation, importance_weights, token_tiers
from edgexpert.policy.pruning import expected_candidates, needed_channels, prune_experts, union_by_expert
from edgexpert.policy.reuse import reuse_experts

TokenWeight = Literal["routing", "path", "attention"]


@dataclass(frozen=True)
class Policy:
    """Which techniques act, and how strongly. `resolved` fills in what was left to the model; only then may a policy decide.

    Attributes:
        importance: how the CLS attention of a prompt token becomes its weight, see `importance_weights`.
        token_weight: A_t of the channel score, which the paper leaves open for decoding: the token's routing weight for the
            expert, its path probability, or the attention that it received.
        weight_sparsity: share of the expert weights that MoE-Pruner zeroes; 0 is off.
        low_bit_saving: share of the experts' value bytes that EdgeMoE's mixed precision saves; 0 is off.

    The hyperparameters are those of `Hyperparameters`.
    """

    name: str = "exact"
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
    weight_sparsity: float = 0.0
    low_bit_saving: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether nothing is approximated."""
        return not (self.coarse_pruning or self.fine_pruning or self.prompt_wise_expert_reuse
                    or self.depth_aware_coalescing or self.computational_calibration or self.stores_otherwise)

    def acts_on(self, stage: Stage) -> bool:
        """Whether a stage runs otherwise than by its router alone."""
        acts = self.prompt_wise_expert_reuse if stage.tree is None else self.coarse_pruning or self.fine_pruning
        return acts or self.stores_otherwise

    @property
    def stores_otherwise(self) -> bool:
        """Whether experts are kept in another form than they are hosted in: MoE-Pruner's or EdgeMoE's."""
        return self.weight_sparsity > 0 or self.low_bit_saving > 0

    @property
    def hyperparameters(self) -> Hyperparameters:
        values = {field.name: getattr(self, field.name) for field in fields(Hyperparameters)}
        assert None not in values.values(), "resolve the policy for a model first"
        return Hyperparameters(**values)

    def resolved(
        self, *, model_type: str, num_experts: int, top_k: int, calibrated: Hyperparameters | None = None
    ) -> Policy:
        """This policy for one model: what is None is filled in, then every rule is checked.

        Args:
            calibrated: hyperparameters found for this very checkpoint; else `choose_hyperparameters` chooses.

        Raises:
            UserError: names the rule that is broken.
        """
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
        if not 0 <= self.weight_sparsity < 1:
            raise UserError(f"`weight_sparsity` ({self.weight_sparsity}) must be from 0 to below 1")
        if not 0 <= self.low_bit_saving <= 1 - LOW_BITS / HIGH_BITS:
            raise UserError(f"`low_bit_saving` ({self.low_bit_saving}) must be from 0 to {1 - LOW_BITS / HIGH_BITS}: what "
                            f"{LOW_BITS} bits save against {HIGH_BITS}")
        if self.stores_otherwise and (self.fine_pruning or self.weight_sparsity * self.low_bit_saving > 0):
            raise UserError("fine pruning, `weight_sparsity` and `low_bit_saving` exclude one another; switch on one of them")
        for option, value, allowed in (("importance", self.importance, get_args(Normalisation)),
                                       ("token_weight", self.token_weight, get_args(TokenWeight))):
            if value not in allowed:
                raise UserError(f"`{option}` must be one of {', '.join(allowed)}, not {value!r}")

    def weigh_prompt(self, attention: Tensor) -> Tensor:
        """What belongs into `Stage.importance`: the weights of a whole prompt's tokens from their CLS attention, [T]."""
        return importance_weights(attention, self.importance)

    def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
        """The experts of each token: reuse acts in prefill, coarse pruning in verification.

        Returns ``routing`` itself where nothing applies.
        """
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
        """The input channels of one matrix in a verify stage; None for all of them.

        Args:
            activations: input of the matrix for each pair of ``routing``, [P, C].
            received: attention that each token received, [T]; only for ``token_weight="attention"``.
        """
        if stage.tree is None or not self.fine_pruning:
            return None
        h = self.hyperparameters
        mask = needed_channels(activations, routing, h.keep_channels)
        if not self.depth_aware_coalescing:
            return ChannelSelection(union_by_expert(mask, routing.pair_expert, routing.num_experts), mask)
        score = activations.float().abs() * self._pair_weight(routing, stage, received)[:, None]
        pair_depth = stage.depth.to(activations.device)[routing.pairs[0]]
        loaded = salient_channels(score, mask, routing.pair_expert, pair_depth, routing.num_experts, h.selection_ratio)
        compute = None if self.computational_calibration else mask & loaded[routing.pair_expert]
        return ChannelSelection(loaded, compute)

    def stage_rule(self, stage: Stage) -> StageRule | None:
        """What `route` and `select_channels` do to a stage, for their compiled twin; None where that lacks a rule."""
        h, attends = self.hyperparameters, self.token_weight == "attention"
        if stage.tree is None and stage.importance is not None and self.prompt_wise_expert_reuse and not self.stores_otherwise:
            tiers = token_tiers(stage.importance, h.theta1, h.theta2)
            return StageRule(stage.depth, tiers, (h.k_min, h.n_min), (h.k_tri, h.n_tri))
        if stage.tree is None or self.stores_otherwise or (self.depth_aware_coalescing and attends):
            return None
        return StageRule(
            stage.depth,
            keep=expected_candidates(stage.tree, h.keep_mass) if self.coarse_pruning else None,
            keep_channels=h.keep_channels if self.fine_pruning else None,
            selection_ratio=h.selection_ratio if self.depth_aware_coalescing else None,
            calibrated=self.computational_calibration,
            token_weight=stage.tree.path_log_prob.exp() if self.token_weight == "path" else None,
        )

    def storages(self, use: ExpertUse) -> list[Storage] | None:
        """How the experts of each MoE layer are kept, after ``use`` was measured; None for as they are hosted."""
        if self.weight_sparsity:
            return [Storage(torch.full((len(row),), 1 - self.weight_sparsity, dtype=torch.float64), BITMAP_BITS)
                    for row in use.weight]
        if self.low_bit_saving:
            return [Storage(1 - low.double() * (1 - LOW_BITS / HIGH_BITS)) for low in low_bit_experts(use, self.low_bit_saving)]
        return None

    def _pair_weight(self, routing: Routing, stage: Stage, received: Tensor | None) -> Tensor:
        """A_t of each pair, float32 [P]."""
        if self.token_weight == "routing":
            weight = routing.pair_weight
        elif self.token_weight == "path":
            assert stage.tree is not None
            weight = stage.tree.path_log_prob.exp().to(routing.weights.device)[routing.pairs[0]]
        elif received is None:
            raise UserError("`token_weight` attention needs the attention that tokens receive, which was not measured; use "
                            "routing or path")
        else:
            weight = received.to(routing.weights.device)[routing.pairs[0]]
        # Only ratios within a depth count; a weight that rounds to nothing must not hide the channels of a lone token.
        return weight.float().abs().clamp(min=1e-20)

    def approximations(self) -> list[str]:
        """One line for each technique that acts, with its hyperparameters."""
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
        lines |= {
            "weight_sparsity":
                f"static weight pruning: {self.weight_sparsity} of each expert's weights are zero, by |weight| x norm of the "
                "router-weighted inputs on sample text; the others are loaded with a bitmap",
            "low_bit_saving":
                f"mixed precision: the least important experts keep {LOW_BITS} bits and the others {HIGH_BITS}, to save "
                f"{self.low_bit_saving} of the value bytes on sample text",
        }
        return [line for switch, line in lines.items() if getattr(self, switch)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

"""What every policy answers: which experts and which channels a layer loads, and what the host must know beforehand.

A policy is a subclass of `Policy` that overrides one decision or more; docs/extending.md shows one. Whatever it does not override
is left to the model's router, which loads experts whole.
"""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, Self, final

from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.shapes import Storage
from edgexpert.core.stage import Stage
from edgexpert.kernels.layers import StageRule
from edgexpert.policy.hyperparameters import Hyperparameters
from edgexpert.policy.importance import Normalisation, importance_weights
from edgexpert.policy.use import ExpertUse

# What a class says about its decisions. A subclass that overrides a decision says it anew, or the base class says it for it.
_SAID_OF_ROUTE = ("is_exact", "acts_on", "approximations", "stage_rule")
_SAID_OF = {"route": _SAID_OF_ROUTE, "select_channels": (*_SAID_OF_ROUTE, "selects_channels")}


class Policy:
    """Decides each layer of each stage. A policy is immutable: texts and threads share it.

    Attributes:
        name: what results call it; the class's name unless given.
        importance: how the CLS attention of a prompt becomes `Stage.importance`, see `importance_weights`.
    """

    name: str = "exact"
    importance: Normalisation = "mean"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes an override always count.

        What a parent says about its decisions (above all its native rule, which runs in their place) holds no longer for a
        class that overrides one of them; unless the class says it itself, it gets the answer of `Policy`.
        """
        super().__init_subclass__(**kwargs)
        if Policy in cls.__bases__ and "name" not in vars(cls):
            cls.name = cls.__name__
        for decision, statements in _SAID_OF.items():
            for statement in statements:
                if _distance(cls, statement) > _distance(cls, decision):
                    setattr(cls, statement, vars(Policy)[statement])

    def __setattr__(self, name: str, value: Any) -> None:
        """A decision is overridden in a class: assigned to one object it would be called in Python and not by the kernels."""
        if hasattr(Policy, name) and callable(getattr(Policy, name)):
            raise AttributeError(f"override {name} in a subclass of {type(self).__name__}")
        super().__setattr__(name, value)

    # -- the decisions ---------------------------------------------------------------------------------------------

    def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
        """The experts of each token in one layer.

        Args:
            routing: what the model's router chose.
            scores: its opinion of every expert.

        Returns:
            A routing of the same shape, or ``routing`` itself to leave it as it is. ``scores.weights(experts)`` gives the weights
            that the model itself would compute; expert ``routing.num_experts`` stands for none.
        """
        return routing

    def select_channels(
        self, activations: Tensor, routing: Routing, stage: Stage, received: Tensor | None = None
    ) -> ChannelSelection | None:
        """The input channels of one matrix in a verify stage; None for all of them. Prompts always load whole experts.

        It is asked for gate/up first and then, unless that answer was None, for down.

        Args:
            activations: input of the matrix for each pair of ``routing``, [P, C].
            received: attention that each token received in this layer, [T]; only where `needs_received_attention`.
        """
        return None

    def stage_rule(self, stage: Stage) -> StageRule | None:
        """What `route` and `select_channels` do to a stage, for the native kernels to do in their place; None to call these."""
        return None

    # -- what the host must know before a stage ----------------------------------------------------------------------

    def resolved(
        self, *, model_type: str, num_experts: int, top_k: int, calibrated: Hyperparameters | None = None
    ) -> Self:
        """This policy for one model, with what was left open filled in. Only a resolved policy decides.

        Args:
            calibrated: hyperparameters found for this very checkpoint.

        Raises:
            UserError: the policy breaks a rule, or does not suit the model.
        """
        return self

    def acts_on(self, stage: Stage) -> bool:
        """Whether a stage runs otherwise than by its router alone; else no decision is asked for."""
        return not self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether nothing is approximated, in any stage."""
        return not (_overrides(self, "route") or self.selects_channels or self.stores_otherwise)

    @property
    def selects_channels(self) -> bool:
        """Whether `select_channels` is to be called, and weights must lie channel by channel for it."""
        return _overrides(self, "select_channels")

    @property
    def needs_importance(self) -> bool:
        """Whether `Stage.importance` of a prompt is needed; then the encoder reads prompts."""
        return False

    @property
    def needs_received_attention(self) -> bool:
        """Whether `select_channels` needs ``received``."""
        return False

    @final
    def weigh_prompt(self, attention: Tensor) -> Tensor:
        """`Stage.importance` of a whole prompt from the CLS attention of its tokens, [T]."""
        return importance_weights(attention, self.importance)

    # -- weights that are prepared once ------------------------------------------------------------------------------

    @property
    def stores_otherwise(self) -> bool:
        """Whether experts are kept in another form than they are hosted in; such a policy selects no channels."""
        return _overrides(self, "storages")

    def storages(self, use: ExpertUse) -> list[Storage] | None:
        """How the experts of each MoE layer are kept, by their use on calibration text; None for as they are hosted."""
        return None

    def prepared(self, weight: Tensor, input_norm: Tensor, value_share: float) -> Tensor:
        """One matrix of one expert in the form of `storages`, as the model then computes with it.

        Args:
            weight: channel-major, [C, out].
            input_norm: L2 norm over calibration tokens of routing weight x input, [C].
            value_share: `Storage.value` of this expert.
        """
        return weight

    # -- honest output ---------------------------------------------------------------------------------------------

    def approximations(self) -> list[str]:
        """One line for each thing that differs from the exact model; [] if `is_exact`."""
        acts = {
            "route": (_overrides(self, "route"), "the experts of each token"),
            "select_channels": (self.selects_channels, "the channels of each expert"),
            "storages": (self.stores_otherwise, "the form of the experts' weights"),
        }
        return [f"{self.name}: {what} as {_definer(type(self), decision)} decides" for decision, (on, what) in acts.items() if on]

    def to_json(self) -> dict[str, Any]:
        """Name and settings; the fields of a dataclass, others override this."""
        settings: dict[str, Any] = asdict(self) if is_dataclass(self) and not isinstance(self, type) else {}
        return {"name": self.name, "importance": self.importance, **settings}


def with_settings(policy: Policy, settings: dict[str, Any]) -> Policy:
    """The policy with some fields of its dataclass changed.

    Raises:
        UserError: it has no such setting; names those that it has.
    """
    if not settings:
        return policy
    known: list[str] = []
    if is_dataclass(policy) and not isinstance(policy, type):
        known = [field.name for field in fields(policy) if field.name != "name"]
    unknown = next((name for name in settings if name not in known), None)
    if unknown is not None:
        raise UserError(f"policy {policy.name} has no setting {unknown!r}; it has {', '.join(known) or 'none'}")
    changed: Policy = replace(policy, **settings)  # type: ignore[type-var]
    return changed


def _distance(cls: type, name: str) -> int:
    """How far up the method resolution order a class finds an attribute."""
    return next(i for i, parent in enumerate(cls.__mro__) if name in vars(parent))


def _definer(cls: type, name: str) -> str:
    parent = cls.__mro__[_distance(cls, name)]
    return f"{parent.__module__}.{parent.__qualname__}.{name}"


def _overrides(policy: Policy, method: str) -> bool:
    return getattr(type(policy), method) is not getattr(Policy, method)

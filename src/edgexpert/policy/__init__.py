"""The decisions: pure tensor functions, and one `Policy` that composes them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgexpert.policy.hyperparameters import Hyperparameters
    from edgexpert.policy.policy import Policy
    from edgexpert.policy.presets import BASELINES, PRESETS, policy_named

__all__ = ["BASELINES", "PRESETS", "Hyperparameters", "Policy", "policy_named"]

_HOMES = {"Hyperparameters": "hyperparameters", "Policy": "policy"}


def __getattr__(name: str) -> Any:
    """Hyperparameters are read without PyTorch, which the policies need: `edgexpert info` answers at once."""
    if name not in __all__:
        raise AttributeError(f"module 'edgexpert.policy' has no attribute {name!r}")
    return getattr(import_module(f"edgexpert.policy.{_HOMES.get(name, 'presets')}"), name)

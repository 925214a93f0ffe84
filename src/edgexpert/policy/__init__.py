"""The decisions: what a `Policy` answers, the paper's `Techniques` on pure tensor functions, and policies by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgexpert.policy.hyperparameters import Hyperparameters
    from edgexpert.policy.presets import BASELINES, EXACT, PRESETS, policy_named
    from edgexpert.policy.protocol import Policy, with_settings
    from edgexpert.policy.techniques import Techniques

_HOMES = {
    "Hyperparameters": "hyperparameters", "Policy": "protocol", "with_settings": "protocol", "Techniques": "techniques",
    "BASELINES": "presets", "EXACT": "presets", "PRESETS": "presets", "policy_named": "presets",
}

__all__ = ["BASELINES", "EXACT", "PRESETS", "Hyperparameters", "Policy", "Techniques", "policy_named", "with_settings"]


def __getattr__(name: str) -> Any:
    """Hyperparameters are read without PyTorch, which the policies need: `edgexpert info` answers at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'edgexpert.policy' has no attribute {name!r}")
    return getattr(import_module(f"edgexpert.policy.{_HOMES[name]}"), name)

"""The decisions: pure tensor functions, and one `Policy` that composes them."""

from edgexpert.policy.hyperparameters import Hyperparameters
from edgexpert.policy.policy import Policy
from edgexpert.policy.presets import BASELINES, PRESETS, policy_named

__all__ = ["BASELINES", "PRESETS", "Hyperparameters", "Policy", "policy_named"]

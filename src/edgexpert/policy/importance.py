"""Importance of prompt tokens: from a small encoder's CLS attention to a weight, and from the weight to a tier.

The paper compares "CLS attention weights" with thresholds between 0.30 and 0.80 (section IV-B, Table III) and does not say
how attention, which sums to one over the prompt, becomes a number of that size. We divide by the prompt's mean, because

- it does not depend on the prompt's length;
- it needs no sorting, which the paper rejects for its hardware (section IV-B), so it is not a rank;
- a single word that draws much attention does not push every other token down, as dividing by the maximum does.

On three short texts with the bundled encoder, theta1 = 0.80 makes 27-53 % of the tokens major over the mean, and 1-7 % over
the maximum.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

Normalisation = Literal["mean", "max", "quantile"]


class Tier(IntEnum):
    MAJOR = 0
    MINOR = 1
    TRIVIAL = 2


def importance_weights(attention: Tensor, normalisation: Normalisation = "mean") -> Tensor:
    """Weight of each token of one whole prompt.

    Args:
        attention: CLS attention that each token received, never negative, on any scale, [T].
        normalisation: ``mean`` and ``max`` divide by that of the prompt; ``quantile`` is the share of tokens that received
            no more, so thresholds become shares of the prompt.

    Returns:
        float32 [T]; zeros where ``attention`` is zero throughout.
    """
    attention = attention.float()
    if normalisation == "quantile":
        return torch.searchsorted(attention.sort().values, attention, right=True) / len(attention)
    unit = attention.mean() if normalisation == "mean" else attention.max()
    return attention / unit if unit > 0 else attention


def token_tiers(weights: Tensor, theta1: float, theta2: float) -> Tensor:
    """`Tier` of each token, int64 [T]: major from ``theta1`` up, minor from ``theta2`` up, trivial below.

    Without a token that heavy, the heaviest counts as major (ties alike): the shared expert set must begin with somebody.
    """
    lowest_major = weights.max().clamp(max=theta1)
    below = (weights < lowest_major).long()
    return below + below * (weights < theta2)

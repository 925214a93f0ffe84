"""The compute mask update unit of computational calibration (section IV-C): masks of loaded channels go from 0 to 1."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

CHANNELS_PER_CYCLE = 64
"""Channels whose masks a row of multiplexers updates in a cycle, for all of the expert's tokens. The paper gives no width."""


def update_masks(
    compute: NDArray[np.bool_], loaded: NDArray[np.bool_], calibrate: bool
) -> NDArray[np.bool_]:
    """Channels that each token of one expert computes on, bool [tokens, C].

    Args:
        compute: channels that each token needs, [tokens, C].
        loaded: channels that were loaded, [C].
        calibrate: all loaded channels, instead of those of the token's own that were loaded.
    """
    return np.broadcast_to(loaded, compute.shape) if calibrate else compute & loaded


def update_cycles(channels: int) -> int:
    return ceil(channels / CHANNELS_PER_CYCLE)

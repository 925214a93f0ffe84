"""Scoring channels by depth: a reconfigurable adder tree against a fixed one (section IV-C, Figure 10a).

Two trees of 64 lanes work side by side, one for the channel score and one for the salience score, on one channel of one
expert at a time. The lanes hold that expert's tokens, sorted by depth. A fixed tree adds all of its lanes, so it takes a pass
for each depth; a reconfigurable one adds neighbours of one depth and lets others by, so all depths share a pass.
"""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

LANES = 64
"""Tokens that enter at once: the candidates of a stage (section II-B)."""
LATENCY = int(log2(LANES)) + 1
"""Levels of adders, and the comparison with sr x S_c."""

Counts = NDArray[np.int64]
Segment = tuple[int, NDArray[np.float32]]
"""A depth, and the sum over its lanes for every channel."""


def reconfigurable_tree(values: NDArray[np.float32], depth: NDArray[np.int64]) -> dict[int, NDArray[np.float32]]:
    """Sums of the lanes of each depth in one pass.

    Args:
        values: [lanes, C].
        depth: of each lane, ascending, [lanes].

    Returns:
        For each depth its sum, [C].
    """
    nodes: list[list[Segment]] = [[(int(d), value)] for d, value in zip(depth, values, strict=True)]
    while len(nodes) > 1:
        nodes = [_join(*nodes[i : i + 2]) if i + 1 < len(nodes) else nodes[i] for i in range(0, len(nodes), 2)]
    return dict(nodes[0]) if nodes else {}


def _join(left: list[Segment], right: list[Segment]) -> list[Segment]:
    """One adder: adds where the neighbours are of one depth, lets both by where not."""
    if left[-1][0] != right[0][0]:
        return left + right
    return [*left[:-1], (left[-1][0], left[-1][1] + right[0][1]), *right[1:]]


def coalesce(
    score: NDArray[np.float32], mask: NDArray[np.bool_], depth: NDArray[np.int64], selection_ratio: float
) -> NDArray[np.bool_]:
    """Channels of one expert that are loaded, bool [C]; as `salient_channels` for this expert.

    Args:
        score: |IA| x A_t of each token of the expert, [tokens, C].
        mask: channels that each token needs, bool [tokens, C].
        depth: of each token, [tokens].
    """
    order = np.argsort(depth, kind="stable")
    channel: dict[int, NDArray[np.float32]] = {}
    salience: dict[int, NDArray[np.float32]] = {}
    for start in range(0, len(order), LANES):
        lanes = order[start : start + LANES]
        for total, values in ((channel, score), (salience, score * mask)):
            for d, part in reconfigurable_tree(values[lanes], depth[lanes]).items():
                total[d] = total[d] + part if d in total else part
    loaded = [salience[d] > np.float32(selection_ratio) * channel[d] for d in channel]
    return np.logical_or.reduce(loaded, axis=0) if loaded else np.zeros(score.shape[1], bool)


def reconfigurable_cycles(channels: int, tokens: Counts) -> Counts:
    """Cycles to score all channels for each expert, [U], whose ``tokens`` [U] enter together: a channel a cycle."""
    return channels * -(-tokens // LANES) + LATENCY


def fixed_cycles(channels: int, depths: Counts) -> Counts:
    """The same with a fixed tree, for experts whose tokens have ``depths`` distinct depths [U], none with over 64 tokens."""
    return channels * depths + LATENCY

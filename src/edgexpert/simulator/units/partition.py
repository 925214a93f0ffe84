"""Prompt tokens by importance: threshold partitioning (section IV-B, Figure 8a) and the sorting that the paper rejects."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

WIDTH = 128
"""Tokens a cycle (section IV-B)."""
PIPELINE = 3
"""Stages of the partitioning network: compare, route, write."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Attributes:
        groups: token ids of the major, minor and trivial tokens.
        cycles: until the last token is in its group.
    """

    groups: tuple[NDArray[np.int64], ...]
    cycles: int


def compact(values: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.int64]:
    """A butterfly that moves kept values to the front without changing their order.

    A value has to pass as many places as values before it are dropped; stage b of the network moves it by 2^b where bit b of
    that number is set. No two values meet, because the number never falls from one kept value to the next.
    """
    lanes = 1 << (len(values) - 1).bit_length()
    place = np.cumsum(~keep) * keep  # places to move
    lane = [(int(value), int(moves)) if kept else None for value, moves, kept in zip(values, place, keep, strict=True)]
    lane += [None] * (lanes - len(lane))
    for stage in range(lanes.bit_length() - 1):
        moved: list[tuple[int, int] | None] = [None] * lanes
        for position, token in enumerate(lane):
            if token is not None:
                target = position - (token[1] & (1 << stage))
                assert moved[target] is None, "two tokens meet in the network"
                moved[target] = token
        lane = moved
    return np.array([token[0] for token in lane if token is not None], dtype=np.int64)


def threshold_partition(weights: NDArray[np.float32], theta1: float, theta2: float) -> Partition:
    """Ternary comparators and a butterfly for each group, a block of 128 tokens a cycle.

    A register keeps the largest weight while the prompt's weights are written; without a token as heavy as ``theta1`` it
    takes that threshold's place (`token_tiers`).
    """
    major = min(np.float32(theta1), weights.max())
    groups: list[list[NDArray[np.int64]]] = [[], [], []]
    for start in range(0, len(weights), WIDTH):
        block = weights[start : start + WIDTH]
        token = np.arange(start, start + len(block))
        below = (block < major).astype(int)
        label = below + below * (block < np.float32(theta2))
        for group in range(3):
            groups[group].append(compact(token, label == group))
    return Partition(tuple(np.concatenate(group) for group in groups), threshold_cycles(len(weights)))


def threshold_cycles(tokens: int) -> int:
    return ceil(tokens / WIDTH) + PIPELINE - 1


def sorting_partition(weights: NDArray[np.float32], theta1: float, theta2: float) -> Partition:
    """Chunks of 128 through a bitonic sorter, then merged two by two; the thresholds cut the sorted list."""
    chunks = [_bitonic(weights[start : start + WIDTH], start) for start in range(0, len(weights), WIDTH)]
    while len(chunks) > 1:
        chunks = [_merge(*chunks[i : i + 2]) if i + 1 < len(chunks) else chunks[i] for i in range(0, len(chunks), 2)]
    order = np.array([token for _, token in chunks[0]], dtype=np.int64)
    heavy = weights[order]
    major = heavy >= min(np.float32(theta1), heavy[0])
    minor = ~major & (heavy >= np.float32(theta2))
    return Partition((order[major], order[minor], order[~major & ~minor]), sorting_cycles(len(weights)))


def sorting_cycles(tokens: int) -> int:
    """A chunk enters the pipelined sorter every cycle; a merger of two sorted lists gives 128 tokens each time its network of
    compare-swap stages has settled, for what it takes next depends on what it gave.
    """
    chunks, stages = ceil(tokens / WIDTH), int(log2(WIDTH))
    sort = stages * (stages + 1) // 2 + chunks - 1
    merge, lists = 0, chunks
    while lists > 1:
        merge += (chunks - (lists % 2) * _tail(chunks, lists)) * (stages + 1)
        lists = ceil(lists / 2)
    return sort + merge


def _tail(chunks: int, lists: int) -> int:
    """Chunks in the last list of an odd number, which passes a level unmerged."""
    size = 1
    while ceil(chunks / size) > lists:
        size *= 2
    return chunks - (lists - 1) * size


def _bitonic(weights: NDArray[np.float32], first: int) -> list[tuple[float, int]]:
    """Sorted by weight, heaviest first, ties by token, through a bitonic network of compare-swaps."""
    lanes = 1 << (len(weights) - 1).bit_length()
    items = [(-float(weight), first + i) for i, weight in enumerate(weights)]
    items += [(np.inf, first + i) for i in range(len(items), lanes)]
    size = 2
    while size <= lanes:
        stride = size // 2
        while stride:
            for low in range(lanes):
                high = low ^ stride
                if high > low and (items[low] > items[high]) == (low & size == 0):
                    items[low], items[high] = items[high], items[low]
            stride //= 2
        size *= 2
    return [item for item in items if item[0] < np.inf]


def _merge(left: list[tuple[float, int]], right: list[tuple[float, int]]) -> list[tuple[float, int]]:
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]

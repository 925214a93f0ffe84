"""External memory: against a cycle simulator's figures, and against an open-row table kept burst by burst."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.simulator.device import load_device
from edgexpert.simulator.dram import count_accesses, count_mask_accesses, seconds

DRAM = load_device("edgexpert").dram
SIXTEEN_GIGABIT = replace(DRAM, mode="closed", trfc=812)


@pytest.mark.parametrize(("run", "keep", "gigabytes_per_second"), [
    (1024, 1.0, 15.22), (384, 0.7, 15.21), (384, 0.5, 15.20), (384, 0.3, 15.18), (384, 0.1, 15.13), (1024, 0.1, 15.11),
    (64, 0.1, 15.14), (64, 0.02, 9.71), (32, 0.02, 9.61),
])
def test_the_closed_form_is_within_3_percent_of_a_cycle_simulator(run: int, keep: float, gigabytes_per_second: float) -> None:
    mask = np.random.default_rng(0).random((1, (64 << 20) // run)) < keep
    bursts, activations = count_mask_accesses(SIXTEEN_GIGABIT, mask, run)
    time = seconds(SIXTEEN_GIGABIT, np.array([0.0]), bursts.astype(float), activations.astype(float))
    assert mask.sum() * run / time[0] / 1e9 == pytest.approx(gigabytes_per_second, rel=0.03)


def test_without_look_ahead_short_runs_lose_a_third_of_the_bandwidth_or_more() -> None:
    mask = np.random.default_rng(0).random((1, 100_000)) < 0.1
    bursts, activations = (count.astype(float) for count in count_mask_accesses(DRAM, mask, 384))
    times = {mode: float(seconds(replace(DRAM, mode=mode), np.array([mask.sum() * 384.0]), bursts, activations)[0])
             for mode in ("flat", "closed", "inorder")}
    assert times["inorder"] > 1.5 * times["closed"]
    assert times["closed"] == pytest.approx(times["flat"], rel=0.05)


def runs() -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9000)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(first=runs(), second=runs(), channels=st.sampled_from([1, 2, 4]))
def test_counts_equal_an_open_row_table(first: list[tuple[int, int]], second: list[tuple[int, int]], channels: int) -> None:
    dram = replace(DRAM, channels=channels)
    starts, lengths, owner = [], [], []
    expected_bursts, expected_rows = [], []
    for number, gaps in enumerate((first, second)):
        position, bursts = 0, set()
        for gap, length in gaps:
            start = position + gap
            starts, lengths, owner = [*starts, start], [*lengths, length], [*owner, number]
            bursts |= set(range(start // 32, (start + length - 1) // 32 + 1))
            position = start + length
        expected_bursts.append(len(bursts))
        expected_rows.append(len({(burst % channels, burst // channels // 64) for burst in bursts}))
    counted = count_accesses(dram, np.array(starts), np.array(lengths), np.array(owner), 2)
    assert [list(count) for count in counted] == [expected_bursts, expected_rows]

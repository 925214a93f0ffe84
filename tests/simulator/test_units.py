"""The units of the top controller give, bit for bit, what the policies decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.core.routing import Routing, Scores
from edgexpert.policy.coalescing import salient_channels
from edgexpert.policy.importance import Tier, token_tiers
from edgexpert.policy.reuse import reuse_experts
from edgexpert.simulator.units.adder_tree import coalesce, fixed_cycles, reconfigurable_cycles, reconfigurable_tree
from edgexpert.simulator.units.mask_update import update_masks
from edgexpert.simulator.units.partition import (
    Partition,
    compact,
    sorting_cycles,
    sorting_partition,
    threshold_cycles,
    threshold_partition,
)
from edgexpert.simulator.units.union import SharedExpertSet, reuse_route

MANY = settings(max_examples=40, deadline=None)


@MANY
@given(tokens=st.integers(1, 400), seed=st.integers(0, 10_000), scale=st.sampled_from([0.3, 1.0, 3.0]))
def test_both_partitions_give_the_policys_tiers(tokens: int, seed: int, scale: float) -> None:
    weights = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) * scale
    tiers = token_tiers(weights, 0.8, 0.4)
    expected = [torch.nonzero(tiers == tier).squeeze(1).tolist() for tier in Tier]
    by_threshold = threshold_partition(weights.numpy(), 0.8, 0.4)
    assert [group.tolist() for group in by_threshold.groups] == expected  # in the order of the prompt
    by_sorting = sorting_partition(weights.numpy(), 0.8, 0.4)
    assert [sorted(group.tolist()) for group in by_sorting.groups] == expected
    heaviest_first = np.concatenate(by_sorting.groups)
    assert (np.diff(weights.numpy()[heaviest_first]) <= 0).all()
    assert by_sorting.cycles >= by_threshold.cycles


@MANY
@given(keep=st.lists(st.booleans(), min_size=1, max_size=128))
def test_the_butterfly_keeps_the_order_of_what_it_keeps(keep: list[bool]) -> None:
    values = np.arange(len(keep))
    assert compact(values, np.array(keep)).tolist() == values[keep].tolist()


def test_threshold_partitioning_takes_a_block_of_128_a_cycle_and_three_stages() -> None:
    assert [threshold_cycles(tokens) for tokens in (1, 128, 129, 1024)] == [3, 3, 4, 10]
    assert threshold_partition(np.ones(129, np.float32), 0.8, 0.4).cycles == 4


def test_sorting_grows_faster_than_the_prompt_and_threshold_partitioning_does_not() -> None:
    lengths = [128, 256, 512, 1024, 2048]
    sorting, threshold = ([cycles(n) / n for n in lengths] for cycles in (sorting_cycles, threshold_cycles))
    assert sorting[1:] == sorted(sorting[1:]) and sorting[-1] > 1.5 * sorting[1]
    assert threshold == sorted(threshold, reverse=True)


@pytest.mark.parametrize("tokens", [1, 128, 129, 384, 500, 1000])
def test_merging_cycles_count_every_block_that_a_merger_gives(tokens: int) -> None:
    blocks = [1] * -(-tokens // 128)
    cycles = 28 + len(blocks) - 1
    while len(blocks) > 1:
        pairs = [blocks[i : i + 2] for i in range(0, len(blocks), 2)]
        cycles += sum(8 * sum(pair) for pair in pairs if len(pair) == 2)
        blocks = [sum(pair) for pair in pairs]
    assert sorting_cycles(tokens) == cycles


@MANY
@given(tokens=st.integers(1, 60), experts=st.integers(4, 24), seed=st.integers(0, 10_000))
def test_partition_union_and_routing_are_algorithm_1(tokens: int, experts: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    choice = torch.rand(tokens, experts, generator=random)
    importance = torch.rand(tokens, generator=random)
    top_k, budgets = 3, ((3, 2), (4, 1))
    weights, chosen = choice.topk(top_k)
    routing = Routing(chosen, weights, experts)
    tiers = token_tiers(importance, 0.7, 0.3)
    expected = reuse_experts(routing, Scores(choice, choice, normalise=False), tiers, *budgets)

    groups: Partition = threshold_partition(importance.numpy(), 0.7, 0.3)
    shared = SharedExpertSet()
    shared.join(chosen[groups.groups[0]].tolist())
    routed = {token: chosen[token].tolist() for token in groups.groups[0].tolist()}
    for group, (k, n) in zip(groups.groups[1:], budgets, strict=True):
        best = {token: choice[token].topk(k).indices.tolist() for token in group.tolist()}
        decided = {token: reuse_route(candidates, shared, n) for token, candidates in best.items()}
        shared.join(list(decided.values()))
        routed |= decided
    for token in range(tokens):
        assert routed[token] == [e for e in expected.experts[token].tolist() if e < experts]
    assert [expert for expert in range(experts) if expert in shared] == expected.loaded.tolist()
    assert shared.cycles == sum(-(-len(group) // 128) for group in groups.groups)


@MANY
@given(tokens=st.integers(1, 150), channels=st.integers(1, 40), seed=st.integers(0, 10_000),
       ratio=st.sampled_from([0.0, 0.5, 0.7, 0.9]))
def test_the_reconfigurable_tree_loads_the_policys_channels(tokens: int, channels: int, seed: int, ratio: float) -> None:
    random = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 256, (tokens, channels), generator=random).float()  # integers, as on the chip: sums are exact
    mask = torch.rand(tokens, channels, generator=random) < 0.6
    depth = torch.randint(0, 7, (tokens,), generator=random)
    expected = salient_channels(score, mask, torch.zeros(tokens, dtype=torch.long), depth, 1, ratio)[0]
    assert (coalesce(score.numpy(), mask.numpy(), depth.numpy(), ratio) == expected.numpy()).all()


@MANY
@given(depth=st.lists(st.integers(0, 6), min_size=1, max_size=64))
def test_one_pass_sums_every_depth(depth: list[int]) -> None:
    lanes = np.sort(np.array(depth))
    values = np.arange(len(lanes), dtype=np.float32)[:, None]
    sums = reconfigurable_tree(values, lanes)
    assert {d: float(total[0]) for d, total in sums.items()} == {d: float(values[lanes == d].sum()) for d in set(depth)}


def test_a_fixed_tree_takes_a_pass_for_each_depth() -> None:
    tokens, depths = np.array([64, 10, 65]), np.array([7, 4, 2])
    reconfigurable, fixed = reconfigurable_cycles(1000, tokens), fixed_cycles(1000, depths)
    latency = reconfigurable[0] - 1000
    assert (reconfigurable - latency).tolist() == [1000, 1000, 2000]
    assert (fixed - latency).tolist() == [7000, 4000, 2000]


@MANY
@given(tokens=st.integers(1, 20), channels=st.integers(1, 40), seed=st.integers(0, 10_000))
def test_mask_updates_are_the_policys_calibration(tokens: int, channels: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    compute, loaded = random.random((tokens, channels)) < 0.5, random.random(channels) < 0.5
    assert (update_masks(compute, loaded, calibrate=False) == (compute & loaded)).all()
    assert (update_masks(compute, loaded, calibrate=True) == np.tile(loaded, (tokens, 1))).all()

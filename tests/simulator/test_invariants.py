"""What must hold for any workload and device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.shapes import ExpertShape, Storage
from edgexpert.policy import PRESETS
from edgexpert.simulator.device import load_device
from edgexpert.simulator.energy import GROUPS, grouped, total
from edgexpert.simulator.jobs import PARTS
from edgexpert.simulator.program import Resource, compile_stage
from edgexpert.simulator.run import simulate, simulate_stage
from edgexpert.simulator.shapes import model_named
from edgexpert.simulator.workload import PlannedStage, dense_decode, dense_prefill
from tests.simulator.workloads import MODEL, edgexpert, planned, random_scores, random_stage, resolved, text

DEVICE = edgexpert()
SHAPE = ExpertShape(MODEL.hidden, MODEL.intermediate, 2 * MODEL.intermediate, DEVICE.format)


@settings(max_examples=30, deadline=None)
@given(policy=st.sampled_from(sorted(PRESETS)), kind=st.sampled_from(["prefill", "verify"]), tokens=st.integers(1, 40),
       seed=st.integers(0, 1000), mode=st.sampled_from(["flat", "closed", "inorder"]))
def test_bytes_equal_those_of_the_plans_and_latency_respects_the_roofline(
    policy: str, kind: str, tokens: int, seed: int, mode: str
) -> None:
    random = torch.Generator().manual_seed(seed)
    stage = planned(resolved(policy), random_stage(kind, tokens, random), seed)
    device = edgexpert(dram={"mode": mode})
    result, timeline = simulate_stage(MODEL, device, stage, reuse=resolved(policy).prompt_wise_expert_reuse)
    assert result.read["experts"] == pytest.approx(sum(plan.bytes(SHAPE) for plan in stage.plans))  # type: ignore[union-attr]
    assert result.latency >= sum(result.macs.values()) / device.peak_macs
    if mode == "flat":
        assert result.latency >= result.bytes / device.dram.bandwidth * (1 - 1e-12)
    assert max(result.busy.values()) <= result.latency * (1 + 1e-12)
    assert result.latency <= sum(result.busy.values()) * (1 + 1e-12)
    assert (timeline.start >= -1e-15).all()
    assert 0 < result.sram <= device.memory.shared


@settings(max_examples=20, deadline=None)
@given(policy=st.sampled_from(sorted(PRESETS)), kind=st.sampled_from(["prefill", "verify"]), seed=st.integers(0, 1000))
def test_instructions_wait_for_what_they_need_and_resources_do_one_thing_at_a_time(policy: str, kind: str, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    stage = planned(resolved(policy), random_stage(kind, 20, random), seed, draft_steps=2 if kind == "verify" else 0)
    timeline = simulate_stage(MODEL, DEVICE, stage, reuse=resolved(policy).prompt_wise_expert_reuse)[1]
    program = timeline.program
    for waits in (program.first, program.second):
        assert (waits < np.arange(len(program))).all()
        some = waits >= 0
        assert (timeline.start[some] >= timeline.finish[waits[some]] - 1e-15).all()
    for resource in Resource:
        mine = program.resource == resource
        assert (timeline.start[mine][1:] >= timeline.finish[mine][:-1] - 1e-15).all()


def test_energy_is_the_sum_of_its_parts() -> None:
    result = simulate(MODEL, DEVICE, text("edgexpert"), reuse=True)
    groups = grouped(result.decode.energy)
    assert sorted(part for parts in GROUPS.values() for part in parts) == sorted(PARTS)
    assert sum(sum(kinds.values()) for kinds in groups.values()) == pytest.approx(result.decode.joules)
    assert all(value >= 0 for kinds in groups.values() for value in kinds.values())
    moved = sum(result.decode.read.values()) * 4.5 + sum(result.decode.write.values()) * 2.9
    assert total(result.decode.energy, "dram") == pytest.approx(moved * 8e-12)
    macs = sum(result.decode.macs.values())
    assert result.decode.joules - moved * 8e-12 == pytest.approx(macs * DEVICE.power_w / DEVICE.peak_macs)


def test_doubling_the_energy_of_memory_changes_only_the_energy_of_memory() -> None:
    once = simulate(MODEL, DEVICE, text("edgexpert"), reuse=True)
    twice = simulate(MODEL, edgexpert(dram={"read_pj_per_bit": 9.0, "write_pj_per_bit": 5.8}), text("edgexpert"), reuse=True)
    for part in PARTS:
        before, after = once.decode.energy[part], twice.decode.energy[part]
        assert after == {"dram": pytest.approx(2 * before["dram"]), "sram": before["sram"], "logic": before["logic"]}
    assert twice.latency == once.latency


@pytest.mark.parametrize("better", ["dram.bandwidth", "array.cores", "array.clusters", "memory.shared", "clock_hz"])
@pytest.mark.parametrize("slow", [{}, {"dram": {"bandwidth": 1e12}}, {"memory": {"shared": 4096}}])
def test_more_of_anything_is_never_slower_and_never_moves_more(better: str, slow: dict[str, Any]) -> None:
    device = edgexpert(**slow)
    table, _, key = better.rpartition(".")
    part = getattr(device, table) if table else device
    doubled = replace(part, **{key: 2 * getattr(part, key)})
    before = simulate(MODEL, device, text("edgexpert"), reuse=True)
    after = simulate(MODEL, replace(device, **{table: doubled}) if table else doubled, text("edgexpert"), reuse=True)
    assert after.latency <= before.latency
    assert after.decode.bytes <= before.decode.bytes


def test_memory_bound_latency_halves_with_twice_the_bandwidth_and_energy_stays() -> None:
    model = model_named("granite-1b-a400m")
    once, twice = (simulate(model, edgexpert(dram={"bandwidth": width}), dense_decode(model)) for width in (8e9, 16e9))
    assert once.latency / twice.latency == pytest.approx(2, rel=0.01)
    assert once.joules == twice.joules


def test_more_experts_context_or_candidates_are_never_cheaper() -> None:
    model = model_named("granite-1b-a400m")

    def cost(**workload: Any) -> tuple[float, float]:
        result = simulate(model, DEVICE, dense_decode(model, **{"candidates": 16, "experts": 16, "prefix": 128} | workload))
        return result.latency, result.joules

    base = cost()
    for more in ({"experts": 20}, {"prefix": 256}, {"candidates": 32}, {"draft_steps": 1}):
        assert all(after > before for before, after in zip(base, cost(**more), strict=True)), more


def test_a_layer_without_computation_worth_mentioning_takes_as_long_as_its_bytes() -> None:
    result, _ = simulate_stage(MODEL, edgexpert(dram={"bandwidth": 1e6}), next(dense_decode(MODEL, prefix=0)))
    assert result.latency == pytest.approx(result.bytes / 1e6, rel=0.01)


def test_a_layer_without_memory_worth_mentioning_takes_as_long_as_its_cycles() -> None:
    device = edgexpert(dram={"bandwidth": 1e18}, units={"simd_lanes": 10**9, "noc_bytes_per_cycle": 10**9})
    result, timeline = simulate_stage(MODEL, device, next(dense_decode(MODEL, candidates=64, experts=8, prefix=0)))
    units = (timeline.program.resource == Resource.SIMD) | (timeline.program.resource == Resource.NOC)
    assert result.busy["pe"] <= result.latency <= result.busy["pe"] + units.sum() / device.clock_hz


def test_the_same_workload_gives_identical_results() -> None:
    first, second = (simulate(MODEL, DEVICE, text("edgexpert"), reuse=True).to_json() for _ in range(2))
    assert first == second


def test_keeping_every_channel_is_loading_experts_whole() -> None:
    stage = random_stage("verify", 12, torch.Generator().manual_seed(0))
    keep_all = replace(resolved("pruned"), coarse_pruning=False, keep_channels=1.0)
    whole, kept = (simulate_stage(MODEL, load_device("smolpu"), planned(policy, stage, seed=1))[0]
                   for policy in (resolved("exact"), keep_all))
    assert (kept.bytes, kept.macs) == (pytest.approx(whole.bytes), pytest.approx(whole.macs))


def test_pruning_coalescing_and_reuse_never_load_more() -> None:
    prefill, decode = {}, {}
    for name in PRESETS:
        result = simulate(MODEL, DEVICE, text(name), reuse=resolved(name).prompt_wise_expert_reuse)
        prefill[name], decode[name] = result.prefill.read["experts"], result.decode.read["experts"]
    assert decode["exact"] >= decode["pruned"] == decode["reuse"] >= decode["coalesced"] == decode["edgexpert"]
    assert prefill["exact"] == prefill["pruned"] >= prefill["reuse"] == prefill["edgexpert"]


def test_calibration_computes_more_and_loads_the_same() -> None:
    coalesced, calibrated = (simulate(MODEL, DEVICE, text(name), reuse=True) for name in ("coalesced", "edgexpert"))
    assert calibrated.decode.macs["experts"] > coalesced.decode.macs["experts"]
    assert calibrated.decode.bytes == coalesced.decode.bytes


def test_experts_stored_with_an_index_cost_their_bytes_and_skip_only_where_the_array_can() -> None:
    random = torch.Generator().manual_seed(0)
    storage = Storage(torch.full((MODEL.experts,), 0.5, dtype=torch.float64), index_bits=1.0)
    stage = random_stage("verify", 12, random)
    plans = [LayerPlan(layer, random_scores(12, random)[0], storage=storage) for layer in MODEL.moe_layers]
    whole, skipping = (simulate_stage(MODEL, load_device(name), PlannedStage(stage, plans, 1))[0]
                       for name in ("edgexpert", "moe-pruner-sd"))
    assert whole.read["experts"] == skipping.read["experts"] == pytest.approx(sum(plan.bytes(SHAPE) for plan in plans))
    assert skipping.macs["experts"] == pytest.approx(whole.macs["experts"] / 2)


def test_prompts_of_more_than_about_85_tokens_spill() -> None:
    """512 KB hold 85 tokens of an 8-bit input and a 16-bit sum of 2048 values; intermediate values take some of that."""
    model = model_named("olmoe-1b-7b")
    spilled = {tokens: simulate(model, DEVICE, [dense_prefill(model, tokens)]).prefill.spill for tokens in (75, 86, 128)}
    assert spilled[75] == 0 < spilled[86] < spilled[128]
    roomy = simulate(model, edgexpert(memory={"shared": 1 << 20}), [dense_prefill(model, 128)])
    assert roomy.prefill.spill == 0


def test_64_candidates_fit_into_the_shared_memory() -> None:
    result, _ = simulate_stage(model_named("qwen3-30b-a3b"), DEVICE,
                               next(dense_decode(model_named("qwen3-30b-a3b"), candidates=64, experts=52)))
    assert result.spill == 0
    assert 384 << 10 < result.sram <= 512 << 10


@pytest.mark.parametrize("shared", [100, 4096, 20_000])
@pytest.mark.parametrize("policy", ["exact", "edgexpert"])
def test_the_shared_memory_never_overflows_however_small(shared: int, policy: str) -> None:
    device = edgexpert(memory={"shared": shared})
    for stage in text(policy):
        program = compile_stage(MODEL, device, stage, reuse=policy == "edgexpert")
        assert (program.sram <= shared).all()
        assert program.jobs["fetch"].sum() + program.jobs["write"].sum() > 0


def test_what_does_not_fit_together_is_refused() -> None:
    stage = next(dense_decode(MODEL))
    with pytest.raises(UserError, match="2 MoE layers, but granite-1b-a400m has 24"):
        simulate_stage(model_named("granite-1b-a400m"), DEVICE, stage)
    with pytest.raises(UserError, match="no unit for prompt-wise expert reuse"):
        simulate(MODEL, load_device("smolpu"), text("edgexpert"), reuse=True)
    with pytest.raises(UserError, match="the workload has no stage"):
        simulate(MODEL, DEVICE, [])
    with pytest.raises(UserError, match="cannot load 9 distinct ones"):
        next(dense_decode(MODEL, candidates=64, experts=9))

"""The simulator against the first-order model: weights at 4.5 bits over 16 GB/s (data/firstorder_expected.json).

All workloads are synthetic: every token loads whole experts, as many as given.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgexpert.core.resources import MODELS
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.simulator.device import Device
from edgexpert.simulator.energy import total
from edgexpert.simulator.program import Op
from edgexpert.simulator.run import RunResult, simulate, simulate_stage
from edgexpert.simulator.shapes import ModelShape, model_named
from edgexpert.simulator.workload import PlannedLayer, PlannedMatrix, PlannedStage, dense_decode, dense_prefill
from tests.simulator.test_shapes import BY_NAME, EXPECTED
from tests.simulator.workloads import edgexpert

QWEN = model_named("qwen3-30b-a3b")
DEVICE = edgexpert()
ACCEPTANCE = 4.3  # paper, section I


def plain(model: ModelShape = QWEN, device: Device = DEVICE) -> RunResult:
    return simulate(model, device, dense_decode(model, prefix=EXPECTED["ctx"]))


def naive(experts: float, model: ModelShape = QWEN, device: Device = DEVICE) -> RunResult:
    """One stage of speculative decoding without any technique."""
    return simulate(model, device, dense_decode(model, candidates=64, experts=experts, prefix=EXPECTED["ctx"],
                                                draft_steps=EXPECTED["n_draft"]))


@pytest.fixture(scope="module")
def qwen() -> tuple[RunResult, RunResult]:
    return plain(), naive(52.1)


@pytest.mark.parametrize("name", MODELS)
def test_plain_decoding(name: str) -> None:
    result = plain(model_named(name))
    assert result.tpot is not None
    assert result.tpot * 1e3 == pytest.approx(BY_NAME[name]["au_ms"], rel=0.01)
    assert sum(result.decode.read.values()) == pytest.approx(BY_NAME[name]["au_bytes"], rel=0.001)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_naive_speculation(name: str) -> None:
    model, expected = model_named(name), BY_NAME[name]
    assert model.draft is not None
    result = naive(expected["sd_U"], model).decode
    drafted_cache = EXPECTED["n_draft"] * EXPECTED["ctx"] * model.draft.attention.cached  # which the first-order model leaves out
    assert result.bytes - drafted_cache == pytest.approx(expected["sd_stage_bytes"], rel=0.001)


def test_naive_speculation_on_qwen3_takes_longer_than_plain_decoding(qwen: tuple[RunResult, RunResult]) -> None:
    alone, speculative = qwen
    assert speculative.latency * 1e3 == pytest.approx(EXPECTED["models"]["Qwen3-30B-A3B"]["sd_stage_ms"], rel=0.02)
    assert speculative.latency / ACCEPTANCE / alone.latency == pytest.approx(1.06, abs=0.03)


def test_its_energy_exceeds_plain_decoding_by_a_fifth_or_more_mostly_for_computation(qwen: tuple[RunResult, RunResult]) -> None:
    alone, speculative = qwen
    assert 1.18 < speculative.joules / ACCEPTANCE / alone.joules < 1.28
    memory = [total(result.decode.energy, "dram") for result in qwen]
    assert memory[1] / ACCEPTANCE / memory[0] < 1.10
    assert memory[0] / alone.joules >= 0.98
    assert 0.82 <= memory[1] / speculative.joules <= 0.86


def test_experts_a_layer_may_load_at_50_ms_a_token() -> None:
    low, high = 8.0, 52.0
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if naive(middle).latency / 4.4 < 0.050 else (low, middle)
    assert low == pytest.approx(EXPECTED["models"]["Qwen3-30B-A3B"]["max_U_tpot50"]["4.4"], abs=0.2)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_with_every_expert_touched(name: str) -> None:
    result = simulate(model_named(name), DEVICE, [dense_prefill(model_named(name), 64)])
    assert result.ttft is not None
    assert result.ttft * 1e3 == pytest.approx(BY_NAME[name]["prefill_all_experts_ms"], rel=0.01)


@pytest.mark.parametrize(("tokens", "bound"), [(230, "memory"), (231, "computation")])
def test_weights_are_memory_bound_up_to_230_tokens(tokens: int, bound: str) -> None:
    config = {"model_type": "x", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 1, "vocab_size": 256,
              "num_attention_heads": 16, "num_experts": 1, "num_experts_per_tok": 1}
    model = ModelShape.of(config)
    stage = next(dense_decode(model, candidates=tokens - 1, prefix=0))
    program = simulate_stage(model, DEVICE, stage)[1].program
    experts = program.jobs["expert"][program.job] >= 0
    load, multiply = (program.seconds[experts & (program.op == op)].sum() for op in (Op.LOAD_WEIGHTS, Op.MATMUL))
    assert ("memory" if load > multiply else "computation") == bound


@pytest.mark.parametrize(("keep", "share"), [(0.5, 0.556), (0.25, 1 / 3)])
def test_kept_channels_with_the_scales_of_touched_groups(keep: float, share: float) -> None:
    stage = Stage.verify(TokenTree.of_root(0), prefix=0)

    def layer(number: int, keep: float) -> PlannedLayer:
        random = np.random.default_rng(number)
        matrices = [
            PlannedMatrix(channels, np.packbits(random.random((8, channels)).argsort() < keep * channels, axis=1,
                                                bitorder="little"), np.full(8, int(keep * channels)))
            for channels in (2048, 768)
        ]
        return PlannedLayer(number, np.arange(8), np.ones(8, np.int64), np.ones(8, np.int64), *matrices)

    kept, whole = (
        simulate_stage(QWEN, DEVICE, PlannedStage(stage, [layer(n, k) for n in range(48)], 1))[0].read["experts"]
        for k in (keep, 1.0)
    )
    assert kept / whole == pytest.approx(share, abs=0.001)

"""Traces on devices: a policy's plans through the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.simulator.device import load_device
from edgexpert.simulator.run import simulate
from edgexpert.trace.cases import trace_case

pytest.importorskip("pyarrow")
from edgexpert.trace.read import Trace
from edgexpert.trace.synthesis import synthesise_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "granite.parquet"
    synthesise_trace("granite-1b-a400m", file, stages=1, prompt_tokens=8)
    return file


@pytest.mark.parametrize("device", ["edgexpert", "edgemoe-sd", "moe-pruner-sd", "baseline"])
def test_a_device_loads_the_bytes_that_its_policy_plans(trace: Path, device: str) -> None:
    chip = load_device(device)
    case = trace_case(trace, chip)
    assert case.policy == chip.policy
    stages = list(case.stages())
    result = simulate(case.model, chip, stages, reuse=case.reuse)
    shape = Trace(trace).shape(chip.format)
    expected = sum(plan.bytes(shape) for stage in stages for plan in stage.plans if isinstance(plan, LayerPlan))
    assert result.prefill.read["experts"] + result.decode.read["experts"] == pytest.approx(expected)


def test_a_device_that_does_not_draft_decodes_the_accepted_tokens_one_by_one(trace: Path) -> None:
    plain, speculative = (trace_case(trace, load_device(device)).run() for device in ("moe-pruner-au", "moe-pruner-sd"))
    assert plain.decode.stages == plain.decode.emitted == speculative.decode.emitted >= speculative.decode.stages
    assert plain.decode.experts == plain.decode.stages * 8
    assert sum(plain.decode.energy["draft"].values()) == 0 < sum(speculative.decode.energy["draft"].values())
    assert plain.prefill.latency == speculative.prefill.latency


def test_a_synthetic_trace_stays_labelled(trace: Path) -> None:
    assert trace_case(trace, load_device("edgexpert")).synthetic


def test_a_trace_of_another_model_and_a_policy_that_the_device_cannot_run_are_refused(trace: Path) -> None:
    with pytest.raises(UserError, match="of another model than olmoe-1b-7b"):
        trace_case(trace, load_device("edgexpert"), model="olmoe-1b-7b")
    with pytest.raises(UserError, match="the device EdgeMoE AU decodes plainly"):
        trace_case(trace, load_device("edgemoe-au"), "pruned")
    with pytest.raises(UserError, match="no unit for prompt-wise expert reuse"):
        trace_case(trace, load_device("smolpu"), "edgexpert").run()

"""Recording a packed model changes nothing of the run, whether its layers are native or not; and the trace replays the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import edgexpert
from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.plan import LayerPlan
from edgexpert.core.resources import bundled_folder
from edgexpert.core.routing import ChannelSelection
from edgexpert.kernels import native
from edgexpert.policy import PRESETS
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.sampling import SamplingParams
from edgexpert.trace.read import Trace
from edgexpert.trace.record import record_trace
from tests.packs import make_pack

PARAMS, TREE = SamplingParams(max_new_tokens=16), TreeShape(size=12, depth=4)
PROMPTS = {"stories": ["Once upon a time, a little fox went", "The old bear"]}
OTHERS = ["abcabcabcabc", "the fox and the fox and"]
POLICIES = ("exact", "pruned", "reuse", "edgexpert")
MODELS = ("stories", "olmoe", "qwen3_moe", "deepseek_v2")  # the last one has shared experts, and runs layer by layer


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("pack")
    if request.param != "stories":
        return edgexpert.load(str(make_pack(request.param, folder, num_hidden_layers=3)), draft="ngram")
    convert(open_source("stories"), folder / "stories", PackOptions(4, 32))
    return edgexpert.load(str(folder / "stories"), draft=str(bundled_folder("stories") / "draft"))


def watched(engine: Engine, run: Callable[[], None]) -> tuple[list[list[LayerPlan]], list[dict[str, Any]]]:
    """The plans of all stages, and everything but times that the results say."""
    plans: list[list[LayerPlan]] = []
    told: list[dict[str, Any]] = []
    run_stage, generate = engine.host.run, engine.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.host, "run", lambda *a: (plans.append((out := run_stage(*a)).plans), out)[1])
        patch.setattr(engine, "generate", lambda *a, **k: (told.append((out := generate(*a, **k)).to_json()), out)[1])
        run()
    for facts in told:
        del facts["timing"]
    return plans, told


def same(ours: list[list[LayerPlan]], theirs: list[list[LayerPlan]], rounding: float = 0.0) -> bool:
    """Whether plans are equal, their routing weights but for ``rounding``."""
    assert len(ours) == len(theirs)
    pairs = [pair for stages in zip(ours, theirs, strict=True) for pair in zip(*stages, strict=True)]
    return all(
        a.layer == b.layer
        and torch.equal(a.routing.experts, b.routing.experts)
        and torch.allclose(a.routing.weights, b.routing.weights, rtol=rounding, atol=0.0)
        and same_channels(a.gate_up, b.gate_up) and same_channels(a.down, b.down)
        for a, b in pairs
    )


def same_channels(a: ChannelSelection | None, b: ChannelSelection | None) -> bool:
    if a is None or b is None:
        return a is b
    compute = a.compute is b.compute if a.compute is None or b.compute is None else torch.equal(a.compute, b.compute)
    return torch.equal(a.loaded, b.loaded) and compute


@pytest.mark.parametrize("whole", [True, False], ids=["in one call", "layer by layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_is_the_run_and_replays_to_it(
    policy: str, whole: bool, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whole and engine.host.native is None:
        pytest.skip("this model runs layer by layer" if native.path() != "torch" else "no native kernels here")
    if not whole:
        monkeypatch.setattr(engine.host, "native", None)
    engine.set_policy(PRESETS[policy])
    prompts, file = PROMPTS.get(Path(engine.name).name, OTHERS), tmp_path / "t.parquet"

    def unrecorded() -> None:
        for prompt in prompts:
            engine.generate(prompt, PARAMS, TREE)

    plans, told = watched(engine, unrecorded)
    recorded_plans, recorded = watched(engine, lambda: record_trace(engine, prompts, file, PARAMS, TREE))
    assert recorded == told
    assert same(recorded_plans, plans)
    assert same([stage.plans for stage in Trace(file).replay(PRESETS[policy])], plans, rounding=1e-6)

"""Traces of the bundled model: replay gives the run's own plans; files are complete, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import edgexpert
from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.model.host import HostedModel
from edgexpert.policy import BASELINES, PRESETS, Techniques, policy_named
from edgexpert.runtime.engine import Engine
from edgexpert.simulator.workload import PlannedStage
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.ngram import NgramDraft
from edgexpert.speculation.sampling import SamplingParams
from edgexpert.trace import write
from edgexpert.trace.read import Trace
from edgexpert.trace.record import record_trace
from edgexpert.trace.recorded import RecordedChannels
from edgexpert.trace.schema import KEY, Channels
from tests.conftest import make_model, make_tokenizer

PROMPTS = ["Once upon a time, a little fox went", "The old bear"]
PARAMS = SamplingParams(max_new_tokens=6)
TREE = TreeShape(size=12, depth=4)
Record = Callable[..., tuple[Trace, list[list[LayerPlan]], list[str]]]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return edgexpert.load("stories", dtype="float32")


@pytest.fixture(scope="module")
def record(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Records a run under a policy: its trace, and the plans that the run executed."""
    folder = tmp_path_factory.mktemp("traces")
    known: dict[tuple[str, str], tuple[Trace, list[list[LayerPlan]], list[str]]] = {}

    def run(policy: str = "exact", channels: Channels = "full") -> tuple[Trace, list[list[LayerPlan]], list[str]]:
        if (policy, channels) not in known:
            engine.set_policy(policy_named(policy))
            plans: list[list[LayerPlan]] = []
            texts: list[str] = []
            run_stage, generate = engine.host.run, engine.generate
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine.host, "run", lambda *a: (plans.append((out := run_stage(*a)).plans), out)[1])
                patch.setattr(engine, "generate", lambda *a, **k: texts.append(generate(*a, **k).text))
                file = folder / f"{policy}-{channels}.parquet"
                record_trace(engine, PROMPTS, file, PARAMS, TREE, channels)
            known[policy, channels] = Trace(file), plans, texts
        return known[policy, channels]

    return run


def assert_same(ours: LayerPlan, theirs: LayerPlan) -> None:
    assert ours.layer == theirs.layer
    assert torch.equal(ours.routing.experts, theirs.routing.experts)
    assert torch.equal(ours.routing.weights, theirs.routing.weights)
    for mine, other in ((ours.gate_up, theirs.gate_up), (ours.down, theirs.down)):
        assert (mine is None) == (other is None)
        if isinstance(mine, ChannelSelection) and isinstance(other, ChannelSelection):
            assert torch.equal(mine.loaded, other.loaded)
            assert (mine.compute is None) == (other.compute is None)
            assert mine.compute is None or torch.equal(mine.compute, other.compute)
    assert (ours.storage is None) == (theirs.storage is None)
    assert ours.storage is None or torch.equal(ours.storage.value, theirs.storage.value)


def expert_bytes(trace: Trace, stages: list[PlannedStage], engine: Engine, kind: str) -> float:
    shape = trace.shape(engine.host.blocks[0].shape.format)
    return sum(plan.bytes(shape) for stage in stages if stage.stage.kind == kind for plan in stage.plans)


@pytest.mark.parametrize("policy", [*PRESETS, *BASELINES])
def test_replay_under_the_policy_of_the_run_gives_the_plans_of_the_run(record: Record, engine: Engine, policy: str) -> None:
    trace, executed, _ = record(policy)
    replayed = list(trace.replay(policy_named(policy)))
    assert len(replayed) == len(executed)
    for stage, plans in zip(replayed, executed, strict=True):
        for ours, theirs in zip(stage.plans, plans, strict=True):
            assert_same(ours, theirs)
            assert ours.bytes(trace.shape(engine.host.blocks[0].shape.format)) == theirs.bytes(engine.host.blocks[0].shape)


@pytest.mark.parametrize(("family", "dtype"), [
    ("glm4_moe", torch.float32),  # sigmoid scores, a bias for choosing, forbidden groups
    ("deepseek_v2", torch.float32),  # weights that are not normalised, a dense first layer
    ("qwen3_moe", torch.bfloat16),
])
def test_replay_is_faithful_to_other_routers_and_dtypes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(family, num_hidden_layers=3).to(dtype)
    engine = Engine(HostedModel(model), make_tokenizer(), name=family, draft=NgramDraft())
    engine.set_policy(PRESETS["edgexpert"])
    executed: list[list[LayerPlan]] = []
    run_stage = engine.host.run
    engine.host.run = lambda *a: (executed.append((out := run_stage(*a)).plans), out)[1]  # type: ignore[method-assign]
    record_trace(engine, ["the fox and the fox and the"], tmp_path / "t.parquet", PARAMS, TREE)
    trace = Trace(tmp_path / "t.parquet")
    assert trace.facts.weights_dtype == str(executed[0][0].routing.weights.dtype).removeprefix("torch.")
    for stage, plans in zip(trace.replay(PRESETS["edgexpert"]), executed, strict=True):
        assert stage.draft_steps == 0  # n-grams have no weights
        for ours, theirs in zip(stage.plans, plans, strict=True):
            assert_same(ours, theirs)


def test_recording_changes_no_text(record: Record, engine: Engine) -> None:
    _, _, texts = record("exact")
    engine.set_policy(PRESETS["exact"])
    assert texts == [engine.generate(prompt, PARAMS, TREE).text for prompt in PROMPTS]


def test_an_exact_run_replayed_under_each_policy_loads_less_and_less(record: Record, engine: Engine) -> None:
    trace, _, _ = record("exact")
    runs = {name: list(trace.replay(policy_named(name))) for name in PRESETS}
    decode = {name: expert_bytes(trace, stages, engine, "verify") for name, stages in runs.items()}
    prefill = {name: expert_bytes(trace, stages, engine, "prefill") for name, stages in runs.items()}
    assert decode["exact"] > decode["pruned"] == decode["reuse"] > decode["coalesced"] == decode["edgexpert"]
    assert prefill["exact"] == prefill["pruned"] > prefill["reuse"] == prefill["edgexpert"]
    for exact, pruned in zip(runs["exact"], runs["pruned"], strict=True):
        for all_experts, fewer in zip(exact.plans, pruned.plans, strict=True):
            assert set(fewer.routing.loaded.tolist()) <= set(all_experts.routing.loaded.tolist())


def test_an_exact_run_replayed_under_edgemoe_saves_what_it_promises(record: Record, engine: Engine) -> None:
    trace, _, _ = record("exact")
    read = {
        name: sum(expert_bytes(trace, list(trace.replay(policy_named(name))), engine, kind) for kind in ("prefill", "verify"))
        for name in ("exact", "edgemoe")
    }
    assert 1 - read["edgemoe"] / read["exact"] == pytest.approx(0.35, abs=0.005)


def test_stages_tell_the_trees_and_what_was_accepted(record: Record, engine: Engine) -> None:
    trace, _, texts = record("exact")
    stages = list(trace.stages())
    for number, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        prefill, *verify = [stage for stage in stages if stage.text == number]
        assert prefill.stage.tokens.tolist() == engine.encode(prompt)
        assert prefill.stage.importance is not None
        assert prefill.emitted == 1
        assert float(prefill.stage.importance.mean()) == pytest.approx(1, abs=1e-4)
        prefix = len(prefill.stage.tokens)
        emitted: list[int] = []
        for stage in verify:
            tree = stage.stage.tree
            assert tree is not None
            assert stage.stage.prefix == prefix
            assert stage.accepted[0] == 0
            assert [int(tree.parents[node]) for node in stage.accepted[1:]] == stage.accepted[:-1]
            assert stage.emitted == len(stage.accepted)
            assert stage.draft_steps == int(tree.depth.max())
            emitted += tree.tokens[stage.accepted].tolist()
            prefix += stage.emitted
        assert text.startswith(engine.tokenizer.decode(emitted)[:20])


def test_pandas_polars_and_duckdb_read_a_trace_in_one_line(record: Record) -> None:
    file = record("exact")[0].file
    rows = len(pandas.read_parquet(file).query("layer.isna()"))
    assert rows == polars.read_parquet(file).filter(polars.col("layer").is_null()).height
    assert rows == duckdb.sql(f"SELECT count(*) FROM '{file}' WHERE layer IS NULL").fetchall()[0][0]
    assert rows == len(list(record("exact")[0].stages()))


def test_rows_are_written_in_bounded_groups(record: Record, engine: Engine, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "ROW_GROUP_BYTES", 100_000)
    engine.set_policy(PRESETS["exact"])
    record_trace(engine, PROMPTS, tmp_path / "t.parquet", PARAMS, TREE)
    assert pq.ParquetFile(tmp_path / "t.parquet").num_row_groups >= 3
    again = [stage.stage.tokens.tolist() for stage in Trace(tmp_path / "t.parquet").stages()]
    assert again == [stage.stage.tokens.tolist() for stage in record("exact")[0].stages()]


def test_a_run_that_fails_leaves_no_file(engine: Engine, tmp_path: Path) -> None:
    engine.set_policy(PRESETS["exact"])
    with pytest.raises(UserError, match="shorten the prompt"):
        record_trace(engine, [PROMPTS[0], "far too long " * 2000], tmp_path / "t.parquet", PARAMS, TREE)
    assert list(tmp_path.iterdir()) == []


# -- what a trace does not hold ------------------------------------------------------------------------------------------------


def test_without_channels_a_policy_that_needs_them_names_the_option(record: Record) -> None:
    trace, _, _ = record("exact", "none")
    assert len(list(trace.replay(PRESETS["exact"]))) > 2
    with pytest.raises(UserError, match="recorded with `channels` none; record it with `channels` full"):
        list(trace.replay(PRESETS["pruned"]))
    coarse = Techniques("coarse", coarse_pruning=True)
    assert len(list(trace.replay(coarse))) == len(list(trace.stages()))


def test_a_sample_of_stages_is_replayed_when_asked_for(engine: Engine, tmp_path: Path) -> None:
    engine.set_policy(PRESETS["exact"])
    file = tmp_path / "t.parquet"
    record_trace(engine, PROMPTS * 2, file, PARAMS, TreeShape(size=0), "sampled")  # one token a stage: many stages
    trace = Trace(file)
    verify = [stage for stage in trace.stages() if stage.stage.tree is not None]
    sampled = [stage for stage in verify if stage.layers[0].channels is not None]
    assert 0 < len(sampled) < len(verify) / 2
    with pytest.raises(UserError, match="sampled_only"):
        list(trace.replay(PRESETS["pruned"]))
    replayed = [stage for stage in trace.replay(PRESETS["pruned"], sampled_only=True) if stage.stage.tree is not None]
    assert len(replayed) == len(sampled)


def test_a_pair_that_never_ran_is_refused_with_the_way_out(record: Record) -> None:
    layer = list(record("exact")[0].stages())[1].layers[0]
    channels = layer.channels
    assert isinstance(channels, RecordedChannels)
    pruned = layer.exact.experts.clone()
    pruned[0, 0] = layer.exact.num_experts
    ran = Routing(pruned, layer.exact.weights, layer.exact.num_experts)
    without = replace(channels, ran=pruned, down_input=channels.down(ran))
    assert torch.equal(without.down(ran), channels.down(ran))
    with pytest.raises(UserError, match="record the run under that `policy`"):
        without.down(layer.exact)


def test_down_inputs_are_found_for_pairs_in_any_order(record: Record) -> None:
    layer = list(record("exact")[0].stages())[1].layers[0]
    channels = layer.channels
    assert isinstance(channels, RecordedChannels)
    turned = replace(layer.exact, experts=layer.exact.experts.flip(1), weights=layer.exact.weights.flip(1))
    shape = (*layer.exact.experts.shape, -1)
    assert torch.equal(channels.down(turned).view(shape).flip(1), channels.down(layer.exact).view(shape))


def test_quantile_importance_cannot_become_another(record: Record, engine: Engine, tmp_path: Path) -> None:
    exact = record("exact")[0]
    by_maximum = next(exact.replay(replace(PRESETS["reuse"], importance="max"))).stage.importance
    assert by_maximum is not None
    assert float(by_maximum.max()) == pytest.approx(1)
    engine.set_policy(replace(PRESETS["reuse"], importance="quantile"))
    record_trace(engine, PROMPTS[:1], tmp_path / "t.parquet", replace(PARAMS, max_new_tokens=2), TREE)
    with pytest.raises(UserError, match="`importance` mean"):
        list(Trace(tmp_path / "t.parquet").replay(PRESETS["reuse"]))


# -- files that do not fit -----------------------------------------------------------------------------------------------------


def test_another_schema_version_is_refused(record: Record, tmp_path: Path) -> None:
    table = pq.read_table(record("exact")[0].file)
    facts = json.loads(table.schema.metadata[KEY])
    pq.write_table(table.replace_schema_metadata({KEY: json.dumps({**facts, "version": 99})}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="schema version 99, but this edgexpert reads version 1"):
        Trace(tmp_path / "t.parquet")


def test_truncated_foreign_and_missing_files_are_refused(record: Record, tmp_path: Path) -> None:
    whole = record("exact")[0].file.read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="truncated or no Parquet file"):
        Trace(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match="no trace"):
        Trace(tmp_path / "other.parquet")
    with pytest.raises(UserError, match="there is no trace"):
        Trace(tmp_path / "none.parquet")
    table = pq.read_table(record("exact")[0].file)
    pq.write_table(table.drop_columns("choice"), tmp_path / "narrow.parquet")
    with pytest.raises(UserError, match="lacks the column choice"):
        Trace(tmp_path / "narrow.parquet")


def test_damage_inside_a_file_is_named(record: Record, tmp_path: Path) -> None:
    whole = bytearray(record("exact")[0].file.read_bytes())
    whole[1000 : len(whole) // 2] = bytes(len(whole) // 2 - 1000)
    (tmp_path / "damaged.parquet").write_bytes(whole)
    with pytest.raises(UserError, match="truncated or no Parquet file"):
        list(Trace(tmp_path / "damaged.parquet").stages())

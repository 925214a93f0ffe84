"""Synthetic traces: the published facts come out, random routing gives its closed forms, the same seed the same file."""

from __future__ import annotations

from math import comb
from pathlib import Path

import pytest
import torch

from edgexpert.core.shapes import WeightFormat
from edgexpert.policy import PRESETS
from edgexpert.trace.channels import generator
from edgexpert.trace.read import Trace
from edgexpert.trace.synthesis import FITTED, RoutingModel, distinct_experts, fit, pair_sharing, synthesise_trace
from edgexpert.trace.trees import TREE, draw_tree, expected_length, fit_sharpness, walk

INDEPENDENT = RoutingModel(popularity=0, position=0)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    file = tmp_path_factory.mktemp("synthetic") / "qwen3.parquet"
    synthesise_trace("qwen3-30b-a3b", file, stages=6, prompt_tokens=40)
    return Trace(file)


def test_random_routing_gives_its_closed_forms() -> None:
    """128 experts, 8 a token: 64 tokens touch 125.9, and 0.8 % of pairs share three or more."""
    touched = 128 * (1 - (1 - 8 / 128) ** 64)
    sharing = sum(comb(8, n) * comb(120, 8 - n) for n in range(3, 9)) / comb(128, 8)
    assert round(touched, 1) == 125.9
    assert round(100 * sharing, 1) == 0.8
    assert pair_sharing(INDEPENDENT, 20_000) == pytest.approx(sharing, abs=0.002)
    random = generator("test")
    trees = [draw_tree(2.5, 1000, random) for _ in range(10)]
    with_root = 128 * (1 - (1 - 8 / 128) ** 65)
    assert distinct_experts(INDEPENDENT, trees) == pytest.approx(with_root, abs=0.5)


def test_the_fitted_shares_are_those_that_the_fit_finds() -> None:
    coarse = fit(samples=12)
    assert coarse.popularity == pytest.approx(FITTED.popularity, abs=0.07)
    assert coarse.position == pytest.approx(FITTED.position, abs=0.07)


def test_the_fitted_routing_has_the_published_facts() -> None:
    random = generator("other trees")
    sharpness = fit_sharpness(4.3)
    trees = [draw_tree(sharpness, 1000, random) for _ in range(40)]
    assert distinct_experts(FITTED, trees) == pytest.approx(52.1, abs=1.5)
    assert pair_sharing(FITTED, 10_000) == pytest.approx(0.884, abs=0.01)
    assert sum(map(expected_length, trees)) / 40 == pytest.approx(4.3, abs=0.3)


def test_a_trace_of_qwen3_has_the_published_facts(qwen3: Trace) -> None:
    verify = [stage for stage in qwen3.stages() if stage.stage.tree is not None]
    assert len(verify) == 6
    assert all(len(stage.layers) == 48 for stage in verify)
    loaded = [len(layer.exact.loaded) for stage in verify for layer in stage.layers]
    assert sum(loaded) / len(loaded) == pytest.approx(52.1, abs=2)
    sharing = []
    for stage in verify:
        same_depth = (stage.stage.depth[:, None] == stage.stage.depth).triu(1).nonzero()
        for layer in stage.layers:
            routed = torch.zeros(len(stage.stage.tokens), 128).scatter_(1, layer.exact.experts, 1)
            sharing.append(((routed @ routed.T)[same_depth[:, 0], same_depth[:, 1]] >= 3).float().mean())
    assert float(torch.stack(sharing).mean()) == pytest.approx(0.884, abs=0.02)


def test_trees_are_of_the_asked_shape_and_paths_follow_them() -> None:
    random = generator("trees")
    for _ in range(10):
        tree = draw_tree(2.5, 1000, random)
        assert tree.candidates == TREE.size
        assert int(tree.depth.max()) <= TREE.depth
        assert max(len(children) for children in tree.children) <= TREE.top_k
        path = walk(tree, random)
        assert [int(tree.parents[node]) for node in path] == [-1, *path[:-1]]


def test_walks_are_as_long_as_the_tree_expects() -> None:
    random = generator("walks")
    tree = draw_tree(2.5, 1000, random)
    walks = [len(walk(tree, random)) for _ in range(1000)]
    assert sum(walks) / len(walks) == pytest.approx(expected_length(tree), abs=0.25)


def test_the_same_seed_gives_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    for file, seed in (("a", 0), ("b", 0), ("c", 1)):
        synthesise_trace("granite-1b-a400m", tmp_path / file, stages=1, prompt_tokens=3, seed=seed)
    a, b, c = ((tmp_path / file).read_bytes() for file in "abc")
    assert a == b != c


def test_channels_are_the_same_at_every_replay_and_alike_within_a_depth(qwen3: Trace) -> None:
    stage = list(qwen3.stages())[1]
    layer, again = stage.layers[0], list(qwen3.stages())[1].layers[0]
    assert layer.channels is not None and again.channels is not None
    gate_up, down = layer.channels.gate_up(layer.exact), layer.channels.down(layer.exact)
    assert torch.equal(gate_up, again.channels.gate_up(layer.exact))
    assert torch.equal(down, again.channels.down(layer.exact))
    assert gate_up.shape == (len(layer.exact.pair_expert), 2048)
    assert down.shape == (len(layer.exact.pair_expert), 768)
    log = gate_up.view(len(stage.stage.tokens), 8, -1)[:, 0].log()
    correlation = torch.corrcoef(log)
    same = (stage.stage.depth[:, None] == stage.stage.depth).triu(1)
    other = (stage.stage.depth[:, None] != stage.stage.depth).triu(1)
    assert float(correlation[same].mean()) == pytest.approx(0.6, abs=0.05)  # the fixed and the depth's share
    assert float(correlation[other].mean()) == pytest.approx(0.3, abs=0.05)  # the fixed share alone


def test_policies_replay_a_synthetic_trace(tmp_path: Path) -> None:
    synthesise_trace("granite-1b-a400m", tmp_path / "t", stages=1, prompt_tokens=30)
    trace = Trace(tmp_path / "t")
    assert trace.facts.synthetic
    read = {}
    for name in ("exact", "pruned", "edgexpert"):
        prefill, verify = trace.replay(PRESETS[name])

        shape = trace.shape(WeightFormat(0.5, 32, 2.0))
        read[name] = [sum(plan.bytes(shape) for plan in stage.plans) for stage in (prefill, verify)]
    assert read["exact"][0] == read["pruned"][0] > read["edgexpert"][0]
    assert read["exact"][1] > read["pruned"][1] > read["edgexpert"][1]

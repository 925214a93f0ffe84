"""A stage in one native call gives what it gives layer by layer: bits, choices, bytes and cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from edgexpert.core.routing import ChannelSelection
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import dense, native
from edgexpert.kernels.experts import run_experts
from edgexpert.model.cache import TreeCache
from edgexpert.model.host import HostedModel
from edgexpert.model.native_model import native_model
from edgexpert.model.packed import load_pack
from edgexpert.model.running import StageOutput
from edgexpert.policy import PRESETS, Techniques
from tests.packs import make_pack

pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")

LAYERS, PROMPT = 3, 18
FUSED = (0, 2, LAYERS)  # the first layer's input, another one's, and what comes out
TREE = TokenTree(torch.arange(3, 11), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]), -torch.arange(8.0) / 2)

Load = Callable[..., PreTrainedModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(family: str, **changes: object) -> PreTrainedModel:
        return load_pack(make_pack(family, tmp_path, num_hidden_layers=LAYERS, **changes))

    return load


def run(host: HostedModel, policy: Techniques = PRESETS["exact"]) -> tuple[list[StageOutput], TreeCache]:
    """A prompt, a tree behind it of which a path stays, and one token more."""
    cache = host.new_cache(40)
    policy = host.resolve(policy)
    outputs = [host.run(Stage.prefill(torch.arange(2, 2 + PROMPT)), cache, policy, FUSED)]
    outputs.append(host.run(Stage.verify(TREE, PROMPT), cache, policy, FUSED))
    cache.keep(PROMPT, [0, 2, 5, 7])
    outputs.append(host.run(Stage.verify(TokenTree.of_root(5), PROMPT + 4), cache, policy, FUSED))
    return outputs, cache


@pytest.mark.parametrize("family", ["granitemoe", "olmoe", "qwen3_moe"])
def test_one_call_gives_the_bits_choices_and_bytes_of_a_call_for_each_half_layer(family: str, load: Load) -> None:
    whole = HostedModel(load(family))
    assert whole.native is not None
    ours, our_cache = run(whole)
    halves = HostedModel(whole.model)
    halves.native = None
    theirs, their_cache = run(halves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert a.features is not None and b.features is not None and torch.equal(a.features, b.features)
        assert a.traffic == b.traffic
        assert a.experts_loaded == b.experts_loaded == sum(plan.routing.count for plan in a.plans)
        for plan, exact, other in zip(a.plans, a.exact, b.plans, strict=True):
            assert plan.layer == other.layer and plan.routing is exact
            assert torch.equal(plan.routing.experts, other.routing.experts)
            assert torch.equal(plan.routing.weights, other.routing.weights)
    for mine, other_layer in zip(our_cache.tree_layers, their_cache.tree_layers, strict=True):
        for part in ("keys", "values"):
            assert torch.equal(*(getattr(x, part)[:, :, : our_cache.length] for x in (mine, other_layer)))


@pytest.mark.parametrize("policy", ["exact", "edgexpert"])
def test_threads_change_nothing(policy: str, load: Load) -> None:
    host, before = HostedModel(load("granitemoe")), native.get_threads()
    results = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        results.append(tree_output(host, PRESETS[policy]).logits)
    native.set_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", dict(kv_lora_rank=32, v_head_dim=16)),
        ("qwen2_moe", dict(shared_expert_intermediate_size=64)),
        ("qwen3_moe", dict(mlp_only_layers=[0])),
    ],
    ids=["latent attention", "shared experts", "a dense layer"],
)
def test_a_model_of_which_a_part_is_not_native_runs_layer_by_layer(family: str, changes: dict[str, object], load: Load) -> None:
    host = HostedModel(load(family, **changes))
    assert host.native is None
    assert all(len(output.plans) == len(host.blocks) for output in run(host)[0])


def test_a_model_that_does_something_else_around_its_layers_runs_layer_by_layer(load: Load) -> None:
    model = load("granitemoe")
    assert native_model(model) is not None
    model.base_model.embedding_multiplier *= 2
    model.config.logits_scaling *= 3
    assert native_model(model) is not None  # read from the model, and tried
    model.register_forward_hook(lambda _, __, output: (output.logits.tanh_(), None)[1])
    assert native_model(model) is None


def test_a_model_that_does_something_between_its_layers_runs_layer_by_layer(load: Load) -> None:
    model = load("qwen3_moe")
    assert native_model(model) is not None
    model.base_model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
    assert native_model(model) is None


def test_a_window_of_all_layers_is_seen_by_the_one_call(load: Load) -> None:
    host = HostedModel(load("mixtral", sliding_window=6))
    assert host.native is not None
    ours = run(host)[0]
    host.native = None
    for a, b in zip(ours, run(host)[0], strict=True):
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)


def test_policies_take_turns_on_one_cache(load: Load) -> None:
    host = HostedModel(load("olmoe"))
    cache, policy = host.new_cache(40), host.resolve(PRESETS["edgexpert"])
    host.run(Stage.prefill(torch.arange(2, 2 + PROMPT), importance=torch.full((PROMPT,), 2.0)), cache, policy)  # all are major
    mixed = host.run(Stage.verify(TREE, PROMPT), cache).logits
    torch.testing.assert_close(mixed, run(host)[0][1].logits, rtol=1e-4, atol=1e-4)


POLICIES = {
    "pruned": PRESETS["pruned"],
    "coarse": Techniques("coarse", coarse_pruning=True),
    "coalesced": PRESETS["coalesced"],
    "edgexpert": PRESETS["edgexpert"],
    "by path": replace(PRESETS["edgexpert"], token_weight="path"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["granitemoe", "olmoe"])
def test_what_is_decided_in_one_call_is_what_the_policy_decides(family: str, policy: str, load: Load) -> None:
    host = HostedModel(load(family))
    decides = host.resolve(POLICIES[policy])
    assert host.native is not None
    stage, cache, again = Stage.verify(TREE, PROMPT), host.new_cache(40), host.new_cache(40)
    for states in (cache, again):  # all of the prompt's tokens are major
        host.run(Stage.prefill(torch.arange(2, 2 + PROMPT), importance=torch.full((PROMPT,), 2.0)), states, decides)
    output = host.run(stage, cache, decides, range(LAYERS))
    assert output.features is not None
    assert output.traffic["experts"] == pytest.approx(
        sum(plan.bytes(block.shape) for plan, block in zip(output.plans, host.blocks, strict=True))
    )
    assert output.experts_loaded == sum(plan.routing.count for plan in output.plans)

    mask = torch.cat([torch.ones(len(TREE), PROMPT, dtype=torch.bool), TREE.mask], 1)[None, None]
    rotary = host.native.rotary(output.features[None], position_ids=stage.positions[None])
    layers = zip(host.native.members, host.blocks, output.plans, output.exact, output.features.chunk(LAYERS, 1), strict=True)
    for member, block, plan, exact, x in layers:
        between = member.attend(x[None].contiguous(), mask, again, *rotary)
        normed = dense.rms_norm(between[0], member.norm.weight, member.norm.eps)
        assert block.form is not None
        routing = decides.route(exact, block.form.scores(dense.linear(normed, member.router)), stage)
        assert torch.equal(plan.routing.experts, routing.experts)
        torch.testing.assert_close(plan.routing.weights, routing.weights)
        same(plan.gate_up, decides.select_channels(normed[plan.routing.pair_token], plan.routing, stage))
        if block.packed is not None and plan.gate_up is not None:
            _, down, _ = run_experts(
                normed, plan.routing, block.packed, plan.gate_up,
                lambda activations, plan=plan: decides.select_channels(activations, plan.routing, stage),  # type: ignore[misc]
            )
            same(plan.down, down)


def same(ours: ChannelSelection | None, theirs: ChannelSelection | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert torch.equal(ours.loaded, theirs.loaded)
    assert (ours.compute is None) == (theirs.compute is None)
    assert ours.compute is None or theirs.compute is None or torch.equal(ours.compute, theirs.compute)


def test_experts_that_prompt_tokens_share_are_those_of_the_policy(load: Load) -> None:
    host = HostedModel(load("olmoe"))
    decides = host.resolve(replace(PRESETS["reuse"], k_min=3, n_min=2, k_tri=4, n_tri=1, theta1=0.8, theta2=0.4))
    assert host.native is not None
    order = torch.randperm(PROMPT, generator=torch.Generator().manual_seed(0))
    stage = Stage.prefill(torch.arange(2, 2 + PROMPT), importance=torch.linspace(0, 1.4, PROMPT)[order])
    output = host.run(stage, host.new_cache(40), decides, range(LAYERS))
    cache = host.new_cache(40)
    assert output.features is not None
    rotary = host.native.rotary(output.features[None], position_ids=stage.positions[None])
    layers = zip(host.native.members, host.blocks, output.plans, output.exact, output.features.chunk(LAYERS, 1), strict=True)
    for member, block, plan, exact, x in layers:
        normed = member.norm(member.attend(x[None].contiguous(), None, cache, *rotary)[0])
        assert block.form is not None
        routing = decides.route(exact, block.form.scores(dense.linear(normed, member.router)), stage)
        assert torch.equal(plan.routing.experts, routing.experts) and not torch.equal(routing.experts, exact.experts)
        torch.testing.assert_close(plan.routing.weights, routing.weights)
    assert output.traffic["experts"] == sum(
        plan.bytes(block.shape) for plan, block in zip(output.plans, host.blocks, strict=True)
    )


@pytest.mark.parametrize("policy", ["pruned", "edgexpert"])
def test_a_pruned_stage_in_one_call_gives_the_logits_of_one_layer_by_layer(policy: str, load: Load) -> None:
    whole = HostedModel(load("qwen3_moe"))
    ours = tree_output(whole, PRESETS[policy])
    layer_by_layer = HostedModel(whole.model)
    layer_by_layer.native = None
    theirs = tree_output(layer_by_layer, PRESETS[policy])
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    assert ours.traffic == pytest.approx(theirs.traffic)


def tree_output(host: HostedModel, policy: Techniques) -> StageOutput:
    cache, policy = host.new_cache(40), host.resolve(policy)
    host.run(Stage.prefill(torch.arange(2, 2 + PROMPT), importance=torch.full((PROMPT,), 2.0)), cache, policy)
    return host.run(Stage.verify(TREE, PROMPT), cache, policy)


def test_a_stage_is_left_to_the_router_where_its_policy_does_not_act(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostedModel(load("olmoe"))
    assert host.native is not None
    seen: list[tuple[str, bool]] = []
    one_call = host.native.run

    def watched(stage: Stage, cache: TreeCache, fused: Any, rule: Any, **more: Any) -> Any:
        seen.append((stage.kind, rule is None))
        return one_call(stage, cache, fused, rule, **more)

    monkeypatch.setattr(host.native, "run", watched)
    run(host, PRESETS["pruned"])  # acts on trees alone
    assert seen == [("prefill", True), ("verify", False), ("verify", False)]

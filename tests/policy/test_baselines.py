"""MoE-Pruner's masks, EdgeMoE's bits, what both load, and their preparation of a hosted model's weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.shapes import ExpertShape, Storage, WeightFormat
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.model.host import HostedModel
from edgexpert.model.measure import calibration_text, measure_experts
from edgexpert.policy import BASELINES, EXACT, Policy, policy_named
from edgexpert.policy.baselines import EdgeMoe, MoePruner, fake_quantised, kept_weights, low_bit_experts
from edgexpert.policy.pruning import expected_candidates, prune_experts
from edgexpert.policy.use import ExpertUse
from tests.conftest import make_model

STORIES = {"model_type": "qwen3_moe", "num_experts": 64, "top_k": 4}
FOUR_BITS = WeightFormat(0.5)
GROUPED = WeightFormat(0.5, 32, 2.0)


def routed(*experts: int, of: int = 4) -> Routing:
    return Routing(torch.tensor([experts]), torch.ones(1, len(experts)), of)


@settings(max_examples=20, deadline=None)
@given(channels=st.integers(2, 40), outputs=st.integers(1, 10), sparsity=st.floats(0, 0.9), seed=st.integers(0, 99))
def test_every_output_neuron_loses_the_same_number_of_its_least_weights(
    channels: int, outputs: int, sparsity: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight, norm = torch.randn(channels, outputs, generator=random), torch.rand(channels, generator=random)
    kept = kept_weights(weight, norm, sparsity)
    assert ((~kept).sum(0) == round(sparsity * channels)).all()
    score = weight.abs() * norm[:, None]
    assert (score.masked_fill(~kept, torch.inf).amin(0) >= score.masked_fill(kept, 0).amax(0)).all()


def test_a_small_weight_on_a_large_input_outlives_a_large_weight_on_a_small_one() -> None:
    weight = torch.tensor([[0.1], [1.0]])
    assert kept_weights(weight, torch.tensor([100.0, 1.0]), 0.5).flatten().tolist() == [True, False]
    assert kept_weights(weight, torch.zeros(2), 0.5).flatten().tolist() == [False, True]  # unused: by magnitude


@pytest.mark.parametrize("bits", [2, 4])
def test_quantised_groups_have_as_many_levels_as_their_bits_allow(bits: int) -> None:
    weight = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    rounded = fake_quantised(weight, bits)
    for group, original in zip(rounded.split(32), weight.split(32), strict=True):
        step = (original.amax(0) - original.amin(0)) / (2**bits - 1)
        assert all(len(column.unique()) <= 2**bits for column in group.T)
        assert ((group - original).abs() <= step / 2 + 1e-6).all()


def test_the_least_important_experts_get_two_bits_until_enough_is_saved() -> None:
    use = ExpertUse(loads=torch.tensor([[4.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]]).double(),
                    weight=torch.tensor([[0.1, 9.0, 0.2, 8.0], [7.0, 0.3, 6.0, 5.0]]).double())
    low = low_bit_experts(use, 0.15)  # three of eight save 3/16
    assert low.tolist() == [[True, False, True, False], [False, True, False, False]]


def test_half_of_the_weights_and_their_bitmap_take_three_bits_of_four() -> None:
    shape, storage = ExpertShape(64, 32, 64, FOUR_BITS), policy_named("moe-pruner").storages(uniform_use())
    assert storage is not None
    plan = LayerPlan(0, routed(0, 2), storage=storage[0])
    assert plan.bytes(shape) == pytest.approx(LayerPlan(0, routed(0, 2)).bytes(shape) * 3 / 4)
    grouped = replace(shape, format=GROUPED)  # 4.5 bits become 2 + 1 + 0.5: scales stay
    assert plan.bytes(grouped) == pytest.approx(LayerPlan(0, routed(0, 2)).bytes(grouped) * 3.5 / 4.5)


def test_two_bits_are_half_of_four_and_only_loaded_experts_count() -> None:
    shape = ExpertShape(64, 32, 64, FOUR_BITS)
    storage = Storage(torch.tensor([0.5, 1.0, 1.0, 0.5]).double())
    assert LayerPlan(0, routed(0, 1), storage=storage).bytes(shape) == pytest.approx(1.5 * shape.expert)
    assert LayerPlan(0, routed(1, 2), storage=storage).bytes(shape) == pytest.approx(2 * shape.expert)


def test_edgemoe_saves_thirty_to_thirty_five_per_cent_of_grouped_bytes() -> None:
    use = uniform_use(layers=6, experts=64)
    storages = policy_named("edgemoe").storages(use)
    assert storages is not None
    shape = ExpertShape(64, 32, 64, GROUPED)
    everything = routed(*range(64), of=64)
    read = sum(LayerPlan(0, everything, storage=storage).bytes(shape) for storage in storages)
    assert 0.30 < 1 - read / (6 * 64 * shape.expert) < 0.35


def uniform_use(layers: int = 1, experts: int = 4) -> ExpertUse:
    weight = torch.rand(layers, experts, generator=torch.Generator().manual_seed(0)).double()
    return ExpertUse(torch.ones(layers, experts).double(), weight)


def test_experts_that_are_stored_otherwise_are_loaded_whole() -> None:
    selection = ChannelSelection(torch.ones(4, 64, dtype=torch.bool), None)
    with pytest.raises(AssertionError, match="loaded whole"):
        LayerPlan(0, routed(0), gate_up=selection, storage=Storage(torch.ones(4)))


@pytest.mark.parametrize(("policy", "rule"), [
    (MoePruner(1.0), "`weight_sparsity` (1.0) must be above 0 and below 1"),
    (MoePruner(0.0), "`weight_sparsity` (0.0) must be above 0 and below 1"),
    (EdgeMoe(0.6), "`low_bit_saving` (0.6) must be above 0 and at most 0.5"),
])
def test_a_share_that_cannot_be_is_refused(policy: Policy, rule: str) -> None:
    with pytest.raises(UserError) as error:
        policy.resolved(**STORIES)
    assert rule in str(error.value)


def test_a_policy_that_selects_channels_of_prepared_weights_is_refused() -> None:
    class Both(MoePruner):
        def select_channels(self, *_: Any) -> None:
            """Nothing, but it is asked."""

    host = HostedModel(make_model("qwen3_moe", num_hidden_layers=1))
    with pytest.raises(UserError, match="stores otherwise"):
        host.resolve(Both())


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_baselines_are_named_as_approximations_with_their_numbers(name: str) -> None:
    policy = policy_named(name).resolved(**STORIES)
    assert not policy.is_exact
    assert [str({"moe-pruner": 0.5, "edgemoe": 0.35}[name]) in line for line in policy.approximations()] == [True]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # weights as [E, out, C] and as [E, C, out]
@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_host_prepares_weights_and_gives_the_very_same_ones_back(name: str, family: str) -> None:
    host = HostedModel(make_model(family, num_hidden_layers=2))
    before = [parameter.clone() for parameter in host.model.parameters()]
    host.statistics = measure_experts(host, [list(range(2, 60))])
    policy = host.resolve(policy_named(name))
    block, storage = host.blocks[0], host.storage(policy)
    for matrix in (block.weights().gate_up, block.weights().down):
        if name == "moe-pruner":
            assert ((matrix == 0).sum(1) == matrix.shape[1] // 2).all()
        else:
            levels = [len(expert[:, 0].unique()) for expert in matrix]
            low = (storage[block.layer].value < 1).tolist()
            assert 0 < sum(low) < len(low)
            assert all(found <= (4 if is_low else 16) for found, is_low in zip(levels, low, strict=True))
    output = host.run(Stage.prefill(torch.arange(2, 12)), host.new_cache(10), policy)
    assert output.traffic["experts"] == pytest.approx(
        sum(plan.bytes(b.shape) for plan, b in zip(output.plans, host.blocks, strict=True))
    )
    assert all(plan.storage is storage[plan.layer] for plan in output.plans)
    assert not host.storage(EXACT)
    assert all(torch.equal(a, b) for a, b in zip(before, host.model.parameters(), strict=True))


def test_dropped_experts_cost_nothing_and_the_others_what_they_are_stored_as() -> None:
    host = HostedModel(make_model("qwen3_moe", num_hidden_layers=2))
    host.statistics = measure_experts(host, [list(range(2, 60))])
    class Both(MoePruner):
        def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
            assert stage.tree is not None
            return prune_experts(routing, scores, expected_candidates(stage.tree, 0.5))

    policy = host.resolve(Both())
    tree = TokenTree(torch.arange(2, 8), torch.tensor([-1, 0, 0, 0, 0, 0]), torch.tensor([0.0, -5, -5, -5, -5, -5]))
    output = host.run(Stage.verify(tree, 0), host.new_cache(6), policy)
    shape = host.blocks[0].shape
    assert [len(plan.routing.loaded) for plan in output.plans] == [2, 2]  # the root's alone
    assert sum(len(routing.loaded) for routing in output.exact) > 4
    assert output.traffic["experts"] == pytest.approx(4 * shape.expert * (0.5 + 1 / 32))


def test_measured_statistics_are_norms_of_router_weighted_inputs() -> None:
    host = HostedModel(make_model("qwen3_moe", num_hidden_layers=1))
    seen: list[torch.Tensor] = []
    handle = host.blocks[0].experts.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids = list(range(2, 40))
    statistics = measure_experts(host, [ids])
    handle.remove()
    routing = host.run(Stage.prefill(torch.tensor(ids)), host.new_cache(len(ids))).plans[0].routing
    token = routing.pairs[0]
    for expert in routing.loaded.tolist():
        pairs = routing.pair_expert == expert
        norm = (seen[0][token[pairs]] * routing.pair_weight[pairs, None]).norm(dim=0)
        assert torch.allclose(statistics.gate_up_norm[0][expert], norm, atol=1e-5)
    assert float(statistics.use.weight.sum()) == pytest.approx(float(routing.pair_weight.sum()), rel=1e-5)
    assert statistics.use.loads.sum() == len(routing.loaded)


def test_weights_are_not_prepared_without_statistics() -> None:
    with pytest.raises(UserError, match="not measured"):
        HostedModel(make_model("qwen3_moe")).resolve(policy_named("edgemoe"))


def test_the_calibration_text_is_several_texts() -> None:
    assert len(calibration_text()) >= 5

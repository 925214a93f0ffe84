"""Laws that every policy keeps, for any routing, tree and activations."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.shapes import ExpertShape, WeightFormat
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.policy import PRESETS, Techniques
from edgexpert.policy.importance import Tier, token_tiers
from edgexpert.policy.pruning import expected_candidates, needed_channels, union_by_expert

CHANNELS = 6
SHAPE = ExpertShape(hidden=CHANNELS, intermediate=CHANNELS, gate_up_outputs=12, format=WeightFormat(1.0))


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, max_nodes)))]
    log_prob = [0.0]
    for parent in parents[1:]:
        log_prob.append(log_prob[parent] - draw(st.floats(0, 4)))
    return TokenTree(torch.arange(len(parents)), torch.tensor(parents), torch.tensor(log_prob))


@st.composite
def routings(draw: st.DrawFn, tokens: int | None = None) -> tuple[Routing, Scores]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_experts = draw(st.integers(2, 10))
    top_k = draw(st.integers(1, num_experts))
    tokens = tokens or draw(st.integers(1, 12))
    choice = torch.randn(tokens, num_experts, generator=generator) * draw(st.floats(0.1, 5))
    scores = Scores(choice, choice.softmax(1), normalise=draw(st.booleans()), scale=draw(st.sampled_from([1.0, 2.5])))
    experts = choice.topk(top_k, dim=1).indices
    return Routing(experts, scores.weights(experts), num_experts), scores


@st.composite
def verifications(draw: st.DrawFn) -> tuple[Stage, Routing, Scores, torch.Tensor]:
    tree = draw(trees())
    routing, scores = draw(routings(len(tree)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return Stage.verify(tree, prefix=5), routing, scores, torch.randn(*routing.experts.shape, CHANNELS, generator=generator)


def resolved(policy: Techniques, routing: Routing) -> Techniques:
    return policy.resolved(model_type="any", num_experts=routing.num_experts, top_k=routing.experts.shape[1])


def select(policy: Techniques, verification: tuple[Stage, Routing, Scores, torch.Tensor]) -> tuple[Routing, ChannelSelection]:
    """Channels under a policy with fine pruning; activations [T, k, C] belong to slots, whatever routing leaves of them."""
    stage, routing, scores, activations = verification
    policy = resolved(policy, routing)
    routing = policy.route(routing, scores, stage)
    selection = policy.select_channels(activations[routing.pairs], routing, stage)
    assert selection is not None
    return routing, selection


FINE = Techniques(fine_pruning=True)
COALESCED = replace(FINE, depth_aware_coalescing=True)
CALIBRATED = replace(COALESCED, computational_calibration=True)
law = settings(max_examples=40, deadline=None)
shares = st.floats(0.05, 1)
ratios = st.floats(0, 0.99)


# -- reuse ------------------------------------------------------------------------------------------------------------------

@st.composite
def prompts(draw: st.DrawFn) -> tuple[Techniques, Routing, Scores, torch.Tensor]:
    routing, scores = draw(routings())
    weights = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0, 3.0]),
                                         min_size=len(routing.experts), max_size=len(routing.experts))))
    return resolved(Techniques(prompt_wise_expert_reuse=True), routing), routing, scores, weights


@law
@given(prompts())
def test_reuse_adds_no_expert_to_the_union_and_none_to_a_token(prompt: tuple[Techniques, Routing, Scores, torch.Tensor]) -> None:
    policy, routing, scores, weights = prompt
    reused = policy.route(routing, scores, Stage.prefill(torch.arange(len(weights)), importance=weights))
    assert set(reused.loaded.tolist()) <= set(routing.loaded.tolist())
    h, tiers = policy.hyperparameters, token_tiers(weights, 0.8, 0.4)
    budget = torch.tensor([routing.experts.shape[1], h.n_min, h.n_tri])[tiers]
    assert torch.equal((reused.experts < routing.num_experts).sum(1), budget)
    assert all(len(set(row)) == len(row) for row in (r[r < routing.num_experts].tolist() for r in reused.experts))


@law
@given(prompts())
def test_reuse_keeps_majors_top_1_and_the_models_own_weights(prompt: tuple[Techniques, Routing, Scores, torch.Tensor]) -> None:
    policy, routing, scores, weights = prompt
    reused = policy.route(routing, scores, Stage.prefill(torch.arange(len(weights)), importance=weights))
    major = token_tiers(weights, 0.8, 0.4) == Tier.MAJOR
    assert major.any()
    assert torch.equal(reused.experts[major], routing.experts[major])
    assert torch.equal(reused.weights[major], routing.weights[major])
    assert torch.equal(reused.experts[:, 0], routing.experts[:, 0])
    torch.testing.assert_close(reused.weights, scores.weights(reused.experts))
    if scores.normalise:
        torch.testing.assert_close(reused.weights.sum(1), torch.full((len(weights),), scores.scale))


@law
@given(prompts(), st.randoms(use_true_random=False))
def test_reuse_does_not_depend_on_the_order_of_tokens(prompt: tuple[Techniques, Routing, Scores, torch.Tensor], random) -> None:
    policy, routing, scores, weights = prompt
    order = list(range(len(weights)))
    random.shuffle(order)
    stage = Stage.prefill(torch.arange(len(weights)), importance=weights)
    shuffled = policy.route(
        Routing(routing.experts[order], routing.weights[order], routing.num_experts),
        Scores(scores.choice[order], scores.gate[order], scores.normalise, scores.scale),
        replace(stage, importance=weights[order]),
    )
    assert torch.equal(shuffled.experts, policy.route(routing, scores, stage).experts[order])


# -- coarse pruning ---------------------------------------------------------------------------------------------------------

@law
@given(trees(), shares, shares)
def test_the_keep_set_is_closed_under_ancestors_and_grows_with_the_mass(tree: TokenTree, one: float, other: float) -> None:
    less, more = (expected_candidates(tree, mass) for mass in sorted((one, other)))
    assert less[0]
    assert bool((more | ~less).all())
    for node, parent in enumerate(tree.parents.tolist()):
        assert not less[node] or parent < 0 or less[parent]


@law
@given(trees(), shares)
def test_the_keep_set_holds_the_mass_with_the_fewest_nodes(tree: TokenTree, mass: float) -> None:
    prob = tree.path_log_prob.double().exp()
    keep = expected_candidates(tree, mass)
    target = mass * float(prob.sum())
    assert float(prob[keep].sum()) > target - 1e-9
    assert float(prob[keep].sum() - prob[keep].min()) < target + 1e-9, "it could do without its least likely node"
    assert keep.all() or float(prob[keep].min()) >= float(prob[~keep].max())


@law
@given(verifications(), shares)
def test_coarse_pruning_loads_a_subset_and_spares_the_kept(verification, mass: float) -> None:
    stage, routing, scores, _ = verification
    policy = resolved(Techniques(coarse_pruning=True, keep_mass=mass), routing)
    pruned = policy.route(routing, scores, stage)
    keep = expected_candidates(stage.tree, mass)
    assert set(pruned.loaded.tolist()) == set(routing.experts[keep].flatten().tolist())
    assert torch.equal(pruned.experts[keep], routing.experts[keep])
    assert torch.equal(pruned.weights[keep], routing.weights[keep])
    assert LayerPlan(0, pruned).bytes(SHAPE) <= LayerPlan(0, routing).bytes(SHAPE)


# -- fine pruning -----------------------------------------------------------------------------------------------------------

@law
@given(verifications(), shares)
def test_fine_pruning_holds_the_share_and_a_channel_of_every_pair(verification, share: float) -> None:
    _, routing, _, activations = verification
    activations = activations[routing.pairs]
    mask = needed_channels(activations, routing, share)
    importance = activations.abs() * routing.pair_weight[:, None]
    kept = torch.zeros(len(routing.experts)).index_add_(0, routing.pairs[0], (importance * mask).sum(1))
    total = torch.zeros(len(routing.experts)).index_add_(0, routing.pairs[0], importance.sum(1))
    assert bool((kept >= share * total - 1e-4 * total).all())
    assert bool(mask.any(1).all())


@law
@given(verifications(), shares, shares)
def test_a_larger_share_keeps_a_superset_of_channels(verification, one: float, other: float) -> None:
    _, routing, _, activations = verification
    less, more = (needed_channels(activations[routing.pairs], routing, share) for share in sorted((one, other)))
    assert bool((more | ~less).all())


# -- coalescing and calibration ---------------------------------------------------------------------------------------------

@law
@given(verifications(), shares, ratios)
def test_each_technique_loads_no_more_bytes_than_the_one_before(verification, share: float, ratio: float) -> None:
    _, routing, _, _ = verification
    exact = LayerPlan(0, routing).bytes(SHAPE)
    loads = [exact]
    for policy in (FINE, COALESCED, CALIBRATED):
        _, selection = select(replace(policy, keep_channels=share, selection_ratio=ratio), verification)
        loads.append(LayerPlan(0, routing, selection, selection).bytes(SHAPE))
    assert loads == sorted(loads, reverse=True)
    assert loads[2] == loads[3], "calibration adds no bytes"


@law
@given(verifications(), ratios)
def test_no_preset_loads_more_bytes_than_exact(verification, ratio: float) -> None:
    _, routing, _, _ = verification
    for name in ("pruned", "coalesced", "edgexpert"):
        pruned, selection = select(replace(PRESETS[name], selection_ratio=ratio), verification)
        assert LayerPlan(0, pruned, selection, selection).bytes(SHAPE) <= LayerPlan(0, routing).bytes(SHAPE)


@law
@given(verifications(), shares)
def test_a_selection_ratio_of_zero_loads_the_union(verification, share: float) -> None:
    _, fine = select(replace(FINE, keep_channels=share), verification)
    _, coalesced = select(replace(COALESCED, keep_channels=share, selection_ratio=0.0), verification)
    assert torch.equal(coalesced.loaded, fine.loaded)
    assert fine.compute is not None
    assert coalesced.compute is not None
    assert torch.equal(coalesced.compute, fine.compute)


@law
@given(verifications(), ratios, ratios)
def test_a_larger_selection_ratio_loads_a_subset(verification, one: float, other: float) -> None:
    less, more = (select(replace(COALESCED, selection_ratio=r), verification)[1].loaded
                  for r in sorted((one, other), reverse=True))
    assert bool((more | ~less).all())


@law
@given(st.integers(1, 6), st.data(), shares, ratios, st.sampled_from(["routing", "path"]))
def test_one_token_in_each_depth_group_changes_nothing(length: int, data, share: float, ratio: float, token_weight) -> None:
    tree = TokenTree(torch.arange(length), torch.arange(-1, length - 1), -30.0 * torch.arange(length))
    routing, scores = data.draw(routings(length))
    activations = torch.randn(*routing.experts.shape, CHANNELS, generator=torch.Generator().manual_seed(length))
    verification = (Stage.verify(tree, 0), routing, scores, activations)
    _, fine = select(replace(FINE, keep_channels=share), verification)
    policy = replace(COALESCED, keep_channels=share, selection_ratio=ratio, token_weight=token_weight)
    _, coalesced = select(policy, verification)
    assert torch.equal(coalesced.loaded, fine.loaded)


@law
@given(verifications(), ratios)
def test_a_pair_computes_only_on_loaded_channels_and_calibration_on_all_of_them(verification, ratio: float) -> None:
    routing, coalesced = select(replace(COALESCED, selection_ratio=ratio), verification)
    _, calibrated = select(replace(CALIBRATED, selection_ratio=ratio), verification)
    assert coalesced.compute is not None
    assert not bool((coalesced.compute & ~coalesced.loaded[routing.pair_expert]).any())
    assert calibrated.compute is None


@law
@given(verifications())
def test_only_routed_experts_load_channels(verification) -> None:
    for policy in (PRESETS["pruned"], PRESETS["edgexpert"]):
        routing, selection = select(policy, verification)
        assert set(selection.loaded.any(1).nonzero().flatten().tolist()) <= set(routing.loaded.tolist())


@law
@given(verifications(), shares)
def test_the_union_serves_every_mask(verification, share: float) -> None:
    _, routing, _, activations = verification
    mask = needed_channels(activations[routing.pairs], routing, share)
    union = union_by_expert(mask, routing.pair_expert, routing.num_experts)
    assert not bool((mask & ~union[routing.pair_expert]).any())
    assert int(union.sum()) <= int(mask.sum())

"""A policy's methods are called wherever it acts, hosted and packed, whatever its parents say; its answers are checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.core.routing import ChannelSelection, Routing, Scores
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.kernels.layers import StageRule
from edgexpert.model.host import HostedModel
from edgexpert.model.packed import load_pack
from edgexpert.policy import BASELINES, EXACT, PRESETS, Policy, Techniques, with_settings
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.ngram import NgramDraft
from tests.conftest import make_model, make_tokenizer

TREE = TokenTree(torch.tensor([3, 4, 5]), torch.tensor([-1, 0, 0]), torch.tensor([0.0, -0.5, -1.0]))
PROMPT, NEW = "abcabc", 5


@pytest.fixture(scope="module", params=["hosted", "packed"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A tiny model layer by layer, and one whose layers run in one native call where there are kernels."""
    sizes = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2, num_experts=32)
    model = make_model("qwen3_moe", **sizes).bfloat16()
    if request.param == "packed":
        folder: Path = tmp_path_factory.mktemp("pack")
        model.save_pretrained(folder / "source")
        make_tokenizer().save_pretrained(folder / "source")
        convert(open_source(str(folder / "source")), folder / "packed", PackOptions(4, 32))
        model = load_pack(folder / "packed")
    host = HostedModel(model.float() if request.param == "hosted" else model)
    assert (host.native is not None) == (request.param == "packed" and native.path() != "torch")
    return Engine(host, make_tokenizer(), name="tiny", draft=NgramDraft())


def answer(engine: Engine, policy: Policy) -> Any:
    return engine.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, tree=TreeShape(8, 3), policy=policy)


class FirstChoice(Policy):
    """Every token computes with its best expert alone."""

    def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
        experts = routing.experts.clone()
        experts[:, 1:] = routing.num_experts
        return Routing(experts, scores.weights(experts), routing.num_experts)


class EvenChannels(Policy):
    """Only channels of even number are loaded."""

    def select_channels(
        self, activations: Tensor, routing: Routing, stage: Stage, received: Tensor | None = None
    ) -> ChannelSelection:
        loaded = torch.zeros(routing.num_experts, activations.shape[1], dtype=torch.bool)
        loaded[routing.loaded, ::2] = True
        return ChannelSelection(loaded, None)


class OverridingRoute(Techniques):
    route = FirstChoice.route


class OverridingChannels(Techniques):
    select_channels = EvenChannels.select_channels  # type: ignore[assignment]


class Mixed(FirstChoice, Techniques):
    """The override comes from beside, not from below."""


@pytest.mark.parametrize("policy", [
    FirstChoice(), OverridingRoute("mine"), OverridingRoute("mine", coarse_pruning=True),
    replace(OverridingRoute("mine"), prompt_wise_expert_reuse=True), Mixed("mine"),
], ids=lambda policy: type(policy).__name__)
def test_an_overridden_route_decides_the_whole_text(engine: Engine, policy: Policy) -> None:
    exact, ours = answer(engine, EXACT), answer(engine, policy)
    per_token = engine.host.plain_decode_expert_bytes / engine.host.top_k
    assert ours.traffic.prefill["experts"] < exact.traffic.prefill["experts"]
    assert ours.traffic.prefill["experts"] <= per_token * len(engine.encode(PROMPT))
    assert ours.traffic.decode["experts"] < exact.traffic.decode["experts"]
    assert any("route" in line for line in ours.approximations)
    assert ours.policy["name"] == policy.name


@pytest.mark.parametrize("policy", [EvenChannels(), OverridingChannels("mine"), OverridingChannels("mine", fine_pruning=True)])
def test_overridden_channels_decide_every_verify_stage(engine: Engine, policy: Policy) -> None:
    exact, ours = answer(engine, EXACT), answer(engine, policy)
    assert ours.traffic.prefill["experts"] == exact.traffic.prefill["experts"]
    cache, resolved = engine.host.new_cache(20), engine.host.resolve(policy)
    engine.host.run(Stage.prefill(torch.arange(2, 12)), cache, resolved)
    plans = engine.host.run(Stage.verify(TREE, 10), cache, resolved).plans
    assert len(plans) == 2
    for plan in plans:
        assert plan.gate_up is not None and plan.down is not None
        for selection in (plan.gate_up, plan.down):
            assert not selection.loaded[:, 1::2].any()
            assert selection.loaded[plan.routing.loaded, ::2].all()
    assert any("select_channels" in line for line in ours.approximations)


def test_a_subclass_that_calls_its_parent_gives_the_parents_result_without_its_native_rule(engine: Engine) -> None:
    stages: list[Stage] = []

    class Watched(Techniques):
        def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
            stages.append(stage)
            return super().route(routing, scores, stage)

    settings = {key: value for key, value in PRESETS["pruned"].to_json().items() if value is not None}
    watched, parent = answer(engine, Watched(**settings)), answer(engine, PRESETS["pruned"])
    assert watched.token_ids == parent.token_ids
    assert watched.traffic.decode["experts"] == parent.traffic.decode["experts"]
    assert len({id(stage) for stage in stages}) == 1 + watched.speculation.stages
    assert Watched(**settings).resolved(model_type="", num_experts=32, top_k=2).stage_rule(stages[-1]) is None


def test_a_native_rule_beside_or_below_the_methods_is_used() -> None:
    class Ruled(FirstChoice):
        def stage_rule(self, stage: Stage) -> StageRule | None:
            return StageRule(stage.depth)

    class Again(Ruled):
        def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
            return routing

    stage = Stage.prefill(torch.arange(3))
    assert Ruled().stage_rule(stage) is not None
    assert Again().stage_rule(stage) is None
    assert Techniques.stage_rule is not Policy.stage_rule and FirstChoice().stage_rule(stage) is None


def test_a_policy_that_overrides_nothing_is_exact_and_one_that_does_is_not() -> None:
    class Nothing(Policy):
        pass

    stage = Stage.prefill(torch.arange(3))
    assert Nothing().is_exact and not Nothing().acts_on(stage) and Nothing().approximations() == []
    for policy in (FirstChoice(), EvenChannels(), OverridingRoute(), OverridingChannels(), Mixed(), *BASELINES.values()):
        assert not policy.is_exact and policy.acts_on(stage) and policy.approximations()
    assert (FirstChoice().selects_channels, EvenChannels().selects_channels) == (False, True)
    assert FirstChoice().to_json() == {"name": "FirstChoice", "importance": "mean"}


def test_a_decision_cannot_be_assigned_to_one_policy() -> None:
    for policy in (FirstChoice(), PRESETS["edgexpert"]):
        with pytest.raises(AttributeError):
            policy.route = FirstChoice().route  # type: ignore[method-assign]
    settings = FirstChoice()
    settings.least = 0.5  # type: ignore[attr-defined]
    assert settings.least == 0.5  # type: ignore[attr-defined]


def test_a_policy_is_asked_only_of_stages_that_it_acts_on(engine: Engine) -> None:
    class Prompts(FirstChoice):
        def acts_on(self, stage: Stage) -> bool:
            return stage.tree is None

        def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
            assert stage.tree is None
            return super().route(routing, scores, stage)

    assert answer(engine, Prompts()).traffic.prefill["experts"] == answer(engine, FirstChoice()).traffic.prefill["experts"]


@pytest.mark.parametrize(("experts", "part"), [
    (torch.zeros(1, 1, dtype=torch.int64), "experts and weights of"),
    (None, "from 0 to 32"),
])
def test_a_wrong_routing_ends_with_one_sentence_that_names_the_policy(engine: Engine, experts: Tensor | None, part: str) -> None:
    class Wrong(Policy):
        def route(self, routing: Routing, scores: Scores, stage: Stage) -> Routing:
            return replace(routing, experts=routing.experts + 32 if experts is None else experts, complete=False)

    with pytest.raises(UserError, match=rf"policy Wrong is at fault.*{part}"):
        answer(engine, Wrong())


def test_a_wrong_selection_ends_with_one_sentence_that_names_the_policy(engine: Engine) -> None:
    class Wrong(Policy):
        def select_channels(self, *_: Any) -> ChannelSelection:
            return ChannelSelection(torch.ones(1, 1), None)

    with pytest.raises(UserError, match=r"policy Wrong is at fault.*`loaded` as bool"):
        answer(engine, Wrong())


def test_settings_are_the_fields_of_the_policy_at_hand() -> None:
    @dataclass(frozen=True)
    class Mine(Policy):
        least: float = 0.5

    changed = with_settings(Mine(), {"least": 0.25})
    assert isinstance(changed, Mine) and changed.least == 0.25 and changed.name == "Mine"
    with pytest.raises(UserError, match="policy Mine has no setting 'theta1'; it has least"):
        with_settings(Mine(), {"theta1": 1.0})
    with pytest.raises(UserError, match="it has none"):
        with_settings(FirstChoice(), {"theta1": 1.0})

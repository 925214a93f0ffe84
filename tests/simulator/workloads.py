"""A model of two layers, plans that real policies make for it, and devices that differ in one thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.policy import PRESETS, Policy, Techniques
from edgexpert.simulator.device import Device, load_device
from edgexpert.simulator.shapes import ModelShape
from edgexpert.simulator.workload import PlannedStage

CONFIG = {"model_type": "olmoe", "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256}
DRAFT = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256}
MODEL = ModelShape.of(CONFIG, DRAFT, "tiny")


def edgexpert(**changes: Any) -> Device:
    """The chip with other values; ``dram={"bandwidth": 1e9}`` changes a value of a table."""
    device = load_device("edgexpert")
    return replace(device, **{name: replace(getattr(device, name), **value) if isinstance(value, dict) else value
                              for name, value in changes.items()})


def resolved(name: str) -> Techniques:
    return PRESETS[name].resolved(model_type="olmoe", num_experts=MODEL.experts, top_k=MODEL.top_k)


def random_tree(nodes: int, random: torch.Generator) -> TokenTree:
    parents = [-1] + [int(torch.randint(0, node, (), generator=random)) for node in range(1, nodes)]
    log_prob = torch.zeros(nodes)
    for node in range(1, nodes):
        log_prob[node] = log_prob[parents[node]] + torch.rand((), generator=random).log()
    return TokenTree(torch.arange(nodes), torch.tensor(parents), log_prob)


def random_stage(kind: str, tokens: int, random: torch.Generator, prefix: int = 16) -> Stage:
    if kind == "prefill":
        return Stage.prefill(torch.arange(tokens), importance=torch.rand(tokens, generator=random) * 2)
    return Stage.verify(random_tree(tokens, random), prefix)


def random_scores(tokens: int, random: torch.Generator) -> tuple[Routing, Scores]:
    choice = torch.rand(tokens, MODEL.experts, generator=random).softmax(1)
    weights, experts = choice.topk(MODEL.top_k)
    return Routing(experts, weights, MODEL.experts), Scores(choice, choice, normalise=False)


def planned(policy: Policy, stage: Stage, seed: int, emitted: int = 1, draft_steps: int = 0) -> PlannedStage:
    """What a policy decides on random scores and activations, which are the same for every policy."""
    plans = [_plan(policy, stage, layer, torch.Generator().manual_seed(1000 * seed + layer)) for layer in MODEL.moe_layers]
    return PlannedStage(stage, plans, emitted, draft_steps)


def _plan(policy: Policy, stage: Stage, layer: int, random: torch.Generator) -> LayerPlan:
    tokens = len(stage.tokens)
    routing = policy.route(*random_scores(tokens, random), stage)
    inputs = (torch.randn(tokens, MODEL.experts, width, generator=random) for width in (MODEL.hidden, MODEL.intermediate))
    gate_up, down = (policy.select_channels(x[routing.pairs[0], routing.pair_expert], routing, stage) for x in inputs)
    return LayerPlan(layer, routing, gate_up, down)


def text(policy_name: str, seed: int = 0, stages: int = 2) -> Iterator[PlannedStage]:
    """A prompt and some verify stages."""
    random = torch.Generator().manual_seed(seed)
    policy = resolved(policy_name)
    yield planned(policy, random_stage("prefill", 20, random), seed)
    for number in range(stages):
        yield planned(policy, random_stage("verify", 12, random), seed + number + 1, emitted=3, draft_steps=2)

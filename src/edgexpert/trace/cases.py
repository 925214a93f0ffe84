"""What a simulation runs: a trace or a synthetic workload under a policy, on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgexpert.core.checked import Range, require
from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import Routing
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.policy import Policy, policy_named
from edgexpert.simulator.device import Device
from edgexpert.simulator.shapes import ModelShape, model_named
from edgexpert.simulator.sweep import Case
from edgexpert.simulator.workload import PlannedStage, dense_decode, dense_prefill

LIMITS = {
    "prompt": Range(1, 1_000_000), "context": Range(0, 100_000_000), "stages": Range(1, 100_000), "candidates": Range(0, 10_000),
    "draft_steps": Range(0, 10_000),
}


@dataclass(frozen=True)
class Dense:
    """A synthetic workload in which experts are loaded whole; see `dense_decode` and `dense_prefill`.

    Attributes:
        prompt: tokens of the prompt, which loads every expert that it can.
        context: cached tokens while decoding.
        experts: distinct experts of a layer in a verify stage; None for as many as its tokens can load: the top-k of one token.
        acceptance_length: tokens that a stage gives; None for 4.3, or 1 without candidates.
        draft_steps: passes through the draft before a stage; None for 7, or 0 without candidates.
    """

    prompt: int = 64
    context: int = 512
    stages: int = 10
    candidates: int = 64
    experts: float | None = None
    acceptance_length: float | None = None
    draft_steps: int | None = None

    def __post_init__(self) -> None:
        if self.acceptance_length is None:
            object.__setattr__(self, "acceptance_length", min(4.3, self.candidates + 1))
        if self.draft_steps is None:
            object.__setattr__(self, "draft_steps", 7 if self.candidates else 0)
        for name, allowed in LIMITS.items():
            require(name, getattr(self, name), allowed)
        require("acceptance_length", self.acceptance_length or 0, Range(1, self.candidates + 1))
        if self.experts is not None:
            require("experts", self.experts, Range(1, 100_000))


def dense_case(model: ModelShape, device: Device, dense: Dense) -> Case:
    """The dense workload on a device; plain decoding on one that does not draft. No policy acts on it.

    Raises:
        UserError: the device's own policy does not exist.
    """
    policy_named(device.policy)
    return Case("dense", True, "exact", device, model, partial(_dense_stages, model, device.drafts, dense))


def _dense_stages(model: ModelShape, drafts: bool, dense: Dense) -> Iterator[PlannedStage]:
    yield dense_prefill(model, dense.prompt, min(model.experts, dense.prompt * model.top_k))
    if not drafts:
        yield from dense_decode(model, stages=dense.stages, prefix=dense.context)
        return
    yield from dense_decode(
        model, stages=dense.stages, candidates=dense.candidates, prefix=dense.context,
        experts=dense.experts or min(model.experts, (dense.candidates + 1) * model.top_k),
        acceptance_length=dense.acceptance_length or 1, draft_steps=dense.draft_steps or 0)


def trace_case(file: Path, device: Device, policy: Policy | str | None = None, model: str | None = None) -> Case:
    """A trace replayed under a policy (the device's own unless given) on a device.

    A device that does not draft decodes the trace's accepted tokens one by one.

    Args:
        model: name or folder of the model's configuration; what the trace says unless given.

    Raises:
        UserError: the trace cannot be read, is of another model, or the policy selects channels for a device without draft.
    """
    from edgexpert.trace.read import Trace

    trace = Trace(file)
    if not isinstance(policy, Policy):
        policy = policy_named(policy or device.policy)
    shape = model_named(model or trace.facts.model)
    facts = trace.facts
    if (shape.experts, shape.hidden, shape.intermediate) != (facts.num_experts, facts.hidden, facts.intermediate):
        raise UserError(f"the trace {file} is of another model than {shape.name}; give the traced one with --model")
    if not device.drafts and policy.selects_channels:
        raise UserError(f"the device {device.name} decodes plainly, but policy {policy.name} selects channels for a token tree; "
                        "choose a device that drafts, or another policy")
    stages = partial(_replayed, file, policy, plain=not device.drafts)
    return Case(str(file), trace.synthetic, policy.name, device, shape, stages, reuse=policy.needs_importance)


def _replayed(file: Path, policy: Policy, plain: bool) -> Iterator[PlannedStage]:
    from edgexpert.trace.read import Trace

    trace = Trace(file)
    if not plain:
        yield from trace.replay(policy)
        return
    for recorded, planned in zip(trace.stages(), trace.replay(policy), strict=True):
        yield from one_by_one(planned, recorded.accepted)


def one_by_one(planned: PlannedStage, accepted: list[int]) -> Iterator[PlannedStage]:
    """Plain decoding of what a verify stage accepted: a stage for each node of the accepted path, the root first.

    A token routes as it did in the tree, where it saw the same tokens before it. Prefill stays as it is.
    """
    if planned.stage.tree is None:
        yield planned
        return
    for number, node in enumerate(accepted):
        tree = TokenTree.of_root(int(planned.stage.tokens[node]))
        plans = [_of_one_token(plan, node) for plan in planned.plans if isinstance(plan, LayerPlan)]
        yield PlannedStage(Stage.verify(tree, planned.stage.prefix + number), plans, emitted=1)


def _of_one_token(plan: LayerPlan, node: int) -> LayerPlan:
    routing = plan.routing
    one = Routing(routing.experts[node : node + 1], routing.weights[node : node + 1], routing.num_experts)
    return LayerPlan(plan.layer, one, storage=plan.storage)

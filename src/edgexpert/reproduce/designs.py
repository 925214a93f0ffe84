"""The bars of the evaluation's figures: a policy on a device, and whose acceptance length it has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edgexpert.policy import PRESETS, Policy, policy_named
from edgexpert.reproduce.claims import paper
from edgexpert.simulator.device import Device, load_device
from edgexpert.simulator.run import Phase, RunResult

Row = Literal["baseline", "reuse", "coalesced", "all"]
Family = Literal["reference", "step", "prior", "ours"]


@dataclass(frozen=True)
class Design:
    """Attributes:
        row: of Table IV, for the acceptance length; None for plain decoding.
        decodes_as: another design with the same decode stages, which need not be replayed again.
    """

    name: str
    title: str
    family: Family
    policy: Policy
    device: Device
    row: Row | None
    decodes_as: str | None = None


@dataclass(frozen=True)
class Measured:
    """A design on a model. Seconds and joules.

    The stages are the trace's; how many tokens a stage gives is Table IV's, since a replay cannot know what a policy does to the
    acceptance length.
    """

    design: Design
    model: str
    prefill: Phase
    decode: Phase

    @property
    def acceptance(self) -> float:
        return float(paper()["acceptance"][self.model][self.design.row]) if self.design.row else 1.0

    @property
    def tokens(self) -> float:
        """Tokens that its decode stages give."""
        return self.decode.stages * self.acceptance

    @property
    def ttft(self) -> float:
        return self.prefill.latency / self.prefill.stages

    @property
    def tpot(self) -> float:
        return self.decode.latency / self.tokens

    def seconds(self, output: int) -> float:
        """End to end: the prompt, which gives the first token, and the others."""
        return self.ttft + (output - 1) * self.tpot

    def joules(self, output: int) -> float:
        return self.prefill.joules / self.prefill.stages + (output - 1) * self.decode.joules / self.tokens

    @classmethod
    def of(cls, design: Design, model: str, result: RunResult) -> Measured:
        return cls(design, model, result.prefill, result.decode)


def all_designs() -> list[Design]:
    """In the order of the paper's figures."""
    baseline, chip = load_device("baseline"), load_device("edgexpert")
    exact, ours = PRESETS["exact"], PRESETS["edgexpert"]
    designs = [
        Design("plain", "plain decoding", "reference", exact, replace(baseline, drafts=False), None),
        Design("baseline", "Baseline", "reference", exact, baseline, "baseline"),
        Design("pruning", "Pruning", "step", policy_named("pruned"), chip, "baseline"),
        Design("reuse", "EdgeXpert PR", "step", policy_named("reuse"), chip, "reuse", decodes_as="pruning"),
        Design("coalesced", "EdgeXpert DC", "step", policy_named("coalesced"), chip, "coalesced"),
    ]
    for name in ("moe-pruner-au", "moe-pruner-sd", "edgemoe-au", "edgemoe-sd", "smolpu"):
        device = load_device(name)
        row: Row | None = "baseline" if device.drafts else None
        designs.append(Design(name, device.name, "prior", policy_named(device.policy), device, row))
    return [
        *designs,
        Design("edgexpert", "EdgeXpert ALL", "ours", ours, chip, "all"),
        Design("edgexpert-max", "EdgeXpert ALL, max", "ours", replace(ours, importance="max"), chip, "all",
               decodes_as="edgexpert"),
    ]

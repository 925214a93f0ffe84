"""What the figures share: traces, made once, and the results of every design, computed once and when first asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from edgexpert.core.resources import MODELS, bundled_folder
from edgexpert.policy import Policy
from edgexpert.reproduce.designs import Design, Measured, all_designs
from edgexpert.simulator.run import RunResult, simulate_stage
from edgexpert.simulator.shapes import model_named
from edgexpert.simulator.workload import PlannedStage
from edgexpert.trace.cases import one_by_one
from edgexpert.trace.read import Trace
from edgexpert.trace.recorded import RecordedStage


@dataclass(frozen=True)
class Settings:
    """How much is computed.

    Attributes:
        stages: verify stages of each synthetic trace.
        prompt: tokens of its prompt; 64 fit into the chip's SRAM, and half of MT-Bench's first turns are shorter.
        lengths: prompts of Figure 8b, in tokens.
        stories: prompts of the recorded run, each of ``story_characters`` and with ``story_tokens`` new tokens.
        example: the model of the paper's examples.
    """

    stages: int = 6
    prompt: int = 64
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    stories: int = 6
    story_characters: int = 400
    story_tokens: int = 32
    models: tuple[str, ...] = MODELS
    example: str = "qwen3-30b-a3b"
    seed: int = 0


class Workbench:
    """Args:
        folder: for the traces.
        tell: called with what is being done, for the progress bar.
    """

    def __init__(self, folder: Path, settings: Settings | None = None, tell: Callable[[str], None] = lambda what: None) -> None:
        self.folder, self.settings, self.tell = folder, settings or Settings(), tell
        self.designs = {design.name: design for design in all_designs()}
        self.measured = cache(self._measured)
        self.synthetic = cache(self._synthetic)
        self._run = cache(self._simulate)

    @property
    def synthetic_label(self) -> str:
        """How a result from the synthetic traces is labelled."""
        s = self.settings
        return f"synthetic: {s.stages} verify stages, a prompt of {s.prompt} tokens, seed {s.seed}"

    @property
    def prefill_label(self) -> str:
        return f"synthetic: one prompt of each length, seed {self.settings.seed}"

    @property
    def recorded_label(self) -> str:
        s = self.settings
        return (f"recorded: stories with its EAGLE-3 draft, {s.stories} held-out prompts of {s.story_characters} characters, "
                f"{s.story_tokens} new tokens each")

    def _synthetic(self, model: str, prompt: int | None = None, stages: int | None = None) -> Trace:
        """A synthetic trace; of the settings' size unless given."""
        from edgexpert.trace.synthesis import synthesise_trace

        s = self.settings
        prompt, stages = prompt or s.prompt, s.stages if stages is None else stages
        file = self.folder / f"{model}-{prompt}-{stages}.parquet"
        self.tell(f"synthesising {file.stem}")
        synthesise_trace(model, file, stages, prompt, seed=s.seed, force=True)
        return Trace(file)

    @cached_property
    def recorded(self) -> Trace:
        """A run of the bundled model."""
        import edgexpert
        from edgexpert.speculation.draft import TreeShape
        from edgexpert.speculation.sampling import SamplingParams
        from edgexpert.trace.record import record_trace

        s, file = self.settings, self.folder / "stories.parquet"
        self.tell("recording stories")
        texts = (bundled_folder("stories") / "held_out.jsonl").read_text("utf-8").splitlines()
        prompts = [json.loads(line)["text"][: s.story_characters] for line in texts[: s.stories]]
        record_trace(edgexpert.load("stories"), prompts, file, SamplingParams(max_new_tokens=s.story_tokens), TreeShape())
        return Trace(file)

    def replay(self, trace: Trace, policy: Policy) -> Iterator[tuple[RecordedStage, PlannedStage]]:
        """What was recorded beside what the policy makes of it."""
        self.tell(f"replaying {trace.file.stem} under {policy.name}")
        return zip(trace.stages(), trace.replay(policy), strict=True)

    def _measured(self, name: str, model: str) -> Measured:
        """A design on the synthetic trace of a model. Designs of one policy share its replay."""
        design = self.designs[name]
        if design.decodes_as is None:
            result = self._run(model, design.policy)[name]
            return Measured.of(design, model, result)
        prompt_alone = self.alone(design, model, stages=0)  # the same prompt: a trace's random numbers begin with it
        return Measured(design, model, prompt_alone.prefill, self.measured(design.decodes_as, model).decode)

    def _simulate(self, model: str, policy: Policy) -> dict[str, RunResult]:
        """All designs of one policy, stage by stage."""
        designs = [design for design in self.designs.values() if design.policy == policy and design.decodes_as is None]
        shape = model_named(model)
        results = {design.name: RunResult(design.device.name, shape.name) for design in designs}
        for recorded, planned in self.replay(self.synthetic(model), policy):
            for design in designs:
                _add(results[design.name], design, model, [planned] if design.device.drafts
                     else one_by_one(planned, recorded.accepted))
        return results

    def alone(self, design: Design, model: str, stages: int) -> Measured:
        """A design on a synthetic trace of ``stages`` verify stages, replayed for it."""
        result = RunResult(design.device.name, model)
        for _, planned in self.replay(self.synthetic(model, stages=stages), design.policy):
            _add(result, design, model, [planned])
        return Measured.of(design, model, result)

    def all_measured(self, names: Sequence[str]) -> list[Measured]:
        """Every model with every one of the designs."""
        return [self.measured(name, model) for model in self.settings.models for name in names]


def _add(result: RunResult, design: Design, model: str, stages: Sequence[PlannedStage] | Iterator[PlannedStage]) -> None:
    for stage in stages:
        outcome, _ = simulate_stage(model_named(model), design.device, stage, reuse=design.policy.needs_importance)
        (result.prefill if outcome.kind == "prefill" else result.decode).add(outcome)

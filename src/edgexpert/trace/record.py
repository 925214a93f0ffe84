"""Recording a run: what the routers said, what the experts were given, and what became of every token tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage
from edgexpert.model.recorder import LayerRecord
from edgexpert.runtime.engine import Engine
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.sampling import SamplingParams
from edgexpert.trace.schema import Channels, Facts
from edgexpert.trace.write import Row, TraceWriter, floats, ints, layer_row, stage_row, trace_writer

SAMPLED_SHARE = 1 / 8  # of the verify stages, under --channels sampled


def record_trace(
    engine: Engine,
    prompts: Sequence[str],
    file: Path,
    params: SamplingParams,
    tree: TreeShape,
    channels: Channels = "full",
    advance: Callable[[], None] = lambda: None,
    *,
    force: bool = False,
) -> None:
    """Answers the prompts and writes the trace of all their stages.

    Args:
        advance: called after each prompt.
        force: whether a file that is there may be replaced.

    Raises:
        UserError: the model's routers have an unknown form, a prompt does not fit, or the file cannot be written; none is
            left then.
    """
    if channels not in get_args(Channels):
        raise UserError(f"`channels` must be one of {', '.join(get_args(Channels))}, not {channels}")
    with trace_writer(file, force) as writer:
        recorder = TraceRecorder(writer, facts_of(engine, channels, params.seed))
        for recorder.text, prompt in enumerate(prompts):
            engine.generate(prompt, params, tree, recorder=recorder)
            advance()


def facts_of(engine: Engine, channels: Channels, seed: int) -> Facts:
    """Facts of a run of this engine under its policy."""
    host = engine.host
    forms = [block.form for block in host.blocks if block.form is not None]
    if len(forms) < len(host.blocks):
        raise UserError(f"the router of model type {host.config.model_type} scores experts in a way that EdgeXpert does not "
                        "know; its runs cannot be traced")
    shape = host.blocks[0].shape
    stored = host.storage(engine.policy)
    storages = [stored[block.layer] for block in host.blocks] if stored else []
    return Facts(
        model=engine.name, model_type=host.config.model_type, num_experts=host.num_experts, top_k=host.top_k,
        layers=[block.layer for block in host.blocks],
        hidden=shape.hidden, intermediate=shape.intermediate, gate_up_outputs=shape.gate_up_outputs,
        normalise=[form.normalise for form in forms], scale=[form.scale for form in forms],
        draft=engine.draft.name if engine.draft else "none", policy=engine.policy.to_json(),
        channels=channels, synthetic=False, seed=seed,
        calibrated=host.calibrated,
        value_share=[storage.value.tolist() for storage in storages] or None,
        index_bits=storages[0].index_bits if storages else 0.0,
    )


class TraceRecorder:
    """A `Recorder` that writes a trace.

    Attributes:
        text: number of the prompt that runs.
    """

    def __init__(self, writer: TraceWriter, facts: Facts) -> None:
        self._writer, self._facts = writer, facts
        self._layers: list[Row] = []
        self.text = 0

    def layer(self, record: LayerRecord) -> None:
        assert record.scores is not None
        dtype: Any = str(record.exact.weights.dtype).removeprefix("torch.")
        self._facts = replace(self._facts, weights_dtype=dtype)
        row = layer_row(record.plan.layer, record.exact, record.scores)
        if self._wants_channels(record.stage):
            row |= {"input": floats(record.inputs.abs()), "ran": ints(record.plan.routing.experts),
                    "down_input": floats(record.down_inputs().abs())}
        self._layers.append(row)

    def _wants_channels(self, stage: Stage) -> bool:
        """No policy selects channels in prefill, so they are kept for verify stages alone."""
        if stage.kind == "prefill" or self._facts.channels == "none":
            return False
        sample = random.Random(f"{self._facts.seed}/{self._writer.stages}").random()
        return self._facts.channels == "full" or sample < SAMPLED_SHARE

    def stage(self, stage: Stage, path: Sequence[int], emitted: int, draft_steps: int) -> None:
        row = stage_row(stage, self.text, path, emitted, draft_steps)
        self._writer.append(self._facts, row, self._layers)
        self._layers = []

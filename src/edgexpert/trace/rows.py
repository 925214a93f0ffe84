"""Rows of a trace as stages: every number is in its range before anything computes with it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.trace.channels import SyntheticChannels
from edgexpert.trace.recorded import ChannelInputs, RecordedChannels, RecordedLayer, RecordedStage
from edgexpert.trace.schema import Facts
from edgexpert.trace.write import Row

MOST = 2**31 - 1
LONGEST, MOST_STEPS = 100_000_000, 10_000
"""Cached tokens, and passes through a draft, that a stage may have."""
LARGEST = torch.finfo(torch.float32).max


class CheckedRow:
    """One row, whose values are asked for with the range that they must be in.

    Raises:
        UserError: names the column and the row where a value is missing or out of its range.
    """

    def __init__(self, row: Row, place: int, file: Path) -> None:
        self._row, self._place, self._file = row, place, file

    def has(self, name: str) -> bool:
        return self._row[name] is not None

    def wrong(self, name: str) -> UserError:
        return UserError(f"the trace {self._file} is damaged: row {self._place} has no sensible {name}; record it again")

    def text(self, name: str, allowed: Sequence[str]) -> str:
        value = self._row[name]
        if value not in allowed:
            raise self.wrong(name)
        return str(value)

    def number(self, name: str, low: int, high: int) -> int:
        value = self._row[name]
        if not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name)
        return value

    def ints(self, name: str, shape: tuple[int, ...] | None, low: int, high: int) -> Tensor:
        """Whole numbers, int64 of ``shape``; of any length where that is None."""
        return self._tensor(name, shape, low, high).long()

    def floats(self, name: str, shape: tuple[int, ...], low: float = -LARGEST, high: float = LARGEST) -> Tensor:
        """Numbers that are not NaN, float32 of ``shape``."""
        return self._tensor(name, shape, low, high)

    def _tensor(self, name: str, shape: tuple[int, ...] | None, low: float, high: float) -> Tensor:
        value = self._row[name]
        if not isinstance(value, np.ndarray) or (shape is not None and len(value) != int(np.prod(shape))):
            raise self.wrong(name)
        if not bool(((value >= low) & (value <= high)).all()):  # nor is NaN
            raise self.wrong(name)
        tensor = torch.from_numpy(value)
        return tensor if shape is None else tensor.view(shape)


def recorded_stage(index: int, rows: Sequence[CheckedRow], facts: Facts) -> RecordedStage:
    """A stage from its own row and those of its layers.

    Raises:
        UserError: a value is missing or out of its range, or rows are.
    """
    row, *layers = rows
    if row.number("stage", 0, MOST) != index or row.has("layer"):
        raise row.wrong("stage")
    if len(layers) != len(facts.layers):
        raise row.wrong("number of layers")
    tokens = row.ints("tokens", None, 0, MOST)
    if len(tokens) == 0:
        raise row.wrong("tokens")
    prefix, accepted = row.number("prefix", 0, LONGEST), []
    if row.text("kind", ("prefill", "verify")) == "prefill":
        importance = row.floats("importance", (len(tokens),), low=0) if row.has("importance") else None
        stage = Stage.prefill(tokens, prefix, importance)
    else:
        tree = _tree(row, tokens)
        stage, accepted = Stage.verify(tree, prefix), _accepted(row, tree)
    if not torch.equal(row.ints("depth", (len(tokens),), 0, MOST), stage.depth):
        raise row.wrong("depth")
    return RecordedStage(
        index, row.number("text", 0, MOST), stage, accepted, row.number("emitted", 0, len(tokens)),
        row.number("draft_steps", 0, MOST_STEPS),
        [_layer(number, layer, index, stage, facts) for number, layer in enumerate(layers)])


def _tree(row: CheckedRow, tokens: Tensor) -> TokenTree:
    shape = (len(tokens),)
    parents = row.ints("parents", shape, -1, len(tokens) - 1)
    if parents[0] != -1 or not bool(((parents >= 0) & (parents < torch.arange(len(tokens))))[1:].all()):
        raise row.wrong("parents")
    return TokenTree(tokens, parents, row.floats("path_log_prob", shape, low=-inf, high=1e-3))


def _accepted(row: CheckedRow, tree: TokenTree) -> list[int]:
    accepted: list[int] = row.ints("accepted", None, 0, len(tree) - 1).tolist()
    parents = [int(tree.parents[node]) for node in accepted]
    if parents != [-1, *accepted[:-1]]:
        raise row.wrong("accepted")
    return accepted


def _layer(number: int, row: CheckedRow, stage_index: int, stage: Stage, facts: Facts) -> RecordedLayer:
    layer = facts.layers[number]
    row.number("layer", layer, layer)
    tokens, k, count = len(stage.tokens), facts.top_k, facts.num_experts
    experts = row.ints("experts", (tokens, k), 0, count - 1)
    if bool((experts.sort(1).values.diff(dim=1) == 0).any()):
        raise row.wrong("experts")
    weights = row.floats("weights", (tokens, k)).to(getattr(torch, facts.weights_dtype))
    choice = row.floats("choice", (tokens, count), low=-inf)
    gate = row.floats("gate", (tokens, count), low=0) if row.has("gate") else choice
    channels: ChannelInputs | None = None
    if facts.synthetic:
        channels = SyntheticChannels(facts, stage_index, layer, stage.depth)
    elif row.has("input"):
        ran = row.ints("ran", (tokens, k), 0, count)
        pairs = int((ran < count).sum())
        channels = RecordedChannels(row.floats("input", (tokens, facts.hidden), low=0), ran,
                                    row.floats("down_input", (pairs, facts.intermediate), low=0))
    return RecordedLayer(layer, Routing(experts, weights, count),
                         Scores(choice, gate, facts.normalise[number], facts.scale[number]), channels)


def value_of(scalar: pa.Scalar) -> Any:
    """A value of a column; a list as an array of its own, None where one of its values is missing."""
    if not scalar.is_valid:
        return None
    if not isinstance(scalar, pa.ListScalar):
        return scalar.as_py()
    return None if scalar.values.null_count else np.array(scalar.values)


def same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column is of the type of the schema, whatever the name of a list's elements."""
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and found.value_type == wanted.value_type
    return bool(found == wanted)

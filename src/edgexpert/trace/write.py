"""Writing a trace in bounded memory: stages are gathered into row groups, and the file appears when it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.stage import Stage
from edgexpert.trace.schema import SCHEMA, Facts

ROW_GROUP_BYTES = 32 << 20

Row = dict[str, Any]


def stage_row(stage: Stage, text: int, accepted: Sequence[int], emitted: int, draft_steps: int) -> Row:
    """The row of a stage."""
    tree = stage.tree
    return {
        "text": text, "kind": stage.kind, "prefix": stage.prefix, "tokens": ints(stage.tokens), "depth": ints(stage.depth),
        "parents": None if tree is None else ints(tree.parents),
        "path_log_prob": None if tree is None else floats(tree.path_log_prob),
        "accepted": None if tree is None else np.array(accepted, dtype=np.int32),
        "emitted": emitted, "draft_steps": draft_steps,
        "importance": None if stage.importance is None else floats(stage.importance),
    }


def layer_row(layer: int, exact: Routing, scores: Scores) -> Row:
    """The row of a layer, without channels. The gate is left out where it is what the router chooses by."""
    same = torch.equal(scores.choice, scores.gate)
    return {"layer": layer, "experts": ints(exact.experts), "weights": floats(exact.weights),
            "choice": floats(scores.choice), "gate": None if same else floats(scores.gate)}


def ints(values: Tensor) -> np.ndarray:
    return values.flatten().to(torch.int32).cpu().numpy()


def floats(values: Tensor) -> np.ndarray:
    return values.flatten().float().cpu().numpy()


class TraceWriter:
    """Appends stages to a new trace. A context manager: the file stands complete after it, or is not there."""

    def __init__(self, file: Path) -> None:
        if not file.parent.is_dir():
            raise UserError(f"the folder {file.parent} for the trace does not exist; make it first")
        self.file = file
        self._part = file.with_name(file.name + ".part")
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[Row] = []
        self._bytes = 0
        self.stages = 0

    def append(self, facts: Facts, stage: Row, layers: Sequence[Row]) -> None:
        """Adds a stage and its layers. The facts of the first stage are the file's."""
        if self._writer is None:
            self._schema = SCHEMA.with_metadata(facts.to_metadata())
            self._writer = pq.ParquetWriter(self._part, self._schema, compression="zstd", use_dictionary=["kind"])
        rows = [{"stage": self.stages, **row} for row in (stage, *layers)]
        self.stages += 1
        self._rows += rows
        self._bytes += sum(value.nbytes for row in rows for value in row.values() if isinstance(value, np.ndarray))
        if self._bytes > ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        assert self._writer is not None
        columns = [pa.array([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._bytes = [], 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._writer is None:
            return
        try:
            if kind is None and self._rows:
                self._flush()
            self._writer.close()
            if kind is None:
                self._part.replace(self.file)
        finally:
            self._part.unlink(missing_ok=True)

"""Writing a trace in bounded memory: stages are gathered into row groups, and the file appears when it is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.output import output_file
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


@contextmanager
def trace_writer(file: Path, force: bool = False) -> Iterator[TraceWriter]:
    """A writer of a new trace, which stands complete after the block, or is not there.

    Args:
        force: whether a file that is there may be replaced.

    Raises:
        UserError: the file cannot be written or must not be replaced; or no stage was appended.
    """
    with output_file(file, force=force) as part:
        writer = TraceWriter(part)
        try:
            yield writer
            writer.flush()
        finally:
            writer.close()
        if not writer.stages:
            raise UserError(f"no stage ran, so there is nothing to write into the trace {file}")


class TraceWriter:
    """Appends stages to a trace that `trace_writer` has opened."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[Row] = []
        self._bytes = 0
        self.stages = 0

    def append(self, facts: Facts, stage: Row, layers: Sequence[Row]) -> None:
        """Adds a stage and its layers. The facts of the first stage are the file's."""
        if self._writer is None:
            self._schema = SCHEMA.with_metadata(facts.to_metadata())
            self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd", use_dictionary=["kind"],
                                            write_page_checksum=True)
        rows = [{"stage": self.stages, **row} for row in (stage, *layers)]
        self.stages += 1
        self._rows += rows
        self._bytes += sum(value.nbytes for row in rows for value in row.values() if isinstance(value, np.ndarray))
        if self._bytes > ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was appended."""
        if self._writer is None or not self._rows:
            return
        columns = [pa.array([row.get(field.name) for row in self._rows], field.type) for field in self._schema]
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

"""The layout of a trace: one Parquet table, described column by column in docs/trace.md.

A row without ``layer`` is a stage; the rows of its MoE layers follow it. Lists are flattened row-major.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pyarrow as pa

from edgexpert.core.checked import Range, checked
from edgexpert.core.errors import UserError
from edgexpert.policy import Hyperparameters
from edgexpert.policy.importance import Normalisation

VERSION = 1
KEY = b"edgexpert.trace"

Channels = Literal["full", "sampled", "none"]

_INTS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())

SCHEMA = pa.schema([
    ("stage", pa.int32()),
    ("layer", pa.int32()),
    # of a stage
    ("text", pa.int32()),
    ("kind", pa.string()),
    ("prefix", pa.int32()),
    ("tokens", _INTS),
    ("parents", _INTS),
    ("depth", _INTS),
    ("path_log_prob", _FLOATS),
    ("accepted", _INTS),
    ("emitted", pa.int32()),
    ("draft_steps", pa.int32()),
    ("importance", _FLOATS),
    # of a layer
    ("experts", _INTS),
    ("weights", _FLOATS),
    ("choice", _FLOATS),
    ("gate", _FLOATS),
    ("input", _FLOATS),
    ("ran", _INTS),
    ("down_input", _FLOATS),
])


@dataclass(frozen=True)
class Facts:
    """What holds for a whole trace; the JSON object in the file's metadata.

    Attributes:
        layers: indices of the MoE layers.
        hidden, intermediate, gate_up_outputs: sizes of one expert, as in `ExpertShape`.
        normalise, scale: of each MoE layer's router, as in `Scores`.
        weights_dtype: what the model rounds routing weights to.
        calibrated: the checkpoint's own hyperparameters, if it has any.
        policy: what the run was recorded under, hyperparameters included.
        value_share, index_bits: how that policy stored the experts of each layer, as in `Storage`; None for as hosted.
        channels: which verify stages hold channel inputs; those of a synthetic trace follow from its seed.
        synthetic: whether the numbers are drawn at random instead of measured.
        seed: of the sampled stages, or of the synthesis.
    """

    model: str
    model_type: str
    num_experts: Annotated[int, Range(1, 65_536)]
    top_k: Annotated[int, Range(1, 65_536)]
    layers: list[Annotated[int, Range(0, 100_000)]]
    hidden: Annotated[int, Range(1, 2**20)]
    intermediate: Annotated[int, Range(1, 2**20)]
    gate_up_outputs: Annotated[int, Range(1, 2**21)]
    normalise: list[bool]
    scale: list[Annotated[float, Range(-1e6, 1e6)]]
    draft: str
    policy: dict[str, Any]
    channels: Channels
    synthetic: bool
    seed: int = 0
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    calibrated: Hyperparameters | None = None
    value_share: list[list[Annotated[float, Range(0, 16)]]] | None = None
    index_bits: Annotated[float, Range(0, 64)] = 0.0

    def to_metadata(self) -> dict[bytes, bytes]:
        return {KEY: json.dumps({"version": VERSION, **asdict(self)}).encode()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes] | None, file: Path) -> Facts:
        """Raises UserError where ``file`` is no trace, or one of another version."""
        if not metadata or KEY not in metadata:
            raise UserError(f"the Parquet file {file} is no trace; make one with edgexpert trace")
        what = f"the trace {file}"
        try:
            values = json.loads(metadata[KEY])
            version = values.pop("version", None)
        except (ValueError, AttributeError, TypeError, RecursionError):
            raise UserError(f"the facts in {what} are damaged; record it again") from None
        if version != VERSION:
            raise UserError(f"the trace {file} has schema version {str(version)[:20]}, but this edgexpert reads version "
                            f"{VERSION}; record it again")
        known = {field.name for field in fields(cls)}
        facts = checked(cls, {name: value for name, value in values.items() if name in known}, what)
        facts._check(what)
        return facts

    def _check(self, what: str) -> None:
        """That the facts agree with one another."""
        layers, named = len(self.layers), self.policy
        shares = self.value_share
        agree = {
            "top_k": self.top_k <= self.num_experts,
            "layers": layers > 0 and self.layers == sorted(set(self.layers)),
            "normalise": len(self.normalise) == layers,
            "scale": len(self.scale) == layers,
            "policy": isinstance(named.get("name"), str) and named.get("importance") in get_args(Normalisation),
            "value_share": shares is None or (len(shares) == layers and all(len(row) == self.num_experts for row in shares)),
        }
        for name, agrees in agree.items():
            if not agrees:
                raise UserError(f"the key {name} of {what} does not agree with the others; record it again")

"""Reading a trace stage by stage, and replaying it: the plans that a policy makes of what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.shapes import ExpertShape, Storage, WeightFormat
from edgexpert.core.stage import Stage
from edgexpert.policy import Policy
from edgexpert.policy.decide import channels_of, routing_of
from edgexpert.policy.use import ExpertUse
from edgexpert.simulator.workload import PlannedStage
from edgexpert.trace.recorded import RecordedLayer, RecordedStage
from edgexpert.trace.rows import MOST, CheckedRow, recorded_stage, same_type, value_of
from edgexpert.trace.schema import SCHEMA, Facts
from edgexpert.trace.write import Row

ROWS_AT_ONCE = 16
DAMAGED = (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError)
"""What pyarrow may raise on a file that is none of its own."""
P = TypeVar("P", bound=Policy)


class Trace:
    """A trace file. Its stages are read one after the other, so that memory does not grow with the file.

    Raises:
        UserError: there is no such file, it is damaged, no trace, or of another schema version.
    """

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)
        if not self.file.is_file():
            raise UserError(f"there is no trace {self.file}; make one with edgexpert trace")
        try:
            schema = pq.read_schema(self.file)
        except PermissionError:
            raise UserError(f"the trace {self.file} cannot be read (permission denied); make it readable") from None
        except DAMAGED as error:
            raise self._damaged(error) from None
        self.facts = Facts.from_metadata(schema.metadata, self.file)
        for field in SCHEMA:
            if schema.names.count(field.name) != 1:
                raise UserError(f"the trace {self.file} lacks the column {field.name}, or has it twice; record it again")
            if not same_type(schema.field(field.name).type, field.type):
                raise UserError(f"the column {field.name} of the trace {self.file} holds {schema.field(field.name).type} "
                                f"instead of {field.type}; record it again")

    def _damaged(self, error: BaseException) -> UserError:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        return UserError(f"the trace {self.file} is truncated or no Parquet file ({reason}); record it again")

    @property
    def synthetic(self) -> bool:
        """Whether the numbers are drawn at random instead of measured; results must say so."""
        return self.facts.synthetic

    def shape(self, format: WeightFormat) -> ExpertShape:
        """Sizes of an expert whose weights are stored in ``format``."""
        return ExpertShape(self.facts.hidden, self.facts.intermediate, self.facts.gate_up_outputs, format)

    def resolve(self, policy: P) -> P:
        """The policy with the hyperparameters that the traced model would have."""
        return policy.resolved(model_type=self.facts.model_type, num_experts=self.facts.num_experts, top_k=self.facts.top_k,
                               calibrated=self.facts.calibrated)

    def replay(self, policy: Policy, *, sampled_only: bool = False) -> Iterator[PlannedStage]:
        """The plans that ``policy`` makes of every stage; under the policy of the run they are the run's own.

        Under another policy the router's scores and the inputs of gate/up are those of the run, as if the policy had not
        changed the hidden states; the token trees and the accepted paths are the run's as well.

        Args:
            sampled_only: leave out verify stages without channels, for a trace of ``--channels sampled``.

        Raises:
            UserError: the policy needs what was not recorded; says how to record it.
        """
        policy = self.resolve(policy)
        if policy.needs_received_attention:
            raise UserError(f"policy {policy.name} needs the attention that tokens receive, which no trace holds; replay another "
                            "policy, or a `token_weight` of routing or path")
        storages = self._storages(policy)
        for recorded in self.stages():
            needs_channels = policy.selects_channels and recorded.stage.tree is not None and policy.acts_on(recorded.stage)
            if needs_channels and any(layer.channels is None for layer in recorded.layers):
                if sampled_only and self.facts.channels == "sampled":
                    continue
                raise self._without_channels(policy)
            stage = self._weighed(recorded.stage, policy)
            plans = [_plan(policy, stage, layer, storages.get(layer.layer)) for layer in recorded.layers]
            yield PlannedStage(stage, plans, recorded.emitted, recorded.draft_steps)

    def _weighed(self, stage: Stage, policy: Policy) -> Stage:
        """The stage with the importance of its prompt as the policy wants it normalised."""
        recorded = self.facts.policy.get("importance", "mean")
        if stage.importance is None or policy.importance == recorded or not policy.needs_importance:
            return stage
        if recorded == "quantile":
            raise UserError(f"the trace {self.file} holds importance as quantiles, from which no {policy.importance} can be "
                            f"made; record it with `importance` {policy.importance}")
        return replace(stage, importance=policy.weigh_prompt(stage.importance))

    def _without_channels(self, policy: Policy) -> UserError:
        hint = " or replay the sampled stages alone (sampled_only)" if self.facts.channels == "sampled" else ""
        return UserError(f"policy {policy.name} selects channels, but the trace {self.file} was recorded with "
                         f"`channels` {self.facts.channels}; record it with `channels` full{hint}")

    def _storages(self, policy: Policy) -> dict[int, Storage]:
        """How the policy keeps each layer's experts: as in the run if that was its policy, else by their use in the trace."""
        if not policy.stores_otherwise:
            return {}
        if self.facts.value_share is not None and self.facts.policy == policy.to_json():
            storages = [Storage(torch.tensor(share, dtype=torch.float64), self.facts.index_bits)
                        for share in self.facts.value_share]
        else:
            storages = policy.storages(self.use) or []
        return dict(zip(self.facts.layers, storages, strict=True))

    @cached_property
    def use(self) -> ExpertUse:
        """How much the router's own routing used each expert, over all stages."""
        use = ExpertUse(*torch.zeros(2, len(self.facts.layers), self.facts.num_experts, dtype=torch.float64))
        for recorded in self.stages():
            for row, layer in enumerate(recorded.layers):
                use.add(row, layer.exact)
        return use

    def stages(self) -> Iterator[RecordedStage]:
        """All stages in their order."""
        rows = (CheckedRow(row, number, self.file) for number, row in enumerate(self._rows()))
        for index, (_, of_stage) in enumerate(groupby(rows, lambda row: row.number("stage", 0, MOST))):
            yield recorded_stage(index, list(of_stage), self.facts)

    def _rows(self) -> Iterator[Row]:
        try:
            with pq.ParquetFile(self.file, page_checksum_verification=True) as parquet:
                for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=SCHEMA.names):
                    for number in range(len(batch)):
                        yield {name: value_of(column[number]) for name, column in zip(batch.schema.names, batch, strict=True)}
        except DAMAGED as error:
            raise self._damaged(error) from None


def _plan(policy: Policy, stage: Stage, layer: RecordedLayer, storage: Storage | None) -> LayerPlan:
    """What the policy decides for one layer, in the runtime's order: experts, then channels of gate/up, then of down."""
    routing = routing_of(policy, layer.exact, layer.scores, stage)
    if stage.tree is None or layer.channels is None or not policy.selects_channels:
        return LayerPlan(layer.layer, routing, storage=storage)
    gate_up = channels_of(policy, layer.channels.gate_up(routing), routing, stage)
    down = None if gate_up is None else channels_of(policy, layer.channels.down(routing), routing, stage)
    return LayerPlan(layer.layer, routing, gate_up, down)

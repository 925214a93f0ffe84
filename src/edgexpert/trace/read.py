"""Reading a trace stage by stage, and replaying it: the plans that a policy makes of what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from edgexpert.core.errors import UserError
from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import Routing, Scores
from edgexpert.core.shapes import ExpertShape, Storage, WeightFormat
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.policy import Hyperparameters, Policy
from edgexpert.policy.decide import channels_of, routing_of
from edgexpert.policy.use import ExpertUse
from edgexpert.simulator.workload import PlannedStage
from edgexpert.trace.channels import SyntheticChannels
from edgexpert.trace.schema import SCHEMA, Facts
from edgexpert.trace.write import Row

ROWS_AT_ONCE = 16
P = TypeVar("P", bound=Policy)


class ChannelInputs(Protocol):
    """Magnitudes of what goes into the experts' matrices, for the pairs of any routing."""

    def gate_up(self, routing: Routing) -> Tensor:
        """Of gate/up, float32 [P, H]."""

    def down(self, routing: Routing) -> Tensor:
        """Of down, float32 [P, I]."""


@dataclass(frozen=True, eq=False)
class RecordedChannels:
    """Channel inputs of a layer of a run.

    Attributes:
        input: |input| of gate/up, one for all experts of a token, [T, H].
        ran: the routing that ran, int64 [T, k].
        down_input: |input| of down for each pair of it, [P, I].
    """

    input: Tensor
    ran: Tensor
    down_input: Tensor

    def gate_up(self, routing: Routing) -> Tensor:
        return self.input[routing.pairs[0]]

    def down(self, routing: Routing) -> Tensor:
        """Raises UserError for a pair that never ran: its input of down does not exist."""
        ran = Routing(self.ran, torch.ones_like(self.ran), routing.num_experts)
        pair = torch.full((len(self.ran), routing.num_experts), -1)
        pair[ran.pairs[0], ran.pair_expert] = torch.arange(len(ran.pair_expert))
        found = pair[routing.pairs[0], routing.pair_expert]
        if bool((found < 0).any()):
            raise UserError("the policy sends a token to an expert that did not compute it in the recorded run, so the trace "
                            "lacks the inputs of its down matrix; record the run under that `policy`")
        return self.down_input[found]


@dataclass(frozen=True, eq=False)
class RecordedLayer:
    """One MoE layer of a recorded stage; without channels where none were recorded."""

    layer: int
    exact: Routing
    scores: Scores
    channels: ChannelInputs | None


@dataclass(frozen=True, eq=False)
class RecordedStage:
    """One stage of a trace.

    Attributes:
        text: number of the prompt that it belongs to.
        accepted: nodes of the tree that were accepted, the root first; empty for a prefill stage.
    """

    index: int
    text: int
    stage: Stage
    accepted: list[int]
    emitted: int
    draft_steps: int
    layers: list[RecordedLayer]


class Trace:
    """A trace file. Its stages are read one after the other, so that memory does not grow with the file.

    Raises:
        UserError: there is no such file, it is damaged, no trace, or of another schema version.
    """

    def __init__(self, file: Path | str) -> None:
        self.file = Path(file)
        try:
            schema = pq.read_schema(self.file)
        except FileNotFoundError:
            raise UserError(f"there is no trace {self.file}; make one with edgexpert trace") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise self._damaged(error) from None
        self.facts = Facts.from_metadata(schema.metadata, self.file)
        if missing := [name for name in SCHEMA.names if name not in schema.names]:
            raise UserError(f"the trace {self.file} lacks the column {missing[0]}; record it again")

    def _damaged(self, error: Exception) -> UserError:
        reason = str(error).splitlines()[0].rstrip(".")
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
        calibrated = Hyperparameters(**self.facts.calibrated) if self.facts.calibrated else None
        return policy.resolved(model_type=self.facts.model_type, num_experts=self.facts.num_experts, top_k=self.facts.top_k,
                               calibrated=calibrated)

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
        for _, rows in groupby(self._rows(), itemgetter("stage")):
            first, *layers = rows
            yield self._stage(first, layers)

    def _rows(self) -> Iterator[Row]:
        try:
            with pq.ParquetFile(self.file) as parquet:
                for batch in parquet.iter_batches(ROWS_AT_ONCE):
                    for number in range(len(batch)):
                        yield {name: _value(column, number) for name, column in zip(batch.schema.names, batch, strict=True)}
        except (pa.ArrowInvalid, OSError) as error:
            raise self._damaged(error) from None

    def _stage(self, row: Row, layers: list[Row]) -> RecordedStage:
        tokens = torch.from_numpy(row["tokens"]).long()
        if row["kind"] == "prefill":
            importance = None if row["importance"] is None else torch.from_numpy(row["importance"])
            stage = Stage.prefill(tokens, row["prefix"], importance)
        else:
            tree = TokenTree(tokens, torch.from_numpy(row["parents"]).long(), torch.from_numpy(row["path_log_prob"]))
            stage = Stage.verify(tree, row["prefix"])
        accepted = [] if row["accepted"] is None else row["accepted"].tolist()
        return RecordedStage(row["stage"], row["text"], stage, accepted, row["emitted"], row["draft_steps"],
                             [self._layer(number, layer, row["stage"], stage) for number, layer in enumerate(layers)])

    def _layer(self, number: int, row: Row, stage_index: int, stage: Stage) -> RecordedLayer:
        tokens = len(stage.tokens)
        facts = self.facts
        experts = torch.from_numpy(row["experts"]).long().view(tokens, -1)
        weights = torch.from_numpy(row["weights"]).view(tokens, -1).to(getattr(torch, facts.weights_dtype))
        choice = torch.from_numpy(row["choice"]).view(tokens, -1)
        gate = choice if row["gate"] is None else torch.from_numpy(row["gate"]).view(tokens, -1)
        channels: ChannelInputs | None = None
        if facts.synthetic:
            channels = SyntheticChannels(facts, stage_index, row["layer"], stage.depth)
        elif row["input"] is not None:
            channels = RecordedChannels(
                torch.from_numpy(row["input"]).view(tokens, -1),
                torch.from_numpy(row["ran"]).long().view(tokens, -1),
                torch.from_numpy(row["down_input"]).view(-1, facts.intermediate),
            )
        return RecordedLayer(row["layer"], Routing(experts, weights, choice.shape[1]),
                             Scores(choice, gate, facts.normalise[number], facts.scale[number]), channels)


def _plan(policy: Policy, stage: Stage, layer: RecordedLayer, storage: Storage | None) -> LayerPlan:
    """What the policy decides for one layer, in the runtime's order: experts, then channels of gate/up, then of down."""
    routing = routing_of(policy, layer.exact, layer.scores, stage)
    if stage.tree is None or layer.channels is None or not policy.selects_channels:
        return LayerPlan(layer.layer, routing, storage=storage)
    gate_up = channels_of(policy, layer.channels.gate_up(routing), routing, stage)
    down = None if gate_up is None else channels_of(policy, layer.channels.down(routing), routing, stage)
    return LayerPlan(layer.layer, routing, gate_up, down)


def _value(column: pa.Array, number: int) -> Any:
    """One value; a list as an array of its own."""
    scalar = column[number]
    if not scalar.is_valid:
        return None
    return np.array(scalar.values) if isinstance(scalar, pa.ListScalar) else scalar.as_py()

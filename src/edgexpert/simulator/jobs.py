"""A stage as jobs: every matrix multiplication with what it loads, computes and leaves, before it becomes instructions.

A job is a row of a table, so that the thousands of experts of a stage are built by array arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgexpert.core.errors import UserError
from edgexpert.simulator.costs import Columns, Costs
from edgexpert.simulator.device import Device
from edgexpert.simulator.shapes import AttentionShape, Matrix, ModelShape, encoder_matrices
from edgexpert.simulator.units import partition, union
from edgexpert.simulator.workload import PlannedLayer, PlannedStage

PARTS = ("attention", "kv_cache", "router", "experts", "shared_experts", "dense", "lm_head", "embeddings", "draft", "encoder")
"""What a job belongs to. ``kv_cache`` is the cache and the attention over it, ``dense`` a layer without experts."""

NONE = -1

JOB = np.dtype([
    ("part", "i1"), ("layer", "i2"), ("expert", "i4"),
    ("values", "f8"), ("scales", "f8"),  # bytes of weights (or of cached keys and values) that stream in
    ("bursts", "f8"), ("activations", "f8"),  # of external memory, unless it is flat
    ("fetch", "f8"), ("write", "f8"),  # bytes of activations from and to external memory
    ("macs", "f8"), ("pe_cycles", "f8"),
    ("inputs", "f8"),  # bytes of activations that the network hands to the clusters
    ("simd", "f8"), ("quantise", "f8"),  # elements
    ("score", "f8"), ("update", "f8"), ("partition", "f8"), ("union", "f8"),  # cycles of the units
    ("source", "i4"),  # the job whose result this one computes on
    ("decider", "i4"),  # the job that decides what this one loads; NONE where it may be fetched ahead
    ("sram", "f8"),  # bytes of the shared SRAM in use
])
Jobs = NDArray[np.void]

HEAD_GROUPS = 16
"""Parts into which a layer's attention is cut; the paper does not say how it orders attention."""


class StageJobs:
    """Builds the jobs of one stage, in the order in which their weights are fetched.

    Args:
        reuse: whether the policy reuses experts prompt-wise: then the encoder runs before a prefill stage, and in every
            layer the reuse unit groups the tokens.
    """

    def __init__(self, model: ModelShape, device: Device, planned: PlannedStage, reuse: bool) -> None:
        self.model, self.device, self.planned = model, device, planned
        self.tokens = len(planned.stage.tokens)
        self.broadcast = planned.stage.kind == "prefill"
        self.reuse = reuse and self.broadcast
        self.costs = Costs(model.name, device, self.broadcast)
        self.count = 0
        self.chunks: list[Jobs] = []
        precision = device.precision
        self.activation, self.accumulator = precision.activation_bits / 8, precision.accumulator_bits / 8
        state = model.hidden * (self.activation + self.accumulator)  # a token's input and its sum over experts
        self.resident = min(self.tokens, int(device.memory.shared // state))
        self.spilled = 1 - self.resident / self.tokens
        self.occupied = self.resident * state

    def build(self) -> Jobs:
        model, layers = self.model, iter(self.planned.layers)
        if len(self.planned.plans) != len(model.moe_layers):
            raise UserError(f"the workload has {len(self.planned.plans)} MoE layers, but {model.name} has "
                            f"{len(model.moe_layers)}; give the model that was traced")
        last = self._draft() if self.planned.draft_steps else NONE
        last = self._add("embeddings", source=last, fetch=self.tokens * model.hidden * self.device.bytes_per_weight)
        if self.reuse:
            self._weights("encoder", encoder_matrices(), NONE, rows=self.tokens)
        for layer in range(model.layers):
            last = self._attention(layer, last)
            if layer in model.moe_layers:
                last = self._moe(layer, next(layers), last)
            else:
                last = self._feed_forward("dense", layer, model.dense, last)
        rows = 1 if self.broadcast else self.tokens  # a prompt needs the logits of its last token alone
        self._weights("lm_head", (model.lm_head,), last, rows=rows, simd=rows * model.vocabulary)
        jobs, begin = np.empty(self.count, JOB), 0
        for chunk in self.chunks:  # numpy's concatenate compares the field names of every pair of chunks
            jobs[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return jobs

    def _append(self, jobs: Jobs) -> int:
        """Returns the index of the last."""
        self.chunks.append(jobs)
        self.count += len(jobs)
        return self.count - 1

    def _jobs(self, part: str, count: int = 1, **columns: Any) -> Jobs:
        """``count`` jobs; what is not given is 0."""
        jobs = np.zeros(count, JOB)
        jobs["part"] = PARTS.index(part)
        for column in ("layer", "expert", "source", "decider"):
            jobs[column] = NONE
        jobs["sram"] = self.occupied
        for column, values in columns.items():
            jobs[column] = values
        return jobs

    def _add(self, part: str, **columns: Any) -> int:
        return self._append(self._jobs(part, **columns))

    def _weights(self, part: str, matrices: Sequence[Matrix], source: int, rows: int, **columns: Any) -> int:
        """Adds one job that multiplies whole matrices, all on the same ``rows``."""
        return self._add(part, source=source, **self.costs.matrices(matrices, rows) | columns)

    def _attention(self, layer: int, source: int) -> int:
        jobs = self._one_attention.copy()
        jobs["layer"] = layer
        jobs["source"] = np.where(jobs["source"] >= 0, jobs["source"] + self.count, source)
        return self._append(jobs)

    @cached_property
    def _one_attention(self) -> Jobs:
        """The attention of any layer, its sources counted from its own first job.

        Head by head group: the scores of one are computed while the weights of the next stream in.
        """
        shape, tokens, groups = self.model.attention, self.tokens, gcd(HEAD_GROUPS, self.model.attention.heads)
        values = tokens * self.model.hidden
        before, after = (self.costs.matrices(matrices, tokens) | {"simd": values} for matrices in (shape.before, shape.after))
        before["fetch"] = self.spilled * values * self.activation
        after["write"] = self.spilled * values * self.accumulator
        jobs = np.concatenate([
            np.concatenate([self._jobs("attention", **_divided(before, groups)),
                            self._jobs("kv_cache", source=2 * group, **_divided(self._scores(shape, tokens), groups))])
            for group in range(groups)
        ])
        return np.concatenate([jobs, self._jobs("attention", source=2 * groups - 1, **after)])

    def _scores(self, shape: AttentionShape, rows: int) -> Columns:
        """Attention over the cache. Keys of more bits than a weight take several passes of the multipliers."""
        stage, precision = self.planned.stage, self.device.precision
        seen = stage.prefix + float(stage.depth.double().mean()) + 1  # cached tokens that a token attends to
        passes = ceil(precision.kv_bits / precision.weight_bits)
        kept = shape.cached * precision.kv_bits / 8
        macs = rows * seen * shape.score_macs * passes
        return {"values": stage.prefix * kept, "macs": macs, "pe_cycles": macs / self.device.array.macs,
                "inputs": rows * shape.cached * self.activation, "simd": rows * seen * shape.heads, "write": rows * kept,
                **self.costs.whole_accesses(np.array([stage.prefix * kept]))}

    def _feed_forward(self, part: str, layer: int, matrices: Sequence[Matrix], source: int) -> int:
        """A gated network that every token runs through."""
        gate_up, down = matrices
        inner = self.tokens * down.inputs
        spilled = max(0.0, inner * self.activation - (self.device.memory.shared - self.occupied))
        sram = self.occupied + inner * self.activation - spilled
        source = self._weights(part, (gate_up,), source, self.tokens, layer=layer, simd=2 * inner, quantise=inner,
                               write=spilled, sram=sram)
        return self._weights(part, (down,), source, self.tokens, layer=layer, simd=self.tokens * down.outputs, quantise=0,
                             fetch=spilled, sram=sram)

    def _draft(self) -> int:
        """The draft's steps, one after the other."""
        draft, tree = self.model.draft, self.planned.stage.tree
        if draft is None:
            raise UserError(f"the workload drafts, but no draft of {self.model.name} is known; put the config.json of its "
                            "EAGLE-3 draft into the folder draft beside the model's")
        rows = min(draft.beam, max(1, tree.candidates if tree else 1))
        last = self._weights("draft", (draft.fuse,), NONE, rows)
        for _ in range(self.planned.draft_steps):
            last = self._weights("draft", draft.attention.before, last, rows)
            last = self._add("draft", source=last, **self._scores(draft.attention, rows))
            for matrices in (draft.attention.after, *((matrix,) for matrix in draft.feed_forward)):
                last = self._weights("draft", matrices, last, rows, simd=rows * matrices[0].outputs)
            last = self._weights("draft", (draft.head,), last, rows, simd=rows * draft.head.outputs)
        return last

    def _moe(self, layer: int, plan: PlannedLayer, source: int) -> int:
        """Router, routed experts and shared experts of one layer."""
        model, tokens = self.model, self.tokens
        router = self._weights("router", (model.router,), source, tokens, layer=layer, simd=tokens * model.experts,
                               quantise=tokens * model.hidden, fetch=self.spilled * tokens * model.hidden * self.activation,
                               **self._reuse_cycles())
        last = self._experts(layer, plan, router)
        if model.shared:
            last = self._feed_forward("shared_experts", layer, model.shared, router)
        return last

    def _reuse_cycles(self) -> Columns:
        kind = self.device.units.partitioning
        if not self.reuse:
            return {}
        if kind == "none":
            raise UserError(f"the device {self.device.name} has no unit for prompt-wise expert reuse; simulate another policy "
                            "or device")
        cycles = {"threshold": partition.threshold_cycles, "sorting": partition.sorting_cycles}[kind](self.tokens)
        return {"partition": cycles, "union": union.union_cycles(self.tokens) + 2}  # each of three groups ends in its own block

    def _experts(self, layer: int, plan: PlannedLayer, router: int) -> int:
        """Gate/up and down of every loaded expert.

        Where the channels of down are selected, they are known only after gate/up; so the next expert's gate/up is fetched
        in between.
        """
        experts = len(plan.experts)
        gate_up, down = self.model.expert
        key = np.arange(2 * experts)  # 2e is gate/up of expert e, 2e + 1 its down
        key[1::2] += 2 if plan.down is not None else 0
        order = np.argsort(key, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(2 * experts)

        inner = plan.rows * down.inputs * self.activation
        at_once = 2 if plan.down is not None else 1  # experts whose intermediate values are held
        kept = np.minimum(inner, (self.device.memory.shared - self.occupied) // at_once)
        rows_away = plan.rows * self.spilled * self.model.hidden
        jobs = self._jobs("experts", 2 * experts, layer=layer, expert=np.repeat(plan.experts, 2), decider=router,
                          sram=self.occupied + np.repeat(kept, 2) * at_once)
        for half, matrix, selected in ((0, gate_up, plan.gate_up), (1, down, plan.down)):
            for column, values in self.costs.experts(matrix, selected, plan).items():
                jobs[column][half::2] = values
        jobs["source"][0::2] = router
        jobs["source"][1::2] = self.count + place[0::2]
        jobs["simd"][0::2] = jobs["quantise"][0::2] = plan.rows * down.inputs
        jobs["simd"][1::2] = plan.rows * down.outputs
        jobs["fetch"][0::2] = rows_away * self.activation
        jobs["fetch"][1::2] = rows_away * self.accumulator + inner - kept
        jobs["write"][0::2] = inner - kept
        jobs["write"][1::2] = rows_away * self.accumulator
        return self._append(jobs[order])


def _divided(columns: Columns, parts: int) -> Columns:
    return {name: value / parts for name, value in columns.items()}

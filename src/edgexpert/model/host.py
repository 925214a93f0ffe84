"""A transformers MoE model under a policy: every stage goes through here.

Hooks on the routers hand the policy each layer's scores; an experts implementation, registered with the library, executes
the plan. Where a policy leaves a layer as it is, the library's own implementation runs, on the library's own layout: with
everything off the model is the library's, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import (
    ALL_EXPERTS_FUNCTIONS,
    Cache,
    experts_implementation,
    forward_arguments,
    library_experts,
)
from edgexpert.core.plan import LayerPlan
from edgexpert.core.routing import ChannelSelection, Routing
from edgexpert.core.shapes import Storage
from edgexpert.core.stage import Stage
from edgexpert.core.traffic import Part
from edgexpert.kernels.experts import down_inputs, run_experts
from edgexpert.model.attention import attending, watch_received_attention
from edgexpert.model.batch import route, select_channels
from edgexpert.model.blocks import MoeBlock, bytes_by_part, decoder_layers, embedding_row_bytes
from edgexpert.model.cache import TreeCache, bytes_per_token
from edgexpert.model.native_layer import NativeLayer
from edgexpert.model.native_model import NativeModel, native_model
from edgexpert.model.recorder import LayerRecord, Recorder
from edgexpert.model.rope import follow_stages
from edgexpert.model.running import Pass, StageChoices, StageOutput
from edgexpert.model.storage import ExpertStatistics, store_experts
from edgexpert.model.supported import known_blocks
from edgexpert.policy import EXACT, Hyperparameters, Policy

EXPERTS_IMPLEMENTATION = "edgexpert"


class HostedModel:
    """Runs stages through a transformers MoE model, deciding every layer by a policy and counting every byte.

    It holds weights and nothing of a text: cache, policy and recorder come with each stage, so that many texts share it. Stages
    run one at a time; several threads may call.

    Attributes:
        statistics: how calibration text used the experts, for policies that prepare weights by it; see `measure_experts`.
    """

    def __init__(self, model: PreTrainedModel, calibrated: Hyperparameters | None = None) -> None:
        self.model = model.eval()
        self.calibrated = calibrated
        self.config = model.config.get_text_config()
        self.blocks = known_blocks(model)
        for earlier in {block.experts._edgexpert[0] for block in self.blocks if hasattr(block.experts, "_edgexpert")}:
            earlier.detach()
        self.statistics: ExpertStatistics | None = None
        self.sizes = bytes_by_part(model, self.blocks)
        self._library_experts = experts_implementation(model)
        self._rotary = follow_stages(model)
        self.native = native_model(model)
        self._has_native_layers = any(isinstance(layer.forward, NativeLayer) for layer in decoder_layers(model))
        self.running: Pass | None = None
        self._hooks: list[RemovableHandle] = []
        for block in self.blocks:
            block.experts._edgexpert = (self, block)
            self.keep_hook(block.router.register_forward_hook(self._router_hook(block)))
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        self.lock = threading.RLock()  # held while a stage runs
        self._weights_for: Policy = EXACT  # whose weights the blocks hold
        self._storage: dict[int, Storage] = {}

    @property
    def num_experts(self) -> int:
        return self.blocks[0].num_experts

    @property
    def top_k(self) -> int:
        return self.blocks[0].top_k

    @property
    def layers(self) -> int:
        return len(decoder_layers(self.model))

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_context(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def plain_decode_expert_bytes(self) -> float:
        """Expert bytes that plain exact decoding loads for every token."""
        return sum(block.top_k * block.shape.expert for block in self.blocks)

    def resolve(self, policy: Policy) -> Policy:
        """The policy with its open hyperparameters chosen for this model, ready for `run`.

        Raises:
            UserError: the policy does not suit this model, or breaks a rule.
        """
        policy = policy.resolved(
            model_type=self.config.model_type, num_experts=self.num_experts, top_k=self.top_k, calibrated=self.calibrated
        )
        if not policy.is_exact and any(block.form is None for block in self.blocks):
            raise UserError(
                f"the router of model type {self.config.model_type} scores experts in a way that EdgeXpert does not know; "
                "only `policy` exact can be used with it"
            )
        if policy.stores_otherwise and policy.selects_channels:
            raise UserError(f"policy {policy.name} selects channels of experts that it stores otherwise; choose one of the two")
        if policy.stores_otherwise and self.statistics is None:
            raise UserError(
                f"policy {policy.name} prepares the experts' weights by their use on calibration text, which was not measured; "
                "load the model with edgexpert.load, or set host.statistics = measure_experts(host, texts) first"
            )
        if policy.stores_otherwise and self.blocks[0].packed is not None:
            raise UserError(f"policy {policy.name} changes weights, which packed ones do not allow; load the "
                            "checkpoint with `dtype` float32, which makes floats of them")
        return policy

    def storage(self, policy: Policy) -> dict[int, Storage]:
        """How the policy keeps the experts of each layer; {} for as hosted."""
        with self.lock:
            self._hold_weights_for(policy)
            return self._storage

    def _hold_weights_for(self, policy: Policy) -> None:
        """Lays the experts' weights out as the policy wants them, where another one ran before."""
        if policy == self._weights_for:
            return
        if policy.stores_otherwise or self._weights_for.stores_otherwise:
            for block in self.blocks:
                block.restore()
            self._storage = store_experts(self.blocks, policy, self.statistics)
        for block in self.blocks:
            block.store_channel_major(policy.selects_channels)
        self._weights_for = policy

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.layers, capacity)

    def keep_hook(self, handle: RemovableHandle) -> None:
        """Takes charge of a hook on the model; `detach` removes it."""
        self._hooks.append(handle)

    def detach(self) -> PreTrainedModel:
        """Gives the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hold_weights_for(EXACT)
        for block in self.blocks:
            del block.experts._edgexpert
        for rotary in self._rotary:
            del rotary.forward  # the class's own comes back
        self.model.set_experts_implementation(self._library_experts)
        return self.model

    @torch.no_grad()
    def run(
        self,
        stage: Stage,
        cache: TreeCache,
        policy: Policy = EXACT,
        fused_layers: Sequence[int] = (),
        recorder: Recorder | None = None,
    ) -> StageOutput:
        """One stage through the model; its keys and values are appended to ``cache``.

        Args:
            policy: decides the stage; from `resolve`.
            fused_layers: layers whose inputs are wanted as features.
            recorder: is told of every layer.
        """
        assert stage.prefix == cache.length, "the cache holds exactly the tokens before the stage"
        running = Pass([stage], policy, recorder)
        with self.lock:
            if self._has_native_layers and running.acts:
                running.rule = policy.stage_rule(stage)
            if self.native is not None and running.is_native:
                logits, features = self._run_natively(self.native, running, cache, fused_layers)
            else:
                logits, features = self._run_library(running, cache, fused_layers)
        return StageOutput(logits.float(), features if fused_layers else None, self.traffic(running, cache), running)

    def _run_natively(
        self, native: NativeModel, running: Pass, cache: TreeCache, fused_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """One stage in one piece: its logits and features."""
        (stage,), recorder = running.stages, running.recorder
        logits, features, choices = native.run(stage, cache, fused_layers, running.rule, observes=recorder is not None)
        running.choices = choices
        running.expert_bytes = choices.bytes([block.shape for block in self.blocks])
        if recorder is not None:
            for record in choices.records(stage, self.blocks):
                recorder.layer(record)
        return logits, features

    def _run_library(self, running: Pass, cache: TreeCache, fused_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One stage layer by layer, under the policy."""
        (stage,), device = running.stages, self.model.device
        hooks = [self._fused_hook(layer) for layer in fused_layers]
        watched = running.policy.needs_received_attention
        self.begin(running)
        try:
            with attending(stage), watch_received_attention(self.model, running.received, stage, watched):
                output = self.model(
                    input_ids=stage.tokens[None].to(device),
                    position_ids=stage.positions[None].to(device),
                    logits_to_keep=1 if stage.kind == "prefill" else 0,
                    **forward_arguments(self.model, cache),
                )
        finally:
            self.end()
            for hook in hooks:
                hook.remove()
        fused = [running.fused[layer][0] for layer in fused_layers]
        return output.logits[0], torch.cat(fused, dim=-1) if fused else torch.empty(0)

    def begin(self, running: Pass) -> None:
        """From here to `end` the library's modules work for this pass; the caller holds the lock."""
        self._hold_weights_for(running.policy)
        self.running = running

    def end(self) -> Pass | None:
        """The pass that `begin` began, if any."""
        finished, self.running = self.running, None
        return finished

    def traffic(self, running: Pass, cache: Cache | None) -> dict[Part, float]:
        """Bytes of a finished pass by what they were for."""
        parts: tuple[Part, ...] = ("router", "attention", "shared_experts", "lm_head")
        read: dict[Part, float] = {part: self.sizes.get(part, 0) for part in parts}
        read["experts"] = running.expert_bytes
        read["embeddings"] = sum(len(stage.tokens) for stage in running.stages) * embedding_row_bytes(self.model)
        if cache is not None:  # written once for each new token; read once a stage, the new tokens included
            tokens = sum(stage.prefix + 2 * len(stage.tokens) for stage in running.stages)
            read["kv_cache"] = bytes_per_token(cache) * tokens
        return read

    def _fused_hook(self, layer: int) -> RemovableHandle:
        layers = decoder_layers(self.model)
        module = layers[layer] if layer < len(layers) else self.model.base_model.norm

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            assert self.running is not None
            self.running.fused[layer] = args[0] if args else kwargs["hidden_states"]

        return module.register_forward_pre_hook(keep, with_kwargs=True)

    def _router_hook(self, block: MoeBlock) -> Any:
        def decide(_: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
            running = self.running
            if running is None:
                return output
            logits, weights, experts = output
            exact = Routing(experts, weights, block.num_experts, complete=True)
            running.exact[block.layer] = routing = exact
            if (running.recorder or running.acts) and block.form is not None:
                running.scores[block.layer] = scores = block.form.scores(logits)
                routing = route(running.policy, exact, scores, running.stages)
            running.routings[block.layer] = routing
            return output if routing is exact else (logits, routing.weights.to(weights.dtype), routing.experts)

        return decide

    def run_block(self, block: MoeBlock, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The experts of one block for the running stage: [T, H] -> [T, H]."""
        running = self.running
        if running is None:
            return self._library(block, x, *args, **kwargs)
        routing = running.routings[block.layer]
        received = running.received.get(block.layer)
        down_seen: list[Tensor] = []

        def select(activations: Tensor) -> ChannelSelection | None:
            return select_channels(running.policy, activations, routing, running.stages, received)

        def select_down(activations: Tensor) -> ChannelSelection | None:
            down_seen.append(activations)
            return select(activations)

        gate_up = select(x[routing.pair_token]) if running.acts and running.policy.selects_channels else None
        if block.packed is None and gate_up is None and not routing.has_gaps:
            # one product on the same data as the library's where nothing is skipped
            plan = LayerPlan(block.layer, routing, storage=self._storage.get(block.layer))
            out, read = self._library(block, x, *args, **kwargs), None
        else:
            out, down, read = run_experts(x, routing, block.packed or block.weights(), gate_up, select_down if gate_up else None)
            plan = LayerPlan(block.layer, routing, gate_up, down, self._storage.get(block.layer))
        planned = self._take_note(running, block, plan)
        assert read is None or plan.storage is not None or abs(planned - read) < 1, "bytes planned are the bytes read"
        if running.recorder is not None:
            (stage,) = running.stages
            running.recorder.layer(LayerRecord(
                stage, plan, running.exact[block.layer], running.scores.get(block.layer), x,
                lambda: down_seen[0] if down_seen else down_inputs(x, routing, block.packed or block.weights()),
            ))
        return out

    def ran_natively(self, block: MoeBlock, choices: StageChoices) -> None:
        """Takes note of a layer whose experts ran in a native call."""
        running = self.running
        assert running is not None
        running.exact[block.layer], running.plans[block.layer] = choices.exact[0], choices.plans[0]
        running.expert_bytes += choices.bytes([block.shape])
        if running.recorder is not None:
            for record in choices.records(running.stages[0], [block]):
                running.recorder.layer(record)

    def _take_note(self, running: Pass, block: MoeBlock, plan: LayerPlan) -> float:
        """Keeps a layer's plan and counts its bytes, which are returned."""
        planned = plan.bytes(block.shape)
        running.plans[block.layer] = plan
        running.expert_bytes += planned
        return planned

    def _library(self, block: MoeBlock, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return library_experts(block.experts, self._library_experts, *args, **kwargs)


def _experts_forward(self: nn.Module, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
    host, block = self._edgexpert  # type: ignore[misc]
    return host.run_block(block, x, *args, **kwargs)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, _experts_forward)

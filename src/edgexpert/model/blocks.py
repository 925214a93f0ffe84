"""Finding the MoE blocks of a transformers model by their form, and weighing its parts.

A block is a router beside an experts module with three-dimensional weights, whose execution the library lets others take over.
The router returns (logits, weights, expert indices).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import activation, is_experts
from edgexpert.core.shapes import ExpertShape, WeightFormat
from edgexpert.core.traffic import Part
from edgexpert.kernels.experts import ExpertWeights, PackedExpertWeights
from edgexpert.kernels.modules import weights_of
from edgexpert.model.router import RouterForm, Tried, detect_form, try_router


@dataclass(eq=False)
class MoeBlock:
    """One MoE block: its router, its experts, the module that holds both, and where they stand."""

    layer: int
    module: nn.Module
    router: Any
    experts: Any
    hosted: dict[str, Tensor] = field(default_factory=dict)  # weights as they came, while others stand in for them

    @property
    def gate_up_name(self) -> str:
        return "gate_up_proj" if hasattr(self.experts, "gate_up_proj") else "up_proj"

    @cached_property
    def num_experts(self) -> int:
        return int(self.experts.down_proj.shape[0])

    @cached_property
    def top_k(self) -> int:
        known = getattr(self.router, "top_k", None)
        if known is None and self._tried is not None:
            known = self._tried.index.shape[1]
        if known is None:
            raise UserError(f"how many experts {type(self.router).__name__} chooses for a token is not known; give another model")
        return int(known)

    @cached_property
    def form(self) -> RouterForm | None:
        return detect_form(self._tried)

    @cached_property
    def _tried(self) -> Tried | None:
        return try_router(self.module, self.router, self.num_experts)

    @cached_property
    def packed(self) -> PackedExpertWeights | None:
        """The experts' weights where they come from a packed checkpoint; the module's own then hold nothing but their shape."""
        return getattr(self.experts, "packed", None)

    @property
    def bytes(self) -> int:
        """Stored bytes of all experts, biases included."""
        biases = sum(p.nbytes for name, p in self.experts.named_parameters() if name.endswith("bias"))
        return round(self.num_experts * self.shape.expert) + biases

    @cached_property
    def shape(self) -> ExpertShape:
        down = self.experts.down_proj
        intermediate, hidden = down.shape[1:] if self.experts.is_transposed else reversed(down.shape[1:])
        gate_up = getattr(self.experts, self.gate_up_name)
        stored = WeightFormat(down.element_size()) if self.packed is None else self.packed.format
        return ExpertShape(hidden, intermediate, gate_up[0].numel() // hidden, stored)

    def store_channel_major(self, wanted: bool) -> None:
        """Lays the weights out so that an input channel is one contiguous row, or the way the library does.

        The parameters keep their shape either way; only their strides change, so that everything else goes on working. In
        the library's layout results are bit for bit those of the library, since products then run on the very same data.
        """
        for name in (self.gate_up_name, "down_proj"):
            parameter = getattr(self.experts, name)
            if self.experts.is_transposed or self.packed is not None:
                continue  # channel-major already
            if wanted and parameter.is_contiguous():
                parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
            elif not wanted and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()

    def lend_copies(self) -> None:
        """Puts copies in the place of the experts' weights, to be changed at will until `restore`."""
        for name in (self.gate_up_name, "down_proj"):
            parameter = getattr(self.experts, name)
            self.hosted[name] = parameter.data
            parameter.data = parameter.data.clone()

    def restore(self) -> None:
        """Puts the experts' own weights back."""
        for name, weight in self.hosted.items():
            getattr(self.experts, name).data = weight
        self.hosted.clear()

    def weights(self) -> ExpertWeights:
        """The module's own weights as channel-major views."""
        gate_up, down = getattr(self.experts, self.gate_up_name), self.experts.down_proj
        if not self.experts.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return ExpertWeights(
            gate_up,
            down,
            getattr(self.experts, self.gate_up_name + "_bias", None),
            getattr(self.experts, "down_proj_bias", None),
            activation(self.experts),
        )


def find_blocks(model: PreTrainedModel) -> list[MoeBlock]:
    """All MoE blocks whose form is known, by layer. Empty for a dense model."""
    blocks: list[MoeBlock] = []
    for name, module in model.named_modules():
        children = dict(module.named_children())
        experts = next((c for c in children.values() if is_experts(c)), None)
        router = next((c for n, c in children.items() if n in ("gate", "router")), None)
        if experts is not None and router is not None:
            layer = re.search(r"\.(\d+)(\.|$)", name)
            blocks.append(MoeBlock(int(layer[1]) if layer else len(blocks), module, router, experts))
    return blocks


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers."""
    return model.base_model.layers


def bytes_by_part(model: PreTrainedModel, blocks: list[MoeBlock]) -> dict[Part, int]:
    """Stored weight bytes by part. Norms count with attention; dense feed-forward layers with shared experts.

    A tied lm_head counts for itself too: its matrix is read once per stage, apart from the rows of embedding look-ups.
    """
    sizes: dict[Part, int] = {}

    def add(part: Part, size: int) -> None:
        sizes[part] = sizes.get(part, 0) + size

    def ids(module: nn.Module | None) -> set[int]:
        return set() if module is None else {id(tensor) for _, tensor in weights_of(module)}

    experts = {i for block in blocks for i in ids(block.experts)}
    routers = {i for block in blocks for i in ids(block.router)}
    embeddings, head = ids(model.get_input_embeddings()), model.get_output_embeddings()
    for name, weight in weights_of(model):
        if id(weight) in routers:
            add("router", weight.nbytes)
        elif id(weight) in embeddings:
            add("embeddings", weight.nbytes)
        elif id(weight) not in experts | ids(head):
            add("attention" if re.search("attn|attention|norm", name) else "shared_experts", weight.nbytes)
    for block in blocks:
        add("experts", block.bytes)
    if head is not None:
        for _, weight in weights_of(head):
            add("lm_head", weight.nbytes)
    return sizes


def embedding_row_bytes(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[1] * weight.element_size()

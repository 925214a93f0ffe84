"""A packed checkpoint as a transformers model: the library's modules, with packed weights and our kernels in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.kernels.experts import PackedExpertWeights
from edgexpert.kernels.modules import ATTENTION, FloatEmbedding, PackedLinear, RouterWeight, RowNorm
from edgexpert.kernels.reference import ACTIVATIONS
from edgexpert.model.blocks import MoeBlock, find_blocks
from edgexpert.model.native_layer import use_native_layers
from edgexpert.weights.files import Pack
from edgexpert.weights.manifest import LayerLayout
from edgexpert.weights.matrix import PackedMatrix
from edgexpert.weights.memory import placed


def load_pack(folder: Path) -> PreTrainedModel:
    """The model of a packed checkpoint; its weights lie where `packing.memory` puts them.

    Raises:
        UserError: the folder is damaged, or lacks a tensor.
    """
    pack = Pack(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(pack.config, dtype=torch.float32, attn_implementation=ATTENTION)
    tensors = pack.dense()
    linears = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, PackedMatrix)}
    tensors |= zip(linears, placed(list(linears.values())), strict=True)
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedMatrix):
            bias = tensors.get(name.removesuffix("weight") + "bias")
            assert bias is None or isinstance(bias, Tensor)
            model.set_submodule(name.removesuffix(".weight"), PackedLinear(tensor, None if bias is None else bias.float()))
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(tensor, Tensor) and not isinstance(module, PackedLinear):
            if not isinstance(module, nn.Embedding):
                tensor = tensor.float()  # routers and norms are small, and the kernels take float32
            if attribute in module._buffers:
                module._buffers[attribute] = tensor
            else:
                module.register_parameter(attribute, nn.Parameter(tensor, requires_grad=False))
    fill_buffers(model)
    blocks = find_blocks(model)
    for block, layout in zip(blocks, pack.manifest.layers, strict=True):
        assert block.layer == layout.layer
        block.experts.packed = _experts(block, pack, layout)
        block.router.weight = nn.Parameter(block.router.weight.data.as_subclass(RouterWeight), requires_grad=False)
    _replace_modules(model)
    experts = {id(p) for block in blocks for p in block.experts.parameters()}
    missing = [name for name, p in model.named_parameters() if p.is_meta and id(p) not in experts]
    if missing:
        raise UserError(f"the folder {folder} lacks the tensor {missing[0]}; convert the checkpoint again")
    use_native_layers(model.eval(), blocks)
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _experts(block: MoeBlock, pack: Pack, layout: LayerLayout) -> PackedExpertWeights:
    module, matrices = block.experts, pack.experts(layout)
    gate_up_bias, down_bias = (getattr(module, f"{name}_bias", None) for name in (block.gate_up_name, "down_proj"))
    activation = _activation(module, layout)
    return PackedExpertWeights(matrices["gate_up"], matrices["down"], gate_up_bias, down_bias, activation, layout.gate)


def _activation(experts: Any, layout: LayerLayout) -> str:
    """The kernels' activation that does what this module does; found by trying, like a router's form."""
    y = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    theirs = experts._apply_gate(y) if layout.gate else experts.act_fn(y)
    for name, function in ACTIVATIONS.items():
        gate, up = y.chunk(2, dim=-1)
        ours = function(gate) * up if layout.gate else function(y)
        if torch.allclose(ours, theirs, atol=1e-6) and not layout.interleaved:
            return name
    raise UserError(f"packed checkpoints do not have the activation of {type(experts).__name__}; use the original checkpoint")


def fill_buffers(model: PreTrainedModel) -> None:
    """Computes what no checkpoint stores, such as rotary frequencies."""
    for module in model.modules():
        if any(module.get_buffer(name).is_meta for name in module._non_persistent_buffers_set):
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)


def _replace_modules(model: PreTrainedModel) -> None:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            model.set_submodule(name, RowNorm(module.weight, module.variance_epsilon))
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if embedding.weight.dtype != torch.float32:
        embedding.__class__ = FloatEmbedding

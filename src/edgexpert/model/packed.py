"""A packed checkpoint as a transformers model: the library's modules, with packed weights and our kernels in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import (
    ALL_EXPERTS_FUNCTIONS,
    activation,
    compute_buffers,
    tied_weights,
)
from edgexpert.core.routing import Routing
from edgexpert.kernels.experts import PackedExpertWeights, run_experts
from edgexpert.kernels.modules import ATTENTION, FloatEmbedding, PackedLinear, RowNorm, SteadyRows
from edgexpert.kernels.reference import ACTIVATIONS
from edgexpert.model.agreement import check_agreement
from edgexpert.model.blocks import MoeBlock
from edgexpert.model.native_layer import use_native_layers
from edgexpert.model.supported import check_supported, known_blocks, run_without_numbers
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
    check_supported(model)
    tensors = pack.dense()
    check_agreement(model, pack, tensors)
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
    compute_buffers(model)
    blocks = known_blocks(model)
    for block, layout in zip(blocks, pack.manifest.layers, strict=True):
        assert block.layer == layout.layer
        block.experts.packed = _experts(block, pack, layout)
    _replace_modules(model)
    experts = {id(p) for block in blocks for p in block.experts.parameters()}
    missing = [name for name, p in model.named_parameters() if p.is_meta and id(p) not in experts]
    if missing:
        raise UserError(f"the folder {folder} lacks the tensor {missing[0]}; convert the checkpoint again")
    model.eval().set_experts_implementation(PACKED)
    use_native_layers(model, blocks)
    model.forward = _steady(model.forward)  # type: ignore[method-assign]
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_dequantised(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The library's own model with the weights of a packed checkpoint as floats, to be run or trained by PyTorch.

    Raises:
        UserError: the folder is damaged, or lacks a tensor.
    """
    pack = Pack(folder)
    model = AutoModelForCausalLM.from_config(pack.config, dtype=dtype)
    check_supported(model)
    check_agreement(model, pack, pack.dense())
    state = {name: pack.read_float(name).to(dtype) for name in pack.parameters}
    tied = tied_weights(model)
    missing = [name for name in model.state_dict() if name not in state and name not in tied]
    if missing:
        raise UserError(f"the folder {folder} lacks the tensor {missing[0]}; convert the checkpoint again")
    model.load_state_dict({name: tensor for name, tensor in state.items() if name not in tied}, strict=False)
    model.tie_weights()
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _packed_experts(module: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The library's interface for experts: [T, H] -> [T, H], all of a router's choices."""
    packed: PackedExpertWeights = module.packed
    out, _, _ = run_experts(x, Routing(experts, weights, packed.gate_up.count, complete=True), packed, None, None)
    return out


def _steady(forward: Callable[..., Any]) -> Callable[..., Any]:
    def steady(*args: Any, **kwargs: Any) -> Any:
        with SteadyRows():
            return forward(*args, **kwargs)

    return steady


PACKED = "edgexpert_packed"
ALL_EXPERTS_FUNCTIONS.register(PACKED, _packed_experts)


def check_packable(model: PreTrainedModel) -> None:
    """A packed checkpoint of this model (on the meta device) must load: its experts' activation and its attention are known.

    Raises:
        UserError: it would not; the text says why.
    """
    for block in known_blocks(model):
        packed_activation(block)
    run_without_numbers(model, ATTENTION)


def packed_activation(block: MoeBlock) -> str:
    """The kernels' activation that does what a block's experts do; found by trying, like a router's form.

    Raises:
        UserError: there is none.
    """
    experts = block.experts
    y = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 3
    theirs = activation(experts)(y)
    for name, function in ACTIVATIONS.items():
        gate, up = y.chunk(2, dim=-1)
        ours = function(gate) * up if experts.has_gate else function(y)
        if theirs.shape == ours.shape and torch.allclose(ours, theirs, atol=1e-5):
            return name
    raise UserError(f"packed checkpoints do not have the activation of {type(experts).__name__}; use the original checkpoint")


def _experts(block: MoeBlock, pack: Pack, layout: LayerLayout) -> PackedExpertWeights:
    module, matrices = block.experts, pack.experts(layout)
    gate_up_bias, down_bias = (getattr(module, f"{name}_bias", None) for name in (block.gate_up_name, "down_proj"))
    return PackedExpertWeights(
        matrices["gate_up"], matrices["down"], gate_up_bias, down_bias, packed_activation(block), layout.gate,
        pack.manifest.layers.index(layout), pack.store,
    )


def _replace_modules(model: PreTrainedModel) -> None:
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            model.set_submodule(name, RowNorm(module.weight, module.variance_epsilon))
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if embedding.weight.dtype != torch.float32 and type(embedding) is nn.Embedding:
        embedding.__class__ = FloatEmbedding
    elif embedding.weight.dtype != torch.float32:  # it does more than look rows up
        embedding.weight.data = embedding.weight.data.float()

"""Where each parameter of a model goes: into a record of the experts' file, a packed linear layer, or a float tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.source import Source
from edgexpert.core.errors import UserError
from edgexpert.model.blocks import MoeBlock, find_blocks
from edgexpert.model.packed import check_packable
from edgexpert.model.supported import check_supported
from edgexpert.weights.manifest import PART_ALIGNMENT, Extent, LayerLayout, Linear, MatrixLayout, layer_layout
from edgexpert.weights.rounding import PADDING

NARROW = PADDING
"""Linear layers with fewer outputs, such as the gate of a shared expert, keep their floats."""


@dataclass(frozen=True)
class DenseTensor:
    """One tensor of dense.safetensors: its first byte, counted from the end of the header, its type and its shape."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The files of a packed checkpoint, before anything is written.

    Attributes:
        experts: (layer layout, "gate_up" or "down") by parameter name.
        linears: packed linear layers by parameter name.
        floats: names of the parameters that keep their floats.
        dense: every tensor of dense.safetensors.
    """

    layers: list[LayerLayout]
    experts: dict[str, tuple[LayerLayout, str]]
    linears: dict[str, Linear]
    floats: list[str]
    dense: dict[str, DenseTensor]

    @property
    def experts_bytes(self) -> int:
        last = self.layers[-1]
        return last.offset + last.experts * last.stride

    @property
    def dense_bytes(self) -> int:
        return max(tensor.offset + tensor.bytes for tensor in self.dense.values())

    def matrix(self, name: str) -> MatrixLayout | Linear:
        """The packed matrix, or one of the packed matrices, of a parameter."""
        if name in self.experts:
            layer, part = self.experts[name]
            return getattr(layer, part)
        return self.linears[name]

    def channel_major(self, name: str, parameter: Tensor) -> Tensor:
        """A parameter's matrices as a view [E or 1, C, N]."""
        if name not in self.experts:
            return parameter.t()[None]
        return parameter if self.experts[name][0].transposed else parameter.transpose(1, 2)


def plan_layout(source: Source, options: PackOptions) -> Layout:
    """The layout of a source's model.

    Raises:
        UserError: the model has no experts, or the group size does not divide a dimension.
    """
    model, bits = source.model, options.bits_by_part
    check_supported(model)
    check_packable(model)
    blocks = find_blocks(model)
    for name in model.state_dict():
        source.dtype(name)  # all are there
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers, experts, offset = [], {}, 0
    for block in blocks:
        layer = _layer_layout(block, names, bits["experts"], options, offset)
        layers.append(layer)
        experts.update({layer.parameters[part]: (layer, part) for part in ("gate_up", "down")})
        offset += layer.experts * layer.stride
    linears = _linears(model, blocks, options)
    floats = [name for name in model.state_dict() if name not in experts and name not in linears]
    return Layout(layers, experts, linears, floats, _dense(source, linears, floats, options))


def _layer_layout(block: MoeBlock, names: dict[int, str], bits: int, options: PackOptions, offset: int) -> LayerLayout:
    experts = block.experts
    weights = block.weights()
    parameters = {"gate_up": names[id(getattr(experts, block.gate_up_name))], "down": names[id(experts.down_proj)]}
    shapes: dict[str, tuple[int, int]] = {}
    for part, weight in (("gate_up", weights.gate_up), ("down", weights.down)):
        _, channels, outputs = weight.shape
        _check_group(parameters[part], channels, bits, options.group_size)
        shapes[part] = channels, outputs
    return layer_layout(
        block.layer, block.num_experts, offset, shapes["gate_up"], shapes["down"], bits, options.group_size, options.zero_point,
        gate=experts.has_gate, interleaved=experts.has_gate and not experts.is_concatenated,
        transposed=experts.is_transposed, parameters=parameters,
    )


def _check_group(name: str, channels: int, bits: int, group: int) -> None:
    if channels % 4:
        raise UserError(f"the {channels} input channels of {name} are no multiple of 4, which the kernels need")
    if bits < 16 and channels % group:
        raise UserError(
            f"--group-size {group} does not divide the {channels} input channels of {name}; "
            f"give one that does, such as {gcd(group, channels)}"
        )


def _linears(model: PreTrainedModel, blocks: list[MoeBlock], options: PackOptions) -> dict[str, Linear]:
    """Linear layers to pack, by the name of their weight."""
    kept = {id(p) for block in blocks for module in (block.router, block.experts) for p in module.parameters()}
    head = model.get_output_embeddings()
    linears: dict[str, Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in kept or module.out_features < NARROW:
            continue
        part = "lm_head" if module is head else "attention" if re.search("attn|attention", name) else "shared_experts"
        bits = options.bits_by_part[part]
        _check_group(f"{name}.weight", module.in_features, bits, options.group_size)
        group = None if bits == 16 else options.group_size
        linears[f"{name}.weight"] = Linear(module.in_features, module.out_features, bits, group)
    return linears


def _dense(source: Source, linears: dict[str, Linear], floats: list[str], options: PackOptions) -> dict[str, DenseTensor]:
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, linear in linears.items():
        extents = linear.tensors(options.zero_point)
        shapes.update({f"{name}.{part}": (torch_dtype(e), e.shape) for part, e in extents.items()})
    embeddings = {id(parameter) for parameter in source.model.get_input_embeddings().parameters()}
    for name, tensor in source.model.state_dict(keep_vars=True).items():
        if name in floats:
            dtype = torch.bfloat16 if id(tensor) in embeddings else source.dtype(name)
            shapes[name] = dtype, tuple(tensor.shape)
    dense: dict[str, DenseTensor] = {}
    offset = 0
    # tensors of odd sizes last, so that those before them are aligned: the format knows no gaps
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: DenseTensor(0, *item[1]).bytes % PART_ALIGNMENT > 0):
        dense[name] = DenseTensor(offset, dtype, shape)
        offset += dense[name].bytes
    return dense


def torch_dtype(extent: Extent) -> torch.dtype:
    return getattr(torch, extent.dtype)

"""Whether a packed checkpoint holds what its configuration describes: asked before a kernel sees any of its addresses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.model.blocks import find_blocks
from edgexpert.weights.files import Pack
from edgexpert.weights.manifest import LayerLayout
from edgexpert.weights.matrix import PackedMatrix


def check_agreement(model: PreTrainedModel, pack: Pack, dense: Mapping[str, Tensor | PackedMatrix]) -> None:
    """Compares the model of ``config.json`` with the manifest's layers and the tensors of the dense file.

    Raises:
        UserError: they contradict each other.
    """

    def refuse(what: str) -> UserError:
        return UserError(f"config.json and the weights in {pack.folder} disagree: {what}; convert the checkpoint again")

    blocks = {block.layer: block for block in find_blocks(model)}
    layers = pack.manifest.layers
    if list(blocks) != [layer.layer for layer in layers]:
        raise refuse(f"it has experts in {len(blocks)} layers, they in {len(layers)}")
    for layer in layers:
        experts = blocks[layer.layer].experts
        form = (experts.has_gate, experts.has_gate and not experts.is_concatenated, experts.is_transposed)
        if form != (layer.gate, layer.interleaved, layer.transposed):
            raise refuse(f"the experts of layer {layer.layer} have another form")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    held = {name: _shape(tensor) for name, tensor in dense.items()} | _expert_shapes(layers)
    for name, shape in held.items():
        if name not in shapes:
            raise refuse(f"it has no {name}")
        if shape != shapes[name]:
            raise refuse(f"its {name} has shape {list(shapes[name])}, theirs {list(shape)}")


def _shape(tensor: Tensor | PackedMatrix) -> tuple[int, ...]:
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else (tensor.outputs, tensor.channels)


def _expert_shapes(layers: list[LayerLayout]) -> dict[str, tuple[int, ...]]:
    """Shapes of the experts' parameters as transformers has them, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        for part, name in layer.parameters.items():
            matrix = getattr(layer, part)
            last = (matrix.channels, matrix.outputs) if layer.transposed else (matrix.outputs, matrix.channels)
            shapes[name] = layer.experts, *last
    return shapes

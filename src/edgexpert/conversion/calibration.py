"""GPTQ over a whole model: what its matrices see on a calibration text, layer by layer.

One layer at a time is in memory: its experts come from the source while they are rounded, and stay in float32 until the layer
has made the inputs of the next. These inputs are in memory too, and once more what the layer's experts are given: for 65,536
tokens half a gigabyte each at H = 2048, less than such a layer takes, so that a file would only be slower.

A layer's inputs come from the layers before it as they were rounded; within a layer its own float weights make them, except that
the inputs of an expert's down matrix come from its rounded gate and up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from edgexpert.conversion.gptq import gptq
from edgexpert.conversion.layout import Layout
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.source import Source, meta_model
from edgexpert.core.errors import UserError
from edgexpert.core.library import compute_buffers
from edgexpert.model.blocks import MoeBlock, decoder_layers, find_blocks
from edgexpert.weights.matrix import PackedMatrix, dequantise
from edgexpert.weights.rounding import quantise, relative_error

SEQUENCES = 128
LENGTH = 512
ENOUGH_TOKENS = 32
"""Calibration tokens that an expert must see; with fewer it is rounded to nearest."""
PRIOR_TOKENS = 256
"""As how many tokens of its own an expert's gate and up count the layer's average input, so that few tokens mislead less."""
VALUES_AT_ONCE = 1 << 26
"""Floats in the matrices and Hessians of the experts that are rounded side by side."""

Rounded = tuple[str, list[PackedMatrix], dict[str, Any]]
"""A parameter's name, its packed matrices (one for each expert), and what the manifest says about them."""
Run = Callable[[Tensor], Tensor]
"""From a layer's inputs to its outputs, [1, S, H], of one sequence."""


def calibration_tokens(source: Source, file: Path) -> list[Tensor]:
    """Sequences [1, S] of a text file's tokens, by the source's own tokenizer."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the calibration text {file} cannot be read; give a file of plain UTF-8 text") from error
    with tempfile.TemporaryDirectory() as folder:
        source.config.save_pretrained(folder)
        source.save_extras(Path(folder))
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise UserError("the source has no tokenizer that loads, and calibration needs one") from error
    length = min(LENGTH, int(source.config.get_text_config().max_position_embeddings))
    ids = torch.tensor(tokenizer(text)["input_ids"][: SEQUENCES * length])
    if len(ids) < ENOUGH_TOKENS:
        raise UserError(f"the calibration text {file} has only {len(ids)} tokens; give one with thousands")
    return [part[None] for part in ids.split(length) if len(part) > 1]


def round_layers(source: Source, layout: Layout, options: PackOptions, sequences: list[Tensor]) -> Iterator[Rounded]:
    """GPTQ of every parameter of the decoder layers, in their order."""
    model = meta_model(source.config).eval()
    layers = decoder_layers(model)
    blocks = {block.layer: block for block in find_blocks(model)}
    hidden, arguments = _first_inputs(model, source, sequences)
    for number, layer in enumerate(layers):
        stem = f"{model.base_model_prefix}.layers.{number}."
        _load(model, source, (name for name in model.state_dict() if name.startswith(stem) and name not in layout.experts))
        run = partial(_run, layer, arguments[number])
        linears = {name: m for path, m in layer.named_modules() if (name := f"{stem}{path}.weight") in layout.linears}
        hessians, routed = _observe(run, hidden, linears, blocks.get(number))
        for name, linear in linears.items():
            weight = linear.weight.t()
            packed = gptq(weight[None], hessians[name][None], layout.linears[name].bits, options.group_size, options.zero_point)
            yield name, packed, {"errors": [relative_error(weight, packed[0])]}
            _put(model, name, dequantise(packed[0]).t())
        if routed is not None:
            yield from _round_experts(model, source, blocks[number], routed, layout, options)
        for i, x in enumerate(hidden):
            hidden[i] = run(x)
        layer.to("meta")


def _load(model: PreTrainedModel, source: Source, names: Iterable[str]) -> None:
    for name in names:
        _put(model, name, source.read(name))


def _put(model: PreTrainedModel, name: str, weight: Tensor) -> None:
    """Gives a parameter that had no memory its weights, in float32."""
    model.load_state_dict({name: weight.float().contiguous()}, strict=False, assign=True)


def _first_inputs(
    model: PreTrainedModel, source: Source, sequences: list[Tensor]
) -> tuple[list[Tensor], list[dict[int, dict[str, Any]]]]:
    """Inputs of the first layer for each sequence, and each layer's other arguments by the length of the sequence, on which alone
    they depend."""
    layers, stem = decoder_layers(model), f"{model.base_model_prefix}."
    hidden: list[Tensor] = []
    arguments: list[dict[int, dict[str, Any]]] = [{} for _ in layers]

    def pass_on(number: int, hidden_states: Tensor, **others: Any) -> Tensor:
        if number == 0:
            hidden.append(hidden_states)
        arguments[number][hidden_states.shape[1]] = others
        return hidden_states

    _load(model, source, (n for n in model.state_dict() if n.startswith(stem) and not n.startswith(f"{stem}layers.")))
    compute_buffers(model)
    for number, layer in enumerate(layers):
        layer.forward = partial(pass_on, number)
    for tokens in sequences:
        model.base_model(input_ids=tokens, use_cache=False)
    for layer in layers:
        del layer.forward
    model.to("meta")
    return hidden, arguments


def _run(layer: nn.Module, arguments: dict[int, dict[str, Any]], x: Tensor) -> Tensor:
    return layer(x, **arguments[x.shape[1]])


@dataclass(eq=False)
class Routed:
    """What the experts of a layer were given: inputs [T, H] and the experts [T, k] of each."""

    inputs: Tensor
    experts: Tensor

    def of(self, expert: int) -> Tensor:
        return self.inputs[(self.experts == expert).any(1)]


def _observe(
    run: Run, hidden: list[Tensor], linears: dict[str, nn.Module], block: MoeBlock | None
) -> tuple[dict[str, Tensor], Routed | None]:
    """Runs a layer without its experts, which none of its other inputs depend on, and returns the Hessian of every linear layer's
    inputs, and the inputs of the experts."""
    hessians: dict[str, Tensor] = {}
    given: list[tuple[Tensor, Tensor]] = []

    def add(name: str, linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, -2)
        hessians.setdefault(name, torch.zeros(x.shape[1], x.shape[1])).addmm_(x.t(), x)

    def leave_out(x: Tensor, experts: Tensor, *_: Tensor) -> Tensor:
        given.append((x.flatten(0, -2), experts.flatten(0, -2)))
        return torch.zeros_like(x)

    handles = [linear.register_forward_pre_hook(partial(add, name)) for name, linear in linears.items()]
    if block is not None:
        block.experts.forward = leave_out
    for x in hidden:
        run(x)
    for handle in handles:
        handle.remove()
    if block is None:
        return hessians, None
    del block.experts.forward
    return hessians, Routed(torch.cat([x for x, _ in given]), torch.cat([experts for _, experts in given]))


def _round_experts(
    model: PreTrainedModel, source: Source, block: MoeBlock, routed: Routed, layout: Layout, options: PackOptions
) -> Iterator[Rounded]:
    """Both parameters of a layer's experts. The layer gets its weights back as they were rounded when the source's are gone."""
    names = next(layer.parameters for layer in layout.layers if layer.layer == block.layer)
    counts = [len(routed.of(expert)) for expert in range(block.num_experts)]
    enough = [expert for expert, count in enumerate(counts) if count >= ENOUGH_TOKENS]
    module = block.weights()
    packed: dict[str, list[PackedMatrix]] = {}

    def given_to_down(expert: int) -> Tensor:
        y = routed.of(expert) @ dequantise(packed["gate_up"][expert])
        return module.apply_gate(y if module.gate_up_bias is None else y + module.gate_up_bias[expert])

    average = routed.inputs.t() @ routed.inputs * (PRIOR_TOKENS / len(routed.inputs))
    for part, inputs, prior in (("gate_up", routed.of, average), ("down", given_to_down, torch.zeros(()))):
        name = names[part]
        weights = layout.channel_major(name, source.read(name))
        packed[part] = _round_some(weights, enough, inputs, prior, layout.matrix(name).bits, options)
        facts: dict[str, Any] = {"errors": list(map(relative_error, weights, packed[part]))}
        if part == "gate_up":
            facts["rtn_fallbacks"] = [
                {"layer": block.layer, "expert": expert, "tokens": count}
                for expert, count in enumerate(counts) if count < ENOUGH_TOKENS
            ]
        yield name, packed[part], facts
    del weights
    for part, name in names.items():
        whole = torch.empty(model.get_parameter(name).shape)
        for matrix, weight in zip(packed[part], layout.channel_major(name, whole), strict=True):
            weight.copy_(dequantise(matrix))
        _put(model, name, whole)


def _round_some(
    weights: Tensor, enough: list[int], inputs: Callable[[int], Tensor], prior: Tensor, bits: int, options: PackOptions
) -> list[PackedMatrix]:
    """The matrices [E, C, N] of all experts: GPTQ on the inputs [n, C] of those that have enough, the others to nearest."""
    _, channels, outputs = weights.shape
    at_once = max(1, VALUES_AT_ONCE // (channels * (channels + outputs)))
    packed: dict[int, PackedMatrix] = {}
    for first in range(0, len(enough), at_once):
        experts = enough[first : first + at_once]
        hessians = torch.stack([x.t() @ x for x in map(inputs, experts)]).add_(prior)
        packed.update(zip(experts, gptq(weights[experts], hessians, bits, options.group_size, options.zero_point), strict=True))
    return [
        packed[expert] if expert in packed else quantise(weight, bits, options.group_size, options.zero_point)
        for expert, weight in enumerate(weights)
    ]

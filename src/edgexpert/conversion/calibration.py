"""GPTQ over a whole model: what its matrices see on a calibration text, layer by layer.

The model is in memory in float32, which bounds this method to models that fit. A layer's inputs come from the layers before it
as they were rounded; within a layer its own float weights make them, except that the inputs of an expert's down matrix come
from its rounded gate and up.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from edgexpert.conversion.gptq import gptq
from edgexpert.conversion.layout import Layout
from edgexpert.conversion.options import Options
from edgexpert.conversion.sources.source import Source
from edgexpert.errors import UserError
from edgexpert.kernels.packed import PackedMatrix, dequantise
from edgexpert.model.blocks import MoeBlock, decoder_layers, find_blocks
from edgexpert.packing.matrix import quantise

SEQUENCES = 128
LENGTH = 512
ENOUGH_TOKENS = 32
"""Calibration tokens that an expert must see; with fewer it is rounded to nearest."""
PRIOR_TOKENS = 256
"""As how many tokens of its own an expert's gate and up count the layer's average input, so that few tokens mislead less."""
VALUES_AT_ONCE = 1 << 26
"""Floats in the matrices and Hessians of the experts that are rounded side by side."""


@dataclass(eq=False)
class Rounded:
    """One parameter's packed matrices, a matrix for each expert, and the experts that were rounded to nearest."""

    name: str
    matrices: list[PackedMatrix]
    weights: list[Tensor]  # float32 [C, N], before rounding
    fallbacks: list[dict[str, Any]] = field(default_factory=list)


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


def round_layers(source: Source, layout: Layout, options: Options, sequences: list[Tensor]) -> Iterator[Rounded]:
    """GPTQ of every parameter of the decoder layers, in their order."""
    model = load_float(source)
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    blocks = {block.layer: block for block in find_blocks(model)}
    hidden, arguments = _first_inputs(model, layers, sequences)
    for number, layer in enumerate(layers):
        run = partial(_run_layer, layer, hidden, arguments[number])
        linears = {f"{prefix}.{number}.{name}.weight": m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        linears = {name: module for name, module in linears.items() if name in layout.linears}
        hessians, routed = _observe(run, linears, blocks.get(number))
        for name, linear in linears.items():
            yield _round_linear(name, linear, hessians[name], layout, options)
        if routed is not None:
            yield from _round_experts(blocks[number], routed, layout, options)
        hidden = run()


def load_float(source: Source) -> PreTrainedModel:
    """The source's model in float32."""
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
    state = model.state_dict()
    for name, parameter in state.items():
        parameter.copy_(source.read(name))
    return model


def _first_inputs(
    model: PreTrainedModel, layers: nn.ModuleList, sequences: list[Tensor]
) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """Inputs of the first layer for each sequence, and the other arguments of every layer for each sequence."""
    hidden: list[Tensor] = []
    arguments: list[list[dict[str, Any]]] = [[] for _ in layers]

    def keep(number: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        if number == 0:
            hidden.append(args[0] if args else kwargs["hidden_states"])
        arguments[number].append({name: value for name, value in kwargs.items() if name != "hidden_states"})

    handles = [layer.register_forward_pre_hook(partial(keep, i), with_kwargs=True) for i, layer in enumerate(layers)]
    for tokens in sequences:
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return hidden, arguments


def _run_layer(layer: nn.Module, hidden: list[Tensor], arguments: list[dict[str, Any]]) -> list[Tensor]:
    outputs = (layer(x, **other) for x, other in zip(hidden, arguments, strict=True))
    return [output[0] if isinstance(output, tuple) else output for output in outputs]


@dataclass(eq=False)
class Routed:
    """What the experts of a layer were given: inputs [T, H] and the experts [T, k] of each."""

    inputs: Tensor
    experts: Tensor

    def of(self, expert: int) -> Tensor:
        return self.inputs[(self.experts == expert).any(1)]


def _observe(
    run: Callable[[], Any], linears: dict[str, nn.Linear], block: MoeBlock | None
) -> tuple[dict[str, Tensor], Routed | None]:
    """Runs a layer and returns the Hessian of every linear layer's inputs, and the inputs of the experts."""
    hessians = {name: torch.zeros(linear.in_features, linear.in_features) for name, linear in linears.items()}
    given: list[tuple[Tensor, Tensor]] = []

    def add(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].flatten(0, -2)
        hessians[name].addmm_(x.t(), x)

    with _hooks([(linear, partial(add, name)) for name, linear in linears.items()] + (
        [(block.experts, lambda module, args: given.append((args[0].flatten(0, -2), args[1].flatten(0, -2))))] if block else []
    )):
        run()
    if block is None:
        return hessians, None
    return hessians, Routed(torch.cat([x for x, _ in given]), torch.cat([experts for _, experts in given]))


@contextmanager
def _hooks(pairs: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _round_linear(name: str, linear: nn.Linear, hessian: Tensor, layout: Layout, options: Options) -> Rounded:
    weight = linear.weight.detach().t().clone()
    packed = gptq(weight[None], hessian[None], layout.linears[name].bits, options.group_size, options.zero_point)[0]
    linear.weight.copy_(dequantise(packed).t())
    return Rounded(name, [packed], [weight])


def _round_experts(block: MoeBlock, routed: Routed, layout: Layout, options: Options) -> Iterator[Rounded]:
    """Both parameters of a layer's experts; the model's own are replaced by what they became."""
    layer = next(layer for layer in layout.layers if layer.layer == block.layer)
    weights = block.weights()
    _, hidden, outputs = weights.gate_up.shape
    at_once = max(1, VALUES_AT_ONCE // (hidden * (hidden + 3 * outputs)))
    counts = [len(routed.of(expert)) for expert in range(block.num_experts)]
    enough = [expert for expert, count in enumerate(counts) if count >= ENOUGH_TOKENS]
    bias = weights.gate_up_bias
    prior = routed.inputs.t() @ routed.inputs * (PRIOR_TOKENS / len(routed.inputs))
    packed: dict[str, dict[int, PackedMatrix]] = {"gate_up": {}, "down": {}}
    for first in range(0, len(enough), at_once):
        experts = enough[first : first + at_once]
        inputs = {expert: routed.of(expert) for expert in experts}
        packed["gate_up"].update(_round_some(weights.gate_up, inputs, layer.gate_up.bits, options, prior))
        for expert, x in inputs.items():
            y = x @ dequantise(packed["gate_up"][expert])
            inputs[expert] = weights.apply_gate(y if bias is None else y + bias[expert])
        packed["down"].update(_round_some(weights.down, inputs, layer.down.bits, options, None))
    few = [expert for expert in range(block.num_experts) if expert not in packed["down"]]
    for part, parameter, bits in (("gate_up", weights.gate_up, layer.gate_up.bits), ("down", weights.down, layer.down.bits)):
        for expert in few:
            packed[part][expert] = quantise(parameter[expert], bits, options.group_size, options.zero_point)
        matrices = [packed[part][expert] for expert in range(block.num_experts)]
        rounded = Rounded(layer.parameters[part], matrices, list(parameter.detach().clone()))
        if part == "gate_up":
            rounded.fallbacks = [{"layer": block.layer, "expert": expert, "tokens": counts[expert]} for expert in few]
        for expert, matrix in enumerate(matrices):
            parameter[expert] = dequantise(matrix)
        yield rounded


def _round_some(
    parameter: Tensor, inputs: dict[int, Tensor], bits: int, options: Options, prior: Tensor | None
) -> dict[int, PackedMatrix]:
    """GPTQ of the matrices [E, C, N] of some experts, on the inputs [n, C] of each."""
    hessians = torch.stack([x.t() @ x for x in inputs.values()])
    if prior is not None:
        hessians += prior
    packed = gptq(parameter[list(inputs)], hessians, bits, options.group_size, options.zero_point)
    return dict(zip(inputs, packed, strict=True))

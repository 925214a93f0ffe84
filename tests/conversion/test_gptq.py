"""GPTQ: less error where inputs are, and less loss on the bundled model's held-out text."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from edgexpert.conversion.calibration import ENOUGH_TOKENS, PRIOR_TOKENS, calibration_tokens
from edgexpert.conversion.convert import convert
from edgexpert.conversion.gptq import gptq
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.errors import UserError
from edgexpert.core.resources import bundled_folder
from edgexpert.model.blocks import decoder_layers, find_blocks
from edgexpert.model.loading import load_model
from edgexpert.weights.matrix import dequantise
from edgexpert.weights.rounding import quantise
from tests.conversion.conftest import TINY, checkpoint, float_weights


@pytest.mark.parametrize(("bits", "zero_point"), [(4, False), (4, True), (8, False)])
def test_the_product_with_typical_inputs_changes_less_than_by_rounding(bits: int, zero_point: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2, 500, 16, generator=generator) @ torch.randn(2, 16, 96, generator=generator)  # correlated
    inputs = inputs + 0.1 * torch.randn(2, 500, 96, generator=generator)
    weights = torch.randn(2, 96, 50, generator=generator)
    for x, weight, packed in zip(inputs, weights, gptq(weights, inputs.mT @ inputs, bits, 32, zero_point), strict=True):
        wanted = x @ weight
        rounded = quantise(weight, bits, 32, zero_point)
        assert (x @ dequantise(packed) - wanted).norm() < 0.7 * (x @ dequantise(rounded) - wanted).norm()


def test_inputs_that_are_independent_leave_nothing_to_gain() -> None:
    weight = torch.randn(1, 64, 40, generator=torch.Generator().manual_seed(1))
    packed = gptq(weight, torch.eye(64)[None], 4, 8)[0]
    assert torch.equal(dequantise(packed), dequantise(quantise(weight[0], 4, 8)))


LAYERS = 2
"""Layers of the bundled model that are left, to be quick."""


def shallow_model(folder: Path) -> PreTrainedModel:
    """The first layers of the bundled model, saved as a checkpoint."""
    loaded = load_model("stories", dtype="float32")
    config = copy.deepcopy(loaded.model.config)
    config.num_hidden_layers = LAYERS
    model = type(loaded.model)(config).eval()
    model.load_state_dict({name: tensor for name, tensor in loaded.model.state_dict().items() if name in model.state_dict()})
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return model


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, texts: list[Tensor]) -> Tensor:
    return torch.cat([model(input_ids=text).logits[0] for text in texts]).log_softmax(-1)


def test_the_bundled_model_loses_less_on_held_out_text_than_by_rounding(tmp_path: Path) -> None:
    """The loss increase is that expected over the model's own next tokens (the Kullback-Leibler divergence), which needs far
    less text than the increase on the tokens that happened to follow."""
    model = shallow_model(tmp_path / "source")
    source = open_source(str(tmp_path / "source"))
    lines = (bundled_folder("stories") / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    (tmp_path / "calibration.txt").write_text("\n".join(texts[:6]), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
    held_out = [torch.tensor(tokenizer(text)["input_ids"])[None, :128] for text in texts[-4:]]
    plain = log_probabilities(model, held_out)
    increase = {}
    for method in ("rtn", "gptq"):
        calibration = tmp_path / "calibration.txt" if method == "gptq" else None
        options = PackOptions(4, 32, method, keep={"lm_head": 16})  # type: ignore[arg-type]
        manifest = convert(source, tmp_path / method, options, calibration=calibration)
        model.load_state_dict(float_weights(tmp_path / method))
        rounded = log_probabilities(model, held_out)
        increase[method] = float((plain.exp() * (plain - rounded)).sum(-1).mean())
    assert 0 < increase["gptq"] < 0.9 * increase["rtn"]
    assert all(fallback["tokens"] < ENOUGH_TOKENS for fallback in manifest.rtn_fallbacks)


@pytest.mark.parametrize("family", TINY)
@torch.no_grad()
def test_layer_by_layer_the_weights_are_bit_for_bit_those_of_a_model_that_is_in_memory_whole(family: str, tmp_path: Path) -> None:
    _, source = checkpoint(family, tmp_path / "source")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 7)
    manifest = convert(source, tmp_path / "out", PackOptions(4, 8, "gptq"), calibration=tmp_path / "text.txt")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    written, blocks = float_weights(tmp_path / "out"), {block.layer: block for block in find_blocks(model)}
    sequences = calibration_tokens(source, tmp_path / "text.txt")
    assert len({sequence.shape for sequence in sequences}) == 2
    for number, layer in enumerate(decoder_layers(model)):
        names = [name for name in written if name.startswith(f"model.layers.{number}.")]
        modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        linears = {name: module for name, module in modules.items() if name in manifest.linears}
        watched = [*linears.values(), *([blocks[number].experts] if number in blocks else [])]
        given = inputs_of(watched, model, sequences)
        for name, linear in linears.items():
            hessian = torch.zeros(linear.in_features, linear.in_features)
            for (x, *_) in given[linear]:
                hessian.addmm_(x.flatten(0, -2).t(), x.flatten(0, -2))
            assert torch.equal(written[name], dequantise(gptq(linear.weight.t()[None], hessian[None], 4, 8)[0]).t()), name
        if number in blocks:
            experts = blocks[number].experts
            x = torch.cat([x.flatten(0, -2) for x, *_ in given[experts]])
            chosen = torch.cat([chosen for _, chosen, *_ in given[experts]])
            prior = x.t() @ x * (PRIOR_TOKENS / len(x))
            for expert in range(blocks[number].num_experts):
                own = x[(chosen == expert).any(1)]
                if len(own) < ENOUGH_TOKENS:
                    continue
                weights = blocks[number].weights()
                stem = next(name for name, module in modules.items() if module is experts).rpartition(".")[0]
                gate_up = dequantise(gptq(weights.gate_up[[expert]], (own.t() @ own + prior)[None], 4, 8)[0])
                assert torch.equal(written[f"{stem}.gate_up_proj"][expert], gate_up.t())
                inside = weights.apply_gate(own @ gate_up)
                down = dequantise(gptq(weights.down[[expert]], (inside.t() @ inside)[None], 4, 8)[0])
                assert torch.equal(written[f"{stem}.down_proj"][expert], down.t())
        layer.load_state_dict({name.removeprefix(f"model.layers.{number}."): written[name] for name in names})


def inputs_of(modules: list[torch.nn.Module], model: PreTrainedModel, sequences: list[Tensor]) -> dict:
    """The arguments of each call of some modules while a model reads sequences."""
    given: dict = {module: [] for module in modules}
    handles = [module.register_forward_pre_hook(lambda module, args: given[module].append(args)) for module in modules]
    for sequence in sequences:
        model(input_ids=sequence, use_cache=False)
    for handle in handles:
        handle.remove()
    return given


def test_experts_that_see_too_few_tokens_are_rounded_to_nearest_and_listed(tmp_path: Path) -> None:
    model, source = checkpoint("olmoe", tmp_path / "source")
    (tmp_path / "text.txt").write_text("abcdefgh" * 8)
    manifest = convert(source, tmp_path / "out", PackOptions(4, 8, "gptq"), calibration=tmp_path / "text.txt")
    few = {(f["layer"], f["expert"]) for f in manifest.rtn_fallbacks}
    assert 0 < len(few) < 16
    weights = float_weights(tmp_path / "out")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        for expert, weight in enumerate(model.state_dict()[name]):
            rounded = dequantise(quantise(weight.t(), 4, 8)).t()
            assert torch.equal(weights[name][expert], rounded) == ((layer, expert) in few)


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    _, source = checkpoint("olmoe", tmp_path / "source")
    (tmp_path / "text.txt").write_text("abc")
    with pytest.raises(UserError, match="has only 3 tokens"):
        convert(source, tmp_path / "out", PackOptions(4, 8, "gptq"), calibration=tmp_path / "text.txt")
    assert not list(tmp_path.glob("out*"))

"""GPTQ: less error where inputs are, and less loss on the bundled model's held-out text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.conversion.calibration import ENOUGH_TOKENS
from edgexpert.conversion.convert import convert
from edgexpert.conversion.gptq import gptq
from edgexpert.conversion.options import Options
from edgexpert.conversion.sources.opening import open_source
from edgexpert.errors import UserError
from edgexpert.model.loading import bundled_folder, load_model
from edgexpert.packing.matrix import dequantise, quantise
from tests.conversion.conftest import checkpoint, float_weights


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


def loss(model: PreTrainedModel, weights: dict[str, Tensor], texts: list[Tensor]) -> float:
    """Mean cross-entropy of texts under the model with other weights."""
    model.load_state_dict({**model.state_dict(), **weights})
    with torch.no_grad():
        losses = [torch.nn.functional.cross_entropy(model(input_ids=t).logits[0, :-1], t[0, 1:]) for t in texts]
    return float(torch.stack(losses).mean())


def test_the_bundled_model_loses_less_on_held_out_text_than_by_rounding(tmp_path: Path) -> None:
    loaded = load_model("stories")
    model = loaded.model
    model.save_pretrained(tmp_path / "source")
    loaded.tokenizer.save_pretrained(tmp_path / "source")
    lines = (bundled_folder("stories") / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    (tmp_path / "calibration.txt").write_text("\n".join(texts[:24]), encoding="utf-8")
    held_out = [torch.tensor(loaded.tokenizer(text)["input_ids"])[None, :200] for text in texts[30:]]
    plain = loss(model, {}, held_out)
    increase = {}
    for method in ("rtn", "gptq"):
        # only the experts are rounded, since they are what is calibrated token by token
        options = Options(4, 32, method, keep={"attention": 16, "lm_head": 16})  # type: ignore[arg-type]
        calibration = tmp_path / "calibration.txt" if method == "gptq" else None
        manifest = convert(open_source(str(tmp_path / "source")), tmp_path / method, options, calibration=calibration)
        weights = {name: tensor for name, tensor in float_weights(tmp_path / method).items() if ".experts." in name}
        increase[method] = loss(model, weights, held_out) - plain
    assert 0 < increase["gptq"] < increase["rtn"]
    assert all(fallback["tokens"] < ENOUGH_TOKENS for fallback in manifest.rtn_fallbacks)


def test_experts_that_see_too_few_tokens_are_rounded_to_nearest_and_listed(tmp_path: Path) -> None:
    model, source = checkpoint("olmoe", tmp_path / "source")
    (tmp_path / "text.txt").write_text("abcdefgh" * 8)
    manifest = convert(source, tmp_path / "out", Options(4, 8, "gptq"), calibration=tmp_path / "text.txt")
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
        convert(source, tmp_path / "out", Options(4, 8, "gptq"), calibration=tmp_path / "text.txt")
    assert not list(tmp_path.glob("out*"))

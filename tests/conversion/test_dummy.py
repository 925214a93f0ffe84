"""Random weights in real shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from edgexpert.conversion.convert import convert
from edgexpert.conversion.layout import plan_layout
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.dummy import EMBEDDING_STD, STD, DummySource, dummy_config
from edgexpert.core.errors import UserError
from edgexpert.core.resources import MODELS
from edgexpert.core.stage import Stage
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.weights.files import Pack
from tests.conftest import make_model
from tests.conversion.conftest import float_weights


@pytest.mark.parametrize(("name", "billions", "megabytes_of_an_expert"), [
    ("granite-1b-a400m", 1.335, 1.5 * 1.048576), ("olmoe-1b-7b", 6.92, 6 * 1.048576),
    ("deepseek-v2-lite", 15.71, 8.25 * 1.048576), ("qwen3-30b-a3b", 30.53, 4.5 * 1.048576),
])
def test_shapes_have_the_published_sizes(name: str, billions: float, megabytes_of_an_expert: float) -> None:
    source = DummySource(dummy_config(name), name)
    parameters = sum(parameter.numel() for parameter in source.model.parameters())
    if source.config.tie_word_embeddings:
        parameters = sum(p.numel() for n, p in source.model.named_parameters() if "lm_head" not in n)
    assert parameters / 1e9 == pytest.approx(billions, abs=0.006)
    layer = plan_layout(source, PackOptions(4)).layers[0]
    values = sum(m.channels * m.outputs for m in (layer.gate_up, layer.down))
    assert values / 1e6 == pytest.approx(megabytes_of_an_expert, rel=1e-6)
    assert layer.stride == pytest.approx(values * 4.5 / 8, rel=0.002)  # four bits, and sixteen for every 32 weights


@pytest.mark.parametrize(
    "options", [PackOptions(4, 8), PackOptions(8, 8), PackOptions(16), PackOptions(4, 8, zero_point=True)], ids=str
)
def test_weights_are_random_of_the_usual_size_and_marked(options: PackOptions, tmp_path: Path) -> None:
    make_model("deepseek_v2", num_hidden_layers=2).config.save_pretrained(tmp_path)
    manifest = convert(DummySource(dummy_config(str(tmp_path / "config.json")), "tiny"), tmp_path / "out", options)
    assert manifest.dummy and manifest.method == "random" and manifest.layers[0].errors["down"] == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["edgexpert_dummy"] is True
    weights = float_weights(tmp_path / "out")
    for name, weight in weights.items():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            std = EMBEDDING_STD if "embed" in name else STD
            assert float(weight.std()) == pytest.approx(std, rel=0.15), name
    model = make_model("deepseek_v2", num_hidden_layers=2)
    model.load_state_dict(weights)
    assert model(torch.arange(20)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", ["granitemoe", "olmoe"])
def test_65_tokens_go_to_as_many_experts_as_the_paper_tells_of_64_candidates(name: str, tmp_path: Path) -> None:
    experts = {"num_local_experts": 128} if name == "granitemoe" else {"num_experts": 128}
    config = make_model(name, num_hidden_layers=8, hidden_size=256, num_experts_per_tok=8, vocab_size=5000, **experts).config
    config.save_pretrained(tmp_path)
    convert(DummySource(dummy_config(str(tmp_path)), "tiny"), tmp_path / "out", PackOptions(4, 8))
    host = HostedModel(load_model(str(tmp_path / "out")).model)
    output = host.run(Stage.prefill(torch.randperm(5000)[:65]), host.new_cache(65))
    assert output.experts_loaded / host.layers == pytest.approx(52.1, abs=4)


def test_a_second_time_gives_the_same_bytes_and_a_tokenizer_comes_along(tmp_path: Path) -> None:
    make_model("olmoe", num_hidden_layers=1, vocab_size=5000).config.save_pretrained(tmp_path)
    for name in ("a", "b"):
        convert(DummySource(dummy_config(str(tmp_path)), "tiny"), tmp_path / name, PackOptions(4, 8))
    files = [Pack(tmp_path / name).manifest.files for name in ("a", "b")]
    assert files[0] == files[1] and "tokenizer.json" in files[0]


def test_unknown_shapes_are_refused_and_known_ones_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=MODELS[0]):
        dummy_config("gpt-7")
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(UserError, match="transformers knows"):
        dummy_config(str(tmp_path))
    with pytest.raises(UserError, match="cannot be calibrated"):
        convert(
            DummySource(dummy_config("granite-1b-a400m"), "x"), tmp_path / "out", PackOptions(4, 32, "gptq"),
            calibration=tmp_path / "config.json",
        )

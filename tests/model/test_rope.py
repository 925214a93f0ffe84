"""Rotary frequencies that depend on how far a text reaches: trees over the switch, and texts one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.stage import Stage
from edgexpert.kernels import native
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from tests.conftest import make_model, make_tokenizer
from tests.parity.examine import PROMPTS, branching, greedy, hosted, library, plain, same

SWITCH = 24
PLAIN: dict[str, Any] = dict(rope_theta=10000.0)
SCALED: dict[str, dict[str, Any]] = {
    "dynamic": dict(rope_parameters=dict(PLAIN, rope_type="dynamic", factor=4.0), max_position_embeddings=SWITCH),
    "longrope": dict(rope_parameters=dict(
        PLAIN, rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0 + i for i in range(8)], factor=4.0,
        original_max_position_embeddings=SWITCH,
    )),
}
SIZES = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2)


@pytest.fixture(params=SCALED)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_model("granitemoe", **SIZES, **SCALED[request.param]).bfloat16().float().save_pretrained(tmp_path / "source")
    make_tokenizer().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_a_tree_that_reaches_over_the_switch_equals_plain_decoding(source: Path) -> None:
    assert hosted(source, PROMPTS) is None  # raises where something differs from the library


def test_a_text_does_not_depend_on_the_texts_before_it(source: Path) -> None:
    host = HostedModel(load_model(str(source)).model)
    short, long = PROMPTS
    for prompt in (short, long, short, long):
        text, logits = greedy(library(source), prompt)
        same(branching(host, prompt, text), text, logits, "trees")


def test_packed_trees_equal_plain_decoding_bit_for_bit(source: Path, tmp_path: Path) -> None:
    if native.path() == "torch":
        pytest.skip("PyTorch's products depend on what else is in the call")
    convert(open_source(str(source)), tmp_path / "packed", PackOptions(8, 32))
    host = HostedModel(load_model(str(tmp_path / "packed")).model)
    assert host.native is not None
    text, _ = greedy(library(source), PROMPTS[0])
    assert torch.equal(branching(host, PROMPTS[0], text), plain(host, PROMPTS[0], text))


def test_detaching_gives_the_librarys_embedding_back(source: Path) -> None:
    model = library(source)
    rotary = model.base_model.rotary_emb
    host = HostedModel(model)
    host.run(Stage.prefill(torch.tensor(PROMPTS[1])), host.new_cache(64))
    host.detach()
    assert "forward" not in vars(rotary)

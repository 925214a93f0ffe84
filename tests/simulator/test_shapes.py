"""Sizes from configurations: exact against the published figures (data/firstorder_expected.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgexpert.core.errors import UserError
from edgexpert.core.resources import MODELS
from edgexpert.simulator.shapes import ModelShape, model_named
from tests.simulator.workloads import CONFIG

EXPECTED = json.loads((Path(__file__).parent / "data" / "firstorder_expected.json").read_text("utf-8"))
BY_NAME = dict(zip(MODELS, EXPECTED["models"].values(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_the_papers_models_are_exact(name: str) -> None:
    model, expected = model_named(name), BY_NAME[name]
    assert model.draft is not None
    assert model.parameters() == {
        "expert": expected["expert_params"], "experts": expected["routed_all_params"], "attention": expected["attn_params"],
        "router": expected["router_params"], "shared_experts": expected["shared_params"], "dense": expected["dense_params"],
        "lm_head": expected["lm_head_params"],
    }
    assert model.draft.streamed == expected["draft_stream_params"]
    assert model.draft.fuse.inputs * model.draft.fuse.outputs == expected["draft_fc_params"]


@pytest.mark.parametrize(("name", "mebi"), [("granite-1b-a400m", 1.5), ("olmoe-1b-7b", 6.0), ("qwen3-30b-a3b", 4.5)])
def test_the_paper_counts_an_expert_in_binary_millions(name: str, mebi: float) -> None:
    assert model_named(name).parameters()["expert"] == mebi * 2**20


def test_a_folder_with_a_draft_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert model_named(str(tmp_path)).draft is None
    (tmp_path / "draft").mkdir()
    nested = {"transformer_layer_config": {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4,
                                           "num_key_value_heads": 4, "vocab_size": 256}, "draft_vocab_size": 100}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(nested))
    draft = model_named(str(tmp_path)).draft
    assert draft is not None and draft.head.outputs == 100


def test_sparse_steps_and_dense_layers_say_which_layers_have_experts() -> None:
    assert ModelShape.of(CONFIG | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe_layers == (1, 5)
    assert ModelShape.of(CONFIG | {"num_hidden_layers": 3, "first_k_dense_replace": 2}).moe_layers == (2,)


def test_a_dense_model_is_refused_with_the_key_it_lacks() -> None:
    with pytest.raises(UserError, match="num_experts"):
        ModelShape.of({key: value for key, value in CONFIG.items() if key != "num_experts"})


def test_an_unknown_model_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="qwen3-30b-a3b"):
        model_named("gpt")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        model_named(str(tmp_path))


@pytest.mark.parametrize(("change", "message"), [
    ({"hidden_size": "64"}, "hidden_size .* must be a whole number"), ({"hidden_size": -1}, "hidden_size"),
    ({"num_hidden_layers": 10**30}, "num_hidden_layers"), ({"num_hidden_layers": True}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"), ({"num_experts": 1.5}, "num_experts"),
    ({"num_experts_per_tok": 10**6}, "cannot be simulated"), ({"mlp_only_layers": "x"}, "mlp_only_layers"),
    ({"mlp_only_layers": list(range(100))}, "no layer with experts"), ({"head_dim": [1]}, "head_dim"),
    ({"num_hidden_layers": 10**6, "num_experts": 10**6}, "cannot be simulated"),
])
def test_sizes_that_no_model_has_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ModelShape.of({**CONFIG, **change})

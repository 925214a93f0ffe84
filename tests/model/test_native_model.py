"""A stage in one native call gives what it gives layer by layer: bits, choices, bytes and cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import Options
from edgexpert.conversion.sources.opening import open_source
from edgexpert.kernels import native
from edgexpert.model.cache import TreeCache
from edgexpert.model.host import HostedModel
from edgexpert.model.native_model import native_model
from edgexpert.model.packed import load_pack
from edgexpert.model.running import StageOutput
from edgexpert.policy import PRESETS
from edgexpert.stage import Stage, TokenTree
from tests.conftest import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no compiled kernels here")

LAYERS, PROMPT = 3, 18
FUSED = (0, 2, LAYERS)  # the first layer's input, another one's, and what comes out
TREE = TokenTree(torch.arange(3, 11), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]), -torch.arange(8.0) / 2)

Load = Callable[..., PreTrainedModel]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(family: str, **changes: object) -> PreTrainedModel:
        sizes = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=LAYERS)
        make_model(family, **sizes, **changes).bfloat16().save_pretrained(tmp_path / "source")
        make_tokenizer().save_pretrained(tmp_path / "source")
        convert(open_source(str(tmp_path / "source")), tmp_path / "packed", Options(4, 32))
        return load_pack(tmp_path / "packed")

    return load


def run(host: HostedModel) -> tuple[list[StageOutput], TreeCache]:
    """A prompt, a tree behind it of which a path stays, and one token more."""
    cache = host.new_cache(40)
    outputs = [host.run(Stage.prefill(torch.arange(2, 2 + PROMPT)), cache, FUSED)]
    outputs.append(host.run(Stage.verify(TREE, PROMPT), cache, FUSED))
    cache.keep(PROMPT, [0, 2, 5, 7])
    outputs.append(host.run(Stage.verify(TokenTree.of_root(5), PROMPT + 4), cache, FUSED))
    return outputs, cache


@pytest.mark.parametrize("family", ["granitemoe", "olmoe", "qwen3_moe"])
def test_one_call_gives_the_bits_choices_and_bytes_of_a_call_for_each_half_layer(family: str, load: Load) -> None:
    whole = HostedModel(load(family))
    assert whole.native is not None
    ours, our_cache = run(whole)
    halves = HostedModel(whole.model)
    halves.native = None
    theirs, their_cache = run(halves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert a.features is not None and b.features is not None and torch.equal(a.features, b.features)
        assert a.experts_loaded == b.experts_loaded == sum(plan.routing.count for plan in a.plans)
        for plan, exact, other in zip(a.plans, a.exact, b.plans, strict=True):
            assert plan.layer == other.layer and plan.routing is exact
            assert torch.equal(plan.routing.experts, other.routing.experts)
            assert torch.equal(plan.routing.weights, other.routing.weights)
    assert whole.ledger == halves.ledger
    for mine, other_layer in zip(our_cache.tree_layers, their_cache.tree_layers, strict=True):
        for part in ("keys", "values"):
            assert torch.equal(*(getattr(x, part)[:, :, : our_cache.length] for x in (mine, other_layer)))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, load: Load) -> None:
    host, before = HostedModel(load("granitemoe")), native.get_threads()
    results = []
    for count in (1, threads):
        native.set_threads(count)
        results.append([output.logits for output in run(host)[0]])
    native.set_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", dict(kv_lora_rank=32, v_head_dim=16)),
        ("qwen2_moe", dict(shared_expert_intermediate_size=64)),
        ("qwen3_moe", dict(mlp_only_layers=[0])),
    ],
    ids=["latent attention", "shared experts", "a dense layer"],
)
def test_a_model_of_which_a_part_is_not_native_runs_layer_by_layer(family: str, changes: dict[str, object], load: Load) -> None:
    host = HostedModel(load(family, **changes))
    assert host.native is None
    assert all(len(output.plans) == len(host.blocks) for output in run(host)[0])


def test_a_model_that_does_something_else_around_its_layers_runs_layer_by_layer(load: Load) -> None:
    model = load("granitemoe")
    assert native_model(model) is not None
    model.base_model.embedding_multiplier *= 2
    model.config.logits_scaling *= 3
    assert native_model(model) is not None  # read from the model, and tried
    model.register_forward_hook(lambda _, __, output: (output.logits.tanh_(), None)[1])
    assert native_model(model) is None


def test_policies_take_turns_on_one_cache(load: Load) -> None:
    host = HostedModel(load("olmoe"), PRESETS["edgexpert"])
    cache = host.new_cache(40)
    host.run(Stage.prefill(torch.arange(2, 2 + PROMPT), importance=torch.full((PROMPT,), 2.0)), cache)  # all are major
    host.set_policy(PRESETS["exact"])
    mixed = host.run(Stage.verify(TREE, PROMPT), cache).logits
    torch.testing.assert_close(mixed, run(host)[0][1].logits, rtol=1e-4, atol=1e-4)


def test_a_stage_is_left_to_the_router_where_its_policy_does_not_act(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostedModel(load("olmoe"), PRESETS["pruned"])  # acts on trees alone
    assert host.native is not None
    seen: list[int] = []
    one_call = host.native.run
    monkeypatch.setattr(host.native, "run", lambda tokens, *args: (seen.append(len(tokens)), one_call(tokens, *args))[1])
    run(host)
    assert seen == [PROMPT]

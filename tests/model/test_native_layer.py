"""Decoder layers whose attention half is one native call: which are recognised, and that they compute what the library's do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.conversion.convert import convert
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.opening import open_source
from edgexpert.core.stage import Stage, TokenTree
from edgexpert.kernels import native
from edgexpert.model import packed
from edgexpert.model.blocks import find_blocks
from edgexpert.model.cache import TreeCache
from edgexpert.model.host import HostedModel
from edgexpert.model.native_layer import NativeLayer, use_native_layers
from edgexpert.policy import PRESETS, Techniques
from tests.conftest import make_model, make_tokenizer

pytestmark = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")

LAYERS = 2
KNOWN: dict[str, dict[str, object]] = {
    "granitemoe": {},  # a residual multiplier
    "olmoe": dict(clip_qkv=0.2),  # norms over all heads together
    "qwen3_moe": dict(attention_bias=True),  # norms of each head
}

Load = Callable[..., tuple[PreTrainedModel, PreTrainedModel]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """A packed checkpoint twice: with native layers where they are recognised, and with the library's alone."""

    def load(family: str, **changes: object) -> tuple[PreTrainedModel, PreTrainedModel]:
        sizes = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=LAYERS)
        model = make_model(family, **sizes, **changes)
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # as initialised they would do nothing
        model.bfloat16().save_pretrained(tmp_path / "source")
        make_tokenizer().save_pretrained(tmp_path / "source")
        convert(open_source(str(tmp_path / "source")), tmp_path / "packed", PackOptions(8, 32))
        ours = packed.load_pack(tmp_path / "packed")
        monkeypatch.setattr(packed, "use_native_layers", lambda model, blocks: 0)
        return ours, packed.load_pack(tmp_path / "packed")

    return load


def logits(model: PreTrainedModel, policy: Techniques | None = None) -> Tensor:
    """Of a text, and of a tree behind it."""
    host = HostedModel(model)
    cache, policy = host.new_cache(40), host.resolve(policy or PRESETS["exact"])
    text = host.run(Stage.prefill(torch.arange(2, 22), importance=torch.ones(20)), cache, policy).logits
    tree = TokenTree(torch.arange(3, 11), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]), -torch.arange(8.0) / 2)
    return torch.cat([text, host.run(Stage.verify(tree, cache.length), cache, policy).logits])


@pytest.mark.parametrize("family", KNOWN)
def test_known_layers_are_replaced_and_give_the_librarys_logits(family: str, load: Load) -> None:
    ours, library = load(family, **KNOWN[family])
    assert [type(layer.forward) for layer in ours.base_model.layers] == [NativeLayer] * LAYERS
    torch.testing.assert_close(logits(ours), logits(library), rtol=1e-4, atol=1e-4)
    assert use_native_layers(library, find_blocks(library)) == LAYERS


def test_a_clamp_that_is_left_out_would_show(load: Load) -> None:
    ours, library = load("olmoe", clip_qkv=0.2)
    for layer in library.base_model.layers:
        layer.self_attn.config.clip_qkv = None
    assert (logits(ours) - logits(library)).abs().max() > 0.1


def test_latent_attention_is_not_recognised_and_runs_as_the_library_has_it(load: Load) -> None:
    ours, library = load("deepseek_v2", kv_lora_rank=32, v_head_dim=16)
    assert use_native_layers(library, find_blocks(library)) == 0
    assert torch.equal(logits(ours), logits(library))


def test_a_layer_that_computes_something_else_is_not_replaced(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    _, library = load("qwen3_moe")
    attend = type(library.base_model.layers[1].self_attn).forward

    def doubled(self: torch.nn.Module, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        out, *rest = attend(self, *args, **kwargs)
        return (out * (2 if self.layer_idx == 1 else 1), *rest)

    monkeypatch.setattr(type(library.base_model.layers[1].self_attn), "forward", doubled)
    assert use_native_layers(library, find_blocks(library)) == 1


def test_a_layer_that_adds_something_to_its_halves_is_not_replaced(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    _, library = load("qwen3_moe")
    kind = type(library.base_model.layers[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.5)
    assert use_native_layers(library, find_blocks(library)) == 0


def test_experts_with_something_beside_them_stay_the_librarys(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    _, library = load("qwen3_moe")
    expected = logits(library)
    kind = type(library.base_model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) + 0.5 * x)
    changed = logits(library)
    assert not torch.allclose(changed, expected, rtol=0.1)
    assert use_native_layers(library, find_blocks(library)) == LAYERS  # their attention
    assert all(layer.forward.experts is None for layer in library.base_model.layers)
    torch.testing.assert_close(logits(library), changed, rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_told_more_than_it_was_tried_with_is_the_librarys(load: Load) -> None:
    ours, _ = load("qwen3_moe")
    layer, x = ours.base_model.layers[0].forward, torch.randn(1, 3, 64)
    told: list[dict[str, object]] = []
    layer.library = lambda hidden_states, **kwargs: (told.append(kwargs), hidden_states)[1]
    cache = TreeCache(LAYERS, 8)
    rotary = ours.base_model.rotary_emb(x, position_ids=torch.arange(3)[None])
    for more in (dict(per_layer_input=x), dict(position_embeddings=None)):
        assert layer(x, **{"attention_mask": None, "cache": cache, "position_embeddings": rotary, **more}) is x
    assert len(told) == 2 and cache.length == 0
    assert layer(x, attention_mask=None, cache=cache, position_embeddings=rotary) is not x and cache.length == 3


def test_attention_that_a_policy_watches_is_the_librarys(load: Load) -> None:
    ours, library = load("olmoe")
    policy = replace(PRESETS["coalesced"], token_weight="attention")
    torch.testing.assert_close(logits(ours, policy), logits(library, policy), rtol=1e-4, atol=1e-4)
    layer = ours.base_model.layers[0].forward
    layer.library = None  # the next text is nobody's to watch, and the native layer's again
    logits(ours)

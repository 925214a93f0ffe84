"""The native layer of a draft computes what the modules compute, whatever the draft's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgexpert.core.stage import TokenTree
from edgexpert.kernels import native
from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model
from edgexpert.speculation.eagle3_draft import Eagle3Draft
from edgexpert.speculation.eagle3_step import DraftCache, ModuleStep, NativeStep, Step, step_of
from edgexpert.speculation.loading import pack_draft
from edgexpert.weights.rounding import quantise

needs_kernels = pytest.mark.skipif(native.path() == "torch", reason="no native kernels here")

SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=60,
             draft_vocab_size=40, target_hidden_size=32, fused_layers=(2, 4, 5), max_position_embeddings=64)
FORMS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"attention_bias": True},
    {"draft_vocab_size": 60},
    {"num_key_value_heads": 4, "head_dim": 24, "rms_norm_eps": 1e-3},
    {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 16}},
]


def packed_model(bits: int = 16, **form: Any) -> Eagle3Model:
    torch.manual_seed(0)
    model = Eagle3Model(Eagle3Config(**{**SIZES, **form}))
    for name, weight in model.named_parameters():  # weights of 1 would hide a norm that is left out
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    if model.d2t is not None:
        model.set_vocabulary(torch.randperm(60)[:40].sort().values)
    pack_draft(model, quantise(torch.zeros(32, 32), bits, 32))
    return model


def drafts(model: Eagle3Model) -> tuple[Eagle3Draft, Eagle3Draft]:
    """Natively, and in modules."""
    ours, theirs = Eagle3Draft(model), Eagle3Draft(model)
    assert ours.is_native
    theirs._run = ModuleStep(model)
    return ours, theirs


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(60, (n,), generator=generator), torch.randn(n, 3 * 32, generator=generator)


def assert_same(ours: TokenTree, theirs: TokenTree) -> None:
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.parents, theirs.parents)
    torch.testing.assert_close(ours.path_log_prob, theirs.path_log_prob, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("form", FORMS, ids=lambda form: ", ".join(form) or "plain")
def test_trees_are_those_of_the_modules_for_every_form_of_draft(form: dict[str, Any]) -> None:
    """With 16 bits, so that nothing but the order of sums differs. The texts go beyond the trained length."""
    ours, theirs = (draft.start() for draft in drafts(packed_model(**form)))
    tokens, features = inputs(80)
    for begin, end in ((0, 50), (50, 53), (53, 80)):
        for draft in (ours, theirs):
            draft.observe(tokens[begin:end], features[begin:end])
        assert_same(*(draft.propose(7, TreeShape(size=24, depth=4, top_k=5)) for draft in (ours, theirs)))
    assert ours.bytes_read == theirs.bytes_read


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_states_are_those_of_the_modules_within_the_rounding_of_activations(bits: int) -> None:
    model = packed_model(bits)
    tokens, features = inputs(12)
    mask = torch.ones(12, 17, dtype=torch.bool).tril(5)
    mask[:, 2] = False
    states, caches = [], []
    for step in (NativeStep(model), ModuleStep(model)):
        cache = DraftCache(model.config, features)
        with torch.no_grad():
            hidden = model.fuse(features)
            step(tokens[:5], hidden[:5], torch.arange(5), cache, None)
            states.append(step(tokens, hidden, torch.arange(5, 17), cache, mask))
        caches.append(cache)
    close = 0.01 * float(states[1].abs().max())  # an activation at the edge of two integers may take either
    torch.testing.assert_close(*states, rtol=0, atol=close)
    for name in ("keys", "values"):
        torch.testing.assert_close(*(getattr(cache, name)[:, :17] for cache in caches), rtol=0, atol=close)


@needs_kernels
def test_a_text_may_begin_like_another() -> None:
    first, fresh = (draft.start() for draft in drafts(packed_model()))
    tokens, features = inputs(30)
    shape = TreeShape(size=12, depth=3, top_k=4)
    first.observe(tokens, features)
    first.propose(9, shape)
    ours = first.fork(11)
    other = torch.cat([tokens[:12], torch.tensor([3, 4])])  # the token behind the eleven comes again
    seen = torch.cat([features[:11], features[:3] + 1])
    ours.observe(other[11:], seen[11:])
    fresh.observe(other, seen)
    assert_same(ours.propose(7, shape), fresh.propose(7, shape))


@needs_kernels
def test_a_candidate_gives_the_same_bits_alone_and_in_a_tree() -> None:
    model = packed_model(4)
    tokens, features = inputs(9)
    step, (one, many) = NativeStep(model), (DraftCache(model.config, features) for _ in range(2))
    with torch.no_grad():
        hidden = model.fuse(features)
        for cache in (one, many):
            step(tokens[:4], hidden[:4], torch.arange(4), cache, None)
        mask = torch.cat([torch.ones(5, 4, dtype=torch.bool), torch.eye(5, dtype=torch.bool)], 1)
        together = step(tokens[4:], hidden[4:], torch.full((5,), 4), many, mask)
        alone = step(tokens[6:7], hidden[6:7], torch.tensor([4]), one, None)
    assert torch.equal(together[2:3], alone)


@pytest.mark.parametrize("what", ["float weights", "no kernels"])
def test_where_the_native_layer_cannot_run_the_modules_do(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "no kernels":
        model = packed_model(4)
        monkeypatch.setattr(native, "path", lambda: "torch")
    else:
        model = Eagle3Model(Eagle3Config(**SIZES))
    assert not Eagle3Draft(model).is_native
    step: Step = step_of(model)
    tokens, features = inputs(3)
    with torch.no_grad():
        assert step(tokens, model.fuse(features), torch.arange(3), DraftCache(model.config, features), None).shape == (3, 64)


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    cache = DraftCache(Eagle3Config(**SIZES), torch.empty(0))
    for n in (1, 3, 1, 40):
        start = cache.append(n)
        cache.keys[:, start : cache.length] = torch.arange(start, cache.length, dtype=torch.float32)[:, None]
        cache.values[:, start : cache.length] = -cache.keys[:, start : cache.length]
    assert cache.length == 45
    for states, sign in ((cache.keys, 1), (cache.values, -1)):
        assert torch.equal(states[1, :45, 3], sign * torch.arange(45.0))

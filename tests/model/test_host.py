"""With everything off, a hosted model is the library's model, bit for bit; trees see what a fresh prefill would see."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from edgexpert.core.stage import Stage, TokenTree
from edgexpert.model.host import HostedModel
from tests.conftest import make_model


def library_greedy(model: PreTrainedModel, ids: list[int], new: int) -> tuple[list[int], list[torch.Tensor]]:
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )
    return out.sequences[0, len(ids) :].tolist(), [logits[0] for logits in out.logits]


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    model.set_experts_implementation("eager")  # the library's grouped product has no float64
    return model.double()


PROMPT = [5, 17, 99, 3, 42, 7, 7, 64, 23, 120, 11, 90]


def test_prefill_and_plain_decoding_equal_the_library_bit_for_bit(model: PreTrainedModel) -> None:
    tokens, logits = library_greedy(model, PROMPT, 12)
    host = HostedModel(model)
    cache = host.new_cache(64)
    got = [host.run(Stage.prefill(torch.tensor(PROMPT)), cache).logits[-1]]
    for token in tokens[:-1]:
        got.append(host.run(Stage.verify(TokenTree.of_root(token), cache.length), cache).logits[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, logits, strict=True))


def test_a_tree_gives_every_node_the_logits_of_its_own_path(model: PreTrainedModel) -> None:
    host = HostedModel(in_double(model))
    tree = TokenTree(torch.tensor([8, 3, 60, 9, 77, 2, 5]), torch.tensor([-1, 0, 0, 1, 1, 2, 3]), torch.zeros(7))
    cache = host.new_cache(64)
    host.run(Stage.prefill(torch.tensor(PROMPT)), cache)
    logits = host.run(Stage.verify(tree, cache.length), cache).logits
    for node in range(len(tree)):
        path = tree.tokens[tree.mask[node]].tolist()
        fresh = host.run(Stage.prefill(torch.tensor(PROMPT + path)), host.new_cache(64)).logits[-1]
        torch.testing.assert_close(logits[node], fresh, atol=1e-5, rtol=1e-5)


def test_the_accepted_path_in_the_cache_equals_a_fresh_prefill(model: PreTrainedModel) -> None:
    host = HostedModel(in_double(model))
    tree = TokenTree(torch.tensor([8, 3, 60, 9, 77, 2, 5]), torch.tensor([-1, 0, 0, 1, 1, 2, 5]), torch.zeros(7))
    cache, fresh = host.new_cache(64), host.new_cache(64)
    host.run(Stage.prefill(torch.tensor(PROMPT)), cache)
    host.run(Stage.verify(tree, cache.length), cache)
    cache.keep(len(PROMPT), [0, 2, 5, 6])
    host.run(Stage.prefill(torch.tensor([*PROMPT, 8, 60, 2, 5])), fresh)
    assert cache.length == fresh.length == len(PROMPT) + 4
    for ours, theirs in zip(cache.tree_layers, fresh.tree_layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            torch.testing.assert_close(a[:, :, : cache.length], b[:, :, : cache.length], atol=1e-6, rtol=1e-6)


def test_every_router_form_is_recognised(model: PreTrainedModel) -> None:
    for block in HostedModel(model).blocks:
        assert block.form is not None
        x = torch.randn(20, block.router.weight.shape[1])
        logits, weights, experts = block.router(x)
        scores = block.form.scores(logits)
        torch.testing.assert_close(scores.weights(experts), weights.float())
        assert torch.equal(scores.choice.topk(2).indices.sort(-1).values, experts.sort(-1).values)


def test_detaching_gives_the_model_back() -> None:
    model = make_model("olmoe")
    ids = torch.tensor([PROMPT])
    before = model(ids).logits
    HostedModel(model).detach()
    assert torch.equal(model(ids).logits, before)

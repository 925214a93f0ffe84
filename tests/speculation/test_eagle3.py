"""The EAGLE-3 network and the draft built on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from edgexpert.speculation.draft import TreeShape
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model, Rotary
from edgexpert.speculation.eagle3_draft import Eagle3Draft

CONFIG = Eagle3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                      vocab_size=60, draft_vocab_size=20, target_hidden_size=32, fused_layers=(2, 4, 5))


def make_model(**changes: Any) -> Eagle3Model:
    torch.manual_seed(0)
    model = Eagle3Model(replace(CONFIG, **changes)).double()
    for name, weight in model.named_parameters():  # weights of 1 would hide a norm that is left out
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.4)
    if model.d2t is not None:
        model.set_vocabulary(torch.randperm(CONFIG.vocab_size)[:len(model.d2t)].sort().values)
    return model


def inputs(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (n,), generator=generator)
    return tokens, torch.randn(n, 3 * CONFIG.target_hidden_size, generator=generator).double(), torch.arange(n)


@pytest.mark.parametrize("flags", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True},
                                   {"norm_output": True}])
def test_one_token_worked_by_hand(flags: dict[str, bool]) -> None:
    """With one token attention is its value, so the layer can be written down from the paper's description."""
    model = make_model(**flags)
    weights = model.state_dict()
    tokens, features, positions = inputs(1)

    def normed(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name + ".weight"]

    if "norm_before_fc" in flags:
        features = normed(features, "input_norm")
    if "fc_norm" in flags:
        features = torch.cat([normed(part, f"fc_norm.{i}") for i, part in enumerate(features.split(32, -1))], -1)
    fused = features @ weights["fc.weight"].T
    embedding = normed(weights["embed_tokens.weight"][tokens], "midlayer.input_layernorm")
    residual = normed(fused, "midlayer.hidden_norm") if "norm_before_residual" in flags else fused
    both = torch.cat([embedding, normed(fused, "midlayer.hidden_norm")], -1)  # [1, 2H], the embedding first
    value = (both @ weights["midlayer.self_attn.v_proj.weight"].T).view(2, 16).repeat_interleave(2, 0).flatten()
    hidden = residual + value @ weights["midlayer.self_attn.o_proj.weight"].T
    x = normed(hidden, "midlayer.post_attention_layernorm")
    gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    hidden = hidden + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    last = normed(hidden, "norm")

    state, _ = model.step(tokens, model.fuse(inputs(1)[1]), positions)
    torch.testing.assert_close(state, last if "norm_output" in flags else hidden)
    torch.testing.assert_close(model.logits(state), last @ weights["lm_head.weight"].T)


def test_a_cached_past_changes_nothing() -> None:
    model = make_model()
    tokens, features, positions = inputs()
    hidden = model.fuse(features)
    whole, _ = model.step(tokens, hidden, positions)
    first, past = model.step(tokens[:4], hidden[:4], positions[:4])
    rest, _ = model.step(tokens[4:], hidden[4:], positions[4:], past)
    torch.testing.assert_close(torch.cat([first, rest]), whole)


def test_batches_give_what_single_texts_give() -> None:
    model = make_model()
    tokens, features, positions = inputs()
    one, _ = model.step(tokens, model.fuse(features), positions)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    many, (key, _) = model.step(torch.stack([tokens.flip(0), tokens]), model.fuse(torch.stack([features.flip(0), features])),
                                positions.expand(2, 6), None, mask.expand(2, 6, 6))
    torch.testing.assert_close(many[1], one)
    assert key.shape == (2, 2, 6, 16)


@pytest.mark.parametrize("scaling", [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
])
def test_rotary_embedding_is_that_of_transformers_beyond_the_trained_length_too(scaling: dict[str, Any] | None) -> None:
    rotary = Rotary(replace(CONFIG, rope_scaling=scaling))
    x, positions = torch.randn(4, 6, 16), torch.arange(3000, 3006)
    expected, _ = apply_rotary_pos_emb(x[None], x[None], *LlamaRotaryEmbedding(rotary.config)(x, positions[None]))
    torch.testing.assert_close(rotary(x, positions), expected[0], atol=1e-3, rtol=0)


def test_d2t_holds_offsets_not_ids() -> None:
    model = make_model()
    ids = torch.arange(40, 60)
    model.set_vocabulary(ids)
    assert model.d2t is not None
    assert model.d2t.tolist() == [40] * 20
    assert torch.equal(model.to_target(torch.arange(20)), ids)
    assert model.t2d is not None
    assert torch.equal(model.t2d.nonzero()[:, 0], ids)
    assert torch.equal(make_model(draft_vocab_size=60).to_target(ids), ids)


def greedy_chain(model: Eagle3Model, tokens: list[int], features: Tensor, root: int, depth: int) -> list[int]:
    """The chain drafted without any cache: every pass runs the whole text again."""
    follow, hidden, chain = [*tokens[1:], root], model.fuse(features), []
    for _ in range(depth):
        state, _ = model.step(torch.tensor(follow), hidden, torch.arange(len(follow)))
        chain.append(int(model.to_target(model.logits(state[-1]).argmax())))
        follow, hidden = [*follow, chain[-1]], torch.cat([hidden, state[-1:]])
    return chain


def test_a_chain_is_what_the_network_gives_without_a_cache() -> None:
    model = make_model()
    tokens, features, _ = inputs(8)
    draft = Eagle3Draft(model).start()
    draft.observe(tokens[:5], features[:5])
    first = draft.propose(int(tokens[5]), TreeShape(size=4, depth=4, top_k=1))
    assert first.tokens[1:].tolist() == greedy_chain(model, tokens[:5].tolist(), features[:5], int(tokens[5]), 4)
    # the next round must not see the states that the draft made up in this one
    draft.observe(tokens[5:8], features[5:8])
    second = draft.propose(9, TreeShape(size=4, depth=4, top_k=1))
    assert second.tokens[1:].tolist() == greedy_chain(model, tokens.tolist(), features, 9, 4)


def test_the_prompt_may_come_in_pieces() -> None:
    model, shape = make_model(), TreeShape(size=10, depth=3, top_k=3)
    tokens, features, _ = inputs()
    whole, pieces = Eagle3Draft(model).start(), Eagle3Draft(model).start()
    whole.observe(tokens, features)
    pieces.observe(tokens[:2], features[:2])
    pieces.observe(tokens[2:], features[2:])
    a, b = whole.propose(7, shape), pieces.propose(7, shape)
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.path_log_prob, b.path_log_prob)


@pytest.mark.parametrize("observed", [6, 3], ids=["from the cache alone", "with tokens that are pending"])
def test_a_fork_is_as_if_it_had_seen_no_more(observed: int) -> None:
    model, shape = make_model(), TreeShape(size=10, depth=3, top_k=3)
    tokens, features, _ = inputs()
    fresh, first = Eagle3Draft(model).start(), Eagle3Draft(model).start()
    first.observe(tokens[:observed], features[:observed])
    first.propose(int(tokens[observed]) if observed < 6 else 9, shape)
    first.observe(tokens[observed:], features[observed:])
    forked = first.fork(4)
    other = torch.cat([tokens[:5], torch.tensor([11, 12])])  # the token behind the four comes again
    seen = torch.cat([features[:4], features[:3] + 1])
    forked.observe(other[4:], seen[4:])
    fresh.observe(other, seen)
    a, b = fresh.propose(7, shape), forked.propose(7, shape)
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.path_log_prob, b.path_log_prob)


def test_every_branch_of_a_tree_has_the_probability_of_its_own_path() -> None:
    """A node that saw a sibling's branch, or took its parent's state from the wrong row, would differ."""
    model = make_model()
    tokens, features, _ = inputs()
    draft = Eagle3Draft(model).start()
    draft.observe(tokens, features)
    tree = draft.propose(7, TreeShape(size=30, depth=4, top_k=4))
    assert tree.depth.max() >= 3
    for node in range(1, len(tree)):
        path = tree.tokens[tree.mask[node]].tolist()
        follow, hidden, total = [*tokens[1:].tolist(), path[0]], model.fuse(features), 0.0
        for token in path[1:]:
            state, _ = model.step(torch.tensor(follow), hidden, torch.arange(len(follow)))
            ids = model.to_target(torch.arange(20)).tolist()
            total += float(model.logits(state[-1]).float().log_softmax(-1)[ids.index(token)].detach())
            follow, hidden = [*follow, token], torch.cat([hidden, state[-1:]])
        assert total == pytest.approx(float(tree.path_log_prob[node]), abs=1e-4)


def test_bytes_read_are_those_of_the_weights_used() -> None:
    model = make_model()
    tokens, features, _ = inputs()
    draft = Eagle3Draft(model).start()
    size = {name: sum(w.nbytes for w in part.parameters()) for name, part in model.named_children()}
    draft.observe(tokens, features)
    assert draft.bytes_read == 0, "without a tree nobody needs the fused features"
    draft.propose(7, TreeShape(size=1, depth=1, top_k=1))
    rows = len({*tokens[1:].tolist(), 7}) * 32 * 8
    once = size["midlayer"] + size["norm"] + size["lm_head"]
    assert draft.bytes_read == size["fc"] + rows + once
    draft.observe(tokens[:1], features[:1])
    before = draft.bytes_read
    draft.propose(7, TreeShape(size=3, depth=3, top_k=1))
    assert draft.bytes_read - before == size["fc"] + 3 * (once + 32 * 8)


def test_features_taken_in_token_by_token_give_the_tree_of_those_taken_in_at_once() -> None:
    model = make_model()
    tokens, features, _ = inputs()
    whole, pieces = Eagle3Draft(model).start(), Eagle3Draft(model).start()
    whole.observe(tokens, features)
    for token, feature in zip(tokens, features, strict=True):
        pieces.observe(token[None], feature[None])
    forked = pieces.fork(len(tokens))
    trees = [draft.propose(7, TreeShape(size=6, depth=3, top_k=2)) for draft in (whole, pieces, forked)]
    for tree in trees[1:]:
        assert torch.equal(tree.tokens, trees[0].tokens)
        assert torch.equal(tree.path_log_prob, trees[0].path_log_prob)
    assert whole.bytes_read == pieces.bytes_read

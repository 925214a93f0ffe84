"""A smaller causal model as draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from edgexpert.core.errors import UserError
from edgexpert.speculation.causal import CausalDraft, load_causal_draft
from edgexpert.speculation.draft import TreeShape
from tests.conftest import make_tokenizer

VOCAB = 120


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False)
    return LlamaForCausalLM(config).eval()


def log_prob(model: LlamaForCausalLM, text: list[int], token: int) -> float:
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([text])).logits[0, -1, :VOCAB].log_softmax(-1)[token])


def test_every_branch_has_the_probability_of_its_own_path_and_only_committed_tokens_stay(model: LlamaForCausalLM) -> None:
    draft, text = CausalDraft(model, VOCAB).start(), [5, 9, 2, 7]
    draft.observe(torch.tensor(text), None)
    for root, more in ((11, [11, 3]), (8, [8])):
        tree = draft.propose(root, TreeShape(size=12, depth=3, top_k=3))
        assert tree.candidates == 12
        assert draft._cache.get_seq_length() == len(text)
        for node in range(1, len(tree)):
            path = tree.tokens[tree.mask[node]].tolist()
            expected = sum(log_prob(model, [*text, *path[:i]], path[i]) for i in range(1, len(path)))
            assert expected == pytest.approx(float(tree.path_log_prob[node]), abs=1e-3)
        draft.observe(torch.tensor(more), None)
        text += more


@pytest.mark.parametrize("length", [2, 5])
def test_a_fork_is_as_if_it_had_seen_no_more(model: LlamaForCausalLM, length: int) -> None:
    fresh, first = CausalDraft(model, VOCAB).start(), CausalDraft(model, VOCAB).start()
    shape = TreeShape(size=12, depth=3, top_k=3)
    text = [5, 9, 2, 7, 1, 4]
    first.observe(torch.tensor(text[:4]), None)
    first.propose(3, shape)
    first.observe(torch.tensor(text[4:]), None)
    forked = first.fork(length)
    forked.observe(torch.tensor([8]), None)
    fresh.observe(torch.tensor([*text[:length], 8]), None)
    a, b = fresh.propose(6, shape), forked.propose(6, shape)
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.path_log_prob, b.path_log_prob)


def test_padding_beyond_the_target_vocabulary_is_never_drafted(model: LlamaForCausalLM) -> None:
    draft = CausalDraft(model, 10).start()
    draft.observe(torch.tensor([1]), None)
    assert draft.propose(2, TreeShape(size=64, depth=2, top_k=10)).tokens.max() < 10


def test_bytes_read_are_all_weights_once_a_pass_but_rows_alone_of_the_embedding(model: LlamaForCausalLM) -> None:
    draft = CausalDraft(model, VOCAB).start()
    draft.observe(torch.tensor([1]), None)
    draft.propose(2, TreeShape(size=2, depth=2, top_k=1))
    embedding = model.get_input_embeddings().weight.nbytes
    weights = sum(weight.nbytes for weight in model.parameters())
    assert draft.bytes_read == 2 * (weights - embedding) + 3 * 32 * 4


def test_a_draft_of_another_tokenizer_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert load_causal_draft(tmp_path, tokenizer, VOCAB, torch.float32).model.dtype == torch.float32
    other: PreTrainedTokenizerFast = make_tokenizer()
    other.add_tokens(["extra"])
    with pytest.raises(UserError, match="shares its tokenizer"):
        load_causal_draft(tmp_path, other, VOCAB, torch.float32)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no causal language model"):
        load_causal_draft(tmp_path, make_tokenizer(), VOCAB, torch.float32)

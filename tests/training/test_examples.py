"""Where training tokens come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from edgexpert.core.errors import UserError
from edgexpert.training.examples import (
    Continuations,
    chat_examples,
    chat_prompts,
    generate,
    text_examples,
    text_prompts,
)

DOCUMENTS = ["w1 w2 w3 w4 w5", "w6 w7"]


def write_chats(folder: Path, *chats: list[tuple[str, str]]) -> Path:
    file = folder / "chats.jsonl"
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]}) for chat in chats]
    file.write_text("\n".join(lines))
    return file


def test_text_is_packed_into_windows_with_a_start_token_before_each_document(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = text_examples(DOCUMENTS, tokenizer, length=4)
    assert [tokenizer.decode(window.tokens) for window in windows] == ["<|end|> w1 w2 w3", "w4 w5 <|end|> w6"]
    assert all(bool(window.loss_mask.all()) for window in windows)


def test_text_too_short_for_a_window_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="too short"):
        text_examples(DOCUMENTS, tokenizer, length=10)


def test_prompts_are_cut_at_even_spacing_from_the_beginning_of_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = text_prompts(DOCUMENTS, tokenizer, lengths=(2, 3), spacing=3, count=10)
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["<|end|> w1", "w3 w4 w5", "<|end|> w6"]
    assert [tokenizer.decode(prompt) for prompt in text_prompts(DOCUMENTS, tokenizer, (2, 3), 3, 1)] == ["<|end|> w1"]


def test_a_chat_is_learned_on_the_assistants_tokens_only(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write_chats(tmp_path, [("user", "w1"), ("assistant", "w2 w3"), ("user", "w4"), ("assistant", "w5")])
    first, second = chat_examples(file, tokenizer, length=50)
    assert tokenizer.decode(first.tokens[first.loss_mask]) == "w2 w3 <|end|>"
    assert tokenizer.decode(second.tokens[:9]) == "<|user|> w1 <|end|> <|bot|> w2 w3 <|end|> <|user|> w4"
    assert tokenizer.decode(second.tokens[second.loss_mask]) == "w5 <|end|>"


def test_chat_prompts_end_where_the_assistant_is_to_speak(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write_chats(tmp_path, [("user", "w1"), ("assistant", "w2")])
    assert [tokenizer.decode(prompt) for prompt in chat_prompts(file, tokenizer)] == ["<|user|> w1 <|end|> <|bot|>"]


def test_turns_that_start_too_late_are_no_prompts(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    file = write_chats(tmp_path, [("user", "w1"), ("assistant", "w2")], [("user", "w1 w2"), ("assistant", "w2")])
    assert [len(prompt) for prompt in chat_prompts(file, tokenizer, longest=4)] == [4]
    with pytest.raises(UserError, match="early enough"):
        chat_prompts(file, tokenizer, longest=3)


@pytest.mark.parametrize("line", ["not json", '{"text": "w1"}', '{"messages": [{"role": "user"}]}', "[1]"])
def test_a_broken_line_of_chats_is_named(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, line: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(line)
    with pytest.raises(UserError, match="line 1"):
        chat_prompts(file, tokenizer)


def test_greedy_continuations_are_the_targets_argmax(target: PreTrainedModel) -> None:
    prompts = torch.tensor([[5, 6, 7], [9, 8, 7]])
    for row in generate(target, prompts, new_tokens=4, temperature=0.0, end=None):
        with torch.no_grad():
            best = target(input_ids=row[None]).logits[0].argmax(-1)
        assert torch.equal(row[3:], best[2:-1])


def test_generation_defaults_of_the_checkpoint_are_left_out(target: PreTrainedModel) -> None:
    prompts = torch.tensor([[5, 6, 7]])
    plain = generate(target, prompts, new_tokens=12, temperature=0.0, end=None)
    target.generation_config.repetition_penalty = 50.0
    try:
        again = generate(target, prompts, new_tokens=12, temperature=0.0, end=None)
        assert target.generation_config.repetition_penalty == 50.0
    finally:
        target.generation_config.repetition_penalty = None
    assert torch.equal(plain[0], again[0])


def test_an_answer_stops_at_the_end_token_and_a_text_goes_on(target: PreTrainedModel) -> None:
    prompts = torch.tensor([[5, 6, 7]])
    text = generate(target, prompts, new_tokens=6, temperature=0.0, end=None)[0]
    end = int(text[4])
    answer = generate(target, prompts, new_tokens=6, temperature=0.0, end=[end])[0]
    first = 3 + text[3:].tolist().index(end)
    assert torch.equal(answer, text[: first + 1])
    assert len(text) == 9


def test_a_shard_is_the_same_at_every_call(source: Continuations, target: PreTrainedModel) -> None:
    first, again = source.shard(1, target), source.shard(1, target)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert sum(len(source.shard(i, target)) for i in range(len(source))) == len(source.prompts)


def test_answers_are_learned_and_questions_are_not(target: PreTrainedModel) -> None:
    example = Continuations([torch.tensor([5, 6, 7])], length=6, chat=True).shard(0, target)[0]
    assert example.loss_mask.tolist() == [False] * 3 + [True] * (len(example.tokens) - 3)


def test_a_prompt_as_long_as_the_sequence_is_refused() -> None:
    with pytest.raises(UserError, match="shorter prompts"):
        Continuations([torch.tensor([1, 2, 3])], length=3)

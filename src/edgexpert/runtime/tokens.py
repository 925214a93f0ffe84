"""Between text and token ids: prompts of every kind, where tokens stand in the text, where a text ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edgexpert.core.errors import UserError

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
"""Text, token ids, or chat messages."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, model: str) -> list[int]:
    """Token ids of a prompt; ``model`` is named where the prompt does not suit it."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("the prompt is empty; give some text to go on from")
        return list(tokenizer(prompt)["input_ids"])
    if not prompt:
        raise UserError("the prompt is empty; give at least one token or message")
    items: list[Any] = list(prompt)
    if isinstance(items[0], int):
        return items
    if tokenizer.chat_template is None:
        raise UserError(f"the model {model} has no chat template, so it cannot take messages; give plain text instead")
    return list(tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=True)["input_ids"])


def text_and_offsets(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a prompt and where each of its tokens stands in it; special tokens stand for no text."""
    special = set(tokenizer.all_special_ids)
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = iter(encoded["offset_mapping"])
    if encoded["input_ids"] != [token for token in ids if token not in special]:
        spans = iter(_spans_of_prefixes(tokenizer, [token for token in ids if token not in special]))
    offsets: list[tuple[int, int]] = []
    for token in ids:
        end = offsets[-1][1] if offsets else 0
        offsets.append((end, end) if token in special else next(spans))
    return text, offsets


def _spans_of_prefixes(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Spans of tokens that are not the ones their text would give, found by decoding longer and longer beginnings."""
    start = 0
    for n in range(1, len(ids) + 1):
        end = max(start, len(tokenizer.decode(list(ids[:n])).rstrip("\ufffd")))
        yield start, end
        start = end


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end a text."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ends = {*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id}
    return {int(end) for end in ends if end is not None}

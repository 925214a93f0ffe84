"""Between text and token ids: prompts of every kind, where tokens stand in the text, where a text ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edgexpert.core.errors import UserError

Prompt = str | Sequence[int] | Tensor | np.ndarray | Sequence[dict[str, str]]
"""Text, token ids, or chat messages."""


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts."""
    kinds = str | list | tuple | Tensor | np.ndarray
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], kinds)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, model: str, vocab_size: int) -> list[int]:
    """Token ids of a prompt; ``model`` is named where the prompt does not suit it.

    Raises:
        UserError: the prompt is of no known kind, has no tokens, or tokens that the model does not have.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("the prompt is empty; give some text to go on from")
        return _checked(tokenizer(prompt)["input_ids"], model, vocab_size)
    if isinstance(prompt, Tensor | np.ndarray):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise UserError(f"a prompt must be text, token ids or chat messages, not {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if not items:
        raise UserError("the prompt is empty; give at least one token or message")
    if isinstance(items[0], int):
        return _checked(items, model, vocab_size)
    if not all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in items):
        raise UserError('chat messages must be objects with a "role" and a "content", and token ids whole numbers')
    if tokenizer.chat_template is None:
        raise UserError(f"the model {model} has no chat template, so it cannot take messages; give plain text instead")
    try:
        encoded = tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=True)
    except (TemplateError, KeyError, TypeError) as error:
        raise UserError(f"the chat template of {model} does not take these messages ({error})") from error
    return _checked(encoded["input_ids"], model, vocab_size)


def _checked(ids: Sequence[int], model: str, vocab_size: int) -> list[int]:
    if not ids:
        raise UserError("the prompt has no token that the model knows; give some text to go on from")
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UserError(f"the model {model} has no token {token!r}; its ids are from 0 to {vocab_size - 1}")
    return list(ids)


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

"""From the encoder's tokens to the target's, through the characters that both stand for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Span = tuple[int, int]
"""First character of a token in the text, and the one after its last."""


def align(attention: Tensor, encoder_spans: Sequence[Span], target_spans: Sequence[Span], characters: int) -> Tensor:
    """Attention of each target token: the sum over the encoder tokens it overlaps, by the share of their characters.

    - Characters that the encoder skips, such as white space, carry nothing, and so a token of white space gets 0.
    - Target tokens that share one character (pieces of one UTF-8 sequence) each get all that it carries.
    - A target token without any character (an added begin-of-text) is nothing that the encoder could judge. It gets the
      largest value, for these are the attention sinks on which a causal model's later layers rely.

    Args:
        attention: float [S] of the encoder's tokens.
        characters: length of the text.

    Returns:
        float32 [T].
    """
    carried = torch.zeros(characters + 1, dtype=torch.float64)  # carried[c + 1]: what character c carries
    for value, (start, end) in zip(attention.tolist(), encoder_spans, strict=True):
        if end > start:
            carried[start + 1 : end + 1] += value / (end - start)
    until = carried.cumsum(0)
    first, after = torch.tensor(target_spans, dtype=torch.int64).view(-1, 2).unbind(1)
    aligned = until[after] - until[first]  # [T]
    if len(aligned) > 0:
        aligned[after == first] = aligned.max()
    return aligned.clamp(min=0).float()

"""Laws of carrying attention from one tokenisation of a text to another."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgexpert.encoder.alignment import Span, align

law = settings(max_examples=50, deadline=None)


@st.composite
def tilings(draw: st.DrawFn, characters: int) -> list[Span]:
    """A text cut into tokens without gaps."""
    cuts = sorted(draw(st.sets(st.integers(1, characters - 1)))) if characters > 1 else []
    return list(zip([0, *cuts], [*cuts, characters], strict=True))


@st.composite
def texts(draw: st.DrawFn) -> tuple[int, list[Span], torch.Tensor]:
    characters = draw(st.integers(1, 30))
    spans = draw(tilings(characters))
    return characters, spans, torch.tensor([draw(st.floats(0, 1)) for _ in spans])


@law
@given(texts(), st.data())
def test_no_attention_is_lost_or_made(text: tuple[int, list[Span], torch.Tensor], data: st.DataObject) -> None:
    characters, spans, attention = text
    aligned = align(attention, spans, data.draw(tilings(characters)), characters)
    torch.testing.assert_close(aligned.sum(), attention.sum(), atol=1e-5, rtol=1e-5)
    assert bool((aligned >= 0).all())


@law
@given(texts())
def test_the_same_tokens_keep_their_attention(text: tuple[int, list[Span], torch.Tensor]) -> None:
    characters, spans, attention = text
    torch.testing.assert_close(align(attention, spans, spans, characters), attention)


@law
@given(texts(), st.data())
def test_what_the_encoder_skips_carries_nothing(
    text: tuple[int, list[Span], torch.Tensor], data: st.DataObject
) -> None:
    characters, spans, attention = text
    skipped = data.draw(st.integers(0, len(spans) - 1))
    kept = [i for i in range(len(spans)) if i != skipped]
    aligned = align(attention[kept], [spans[i] for i in kept], spans, characters)
    assert float(aligned[skipped]) <= 1e-12
    torch.testing.assert_close(aligned[kept], attention[kept])


@law
@given(texts())
def test_a_token_without_characters_gets_the_most(text: tuple[int, list[Span], torch.Tensor]) -> None:
    characters, spans, attention = text
    aligned = align(attention, spans, [(0, 0), *spans], characters)
    torch.testing.assert_close(aligned[0], attention.max())


def test_a_token_shared_by_two_is_divided_by_characters() -> None:
    aligned = align(torch.tensor([0.9, 0.1]), [(0, 3), (3, 4)], [(0, 1), (1, 4)], 4)
    torch.testing.assert_close(aligned, torch.tensor([0.3, 0.7]))

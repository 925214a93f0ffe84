"""Sampling: transformers' filters, one random number a position, rules for bad values."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgexpert.core.errors import UserError
from edgexpert.speculation.sampling import Sampler, SamplingParams, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.5, -1.0])


@pytest.mark.parametrize(("name", "value"), [
    ("max_new_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
    ("top_p", 1.1), ("repetition_penalty", 0.0), ("seed", -1), ("stop", ("",)),
])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert Sampler(SamplingParams()).pick(LOGITS, [0], 1) == 1


def test_the_repetition_penalty_acts_on_greedy_decoding() -> None:
    assert Sampler(SamplingParams(repetition_penalty=2.0)).pick(LOGITS, [1], 1) == 2


def test_sampled_frequencies_are_the_probabilities() -> None:
    """A greedy pick in disguise, or ids in another order than the distribution's, would show here."""
    sampler = Sampler(SamplingParams(temperature=1.0))
    count = 3000
    picks = torch.tensor([sampler.pick(LOGITS, [0], position) for position in range(count)])
    got = picks.bincount(minlength=5) / count
    torch.testing.assert_close(got, LOGITS.softmax(0), atol=0.03, rtol=0)  # more than three standard deviations


def test_filters_leave_the_support_that_transformers_leaves() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    context = [3, 3, 7, 49]
    filters = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.7), TopKLogitsWarper(8),
                                   TopPLogitsWarper(0.8)])
    probabilities = filters(torch.tensor([context]), logits[None])[0].softmax(0)
    sampler = Sampler(SamplingParams(temperature=0.7, top_k=8, top_p=0.8, repetition_penalty=1.5))
    picked = {sampler.pick(logits, context, position) for position in range(500)}
    assert picked == set(probabilities.nonzero()[:, 0].tolist())


def test_a_pick_depends_on_seed_and_position_alone() -> None:
    assert uniform(1, 5) == uniform(1, 5)
    numbers = [uniform(seed, position) for seed in range(30) for position in range(30)]
    assert len(set(numbers)) == 900
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1


def test_half_precision_logits_are_sampled_like_their_float32_copy() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1)).bfloat16()
    sampler = Sampler(SamplingParams(temperature=1.0))
    for position in range(50):
        assert sampler.pick(logits, [0], position) == sampler.pick(logits.float(), [0], position)

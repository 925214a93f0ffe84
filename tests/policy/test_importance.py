from __future__ import annotations

import pytest
import torch

from edgexpert.policy.importance import Normalisation, Tier, importance_weights, token_tiers


@pytest.mark.parametrize(
    ("normalisation", "weights"),
    [("mean", [0.25, 0.5, 0.5, 2.75]), ("max", [1 / 11, 2 / 11, 2 / 11, 1.0]), ("quantile", [0.25, 0.75, 0.75, 1.0])],
)
def test_weights_by_normalisation(normalisation: Normalisation, weights: list[float]) -> None:
    attention = torch.tensor([0.01, 0.02, 0.02, 0.11])
    torch.testing.assert_close(importance_weights(attention, normalisation), torch.tensor(weights))
    torch.testing.assert_close(importance_weights(attention * 7, normalisation), torch.tensor(weights))


def test_tiers_begin_at_their_thresholds() -> None:
    tiers = token_tiers(torch.tensor([0.8, 0.79, 0.4, 0.39, 0.0, 3.0]), 0.8, 0.4)
    assert tiers.tolist() == [Tier.MAJOR, Tier.MINOR, Tier.MINOR, Tier.TRIVIAL, Tier.TRIVIAL, Tier.MAJOR]


def test_the_heaviest_token_is_major_where_none_reaches_the_threshold() -> None:
    assert token_tiers(torch.tensor([0.1, 0.3, 0.3, 0.2]), 0.8, 0.25).tolist() == [2, 0, 0, 2]


def test_a_prompt_without_any_attention_is_major_throughout() -> None:
    assert token_tiers(importance_weights(torch.zeros(3)), 0.8, 0.4).tolist() == [0, 0, 0]

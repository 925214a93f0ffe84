"""Verification: descend while the target's own pick is a child."""

from __future__ import annotations

import pytest
import torch

from edgexpert.core.stage import TokenTree
from edgexpert.speculation.sampling import Sampler, SamplingParams
from edgexpert.speculation.verify import SamplingVerifier

#      0:9
#    1:3   2:4
#    3:5   4:6
TREE = TokenTree(torch.tensor([9, 3, 4, 5, 6]), torch.tensor([-1, 0, 0, 1, 2]), torch.zeros(5))


def logits(*choices: int) -> torch.Tensor:
    """Logits [N, 10] whose likeliest tokens are ``choices``."""
    return 5 * torch.nn.functional.one_hot(torch.tensor(choices), 10).float()


def accept(tree: TokenTree, scores: torch.Tensor, params: SamplingParams, context: list[int]) -> tuple[list[int], int]:
    return SamplingVerifier(Sampler(params)).accept(tree, scores, context)


@pytest.mark.parametrize(("choices", "path", "token"), [
    ((7, 5, 6, 0, 0), [0], 7),  # the first pick is no child: it is emitted, nothing is accepted
    ((4, 5, 6, 0, 1), [0, 2, 4], 1),  # to a leaf, whose own pick comes as a bonus
    ((3, 6, 6, 0, 1), [0, 1], 6),  # 6 is a child of the other branch only
])
def test_greedy_paths(choices: tuple[int, ...], path: list[int], token: int) -> None:
    assert accept(TREE, logits(*choices), SamplingParams(), [1, 9]) == (path, token)


def test_the_repetition_penalty_sees_the_accepted_path() -> None:
    scores = logits(3, 5, 0, 3, 0)  # after 3 and 5 the target would say 3 again
    scores[3, 7] = 4.0
    assert accept(TREE, scores, SamplingParams(repetition_penalty=1.5), [9]) == ([0, 1, 3], 7)


def test_emitted_tokens_have_the_distribution_of_the_target() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    tree = TokenTree(torch.tensor([0, 1, 4]), torch.tensor([-1, 0, 0]), torch.zeros(3))
    emitted, count = torch.zeros(5), 1500
    for seed in range(count):
        path, token = accept(tree, probabilities.log().expand(3, 5), SamplingParams(temperature=1.0, seed=seed), [0])
        emitted[int(tree.tokens[path[1]]) if len(path) > 1 else token] += 1
    torch.testing.assert_close(emitted / count, probabilities, atol=0.045, rtol=0)  # more than three standard deviations


def test_the_context_must_end_in_the_root() -> None:
    with pytest.raises(AssertionError):
        accept(TREE, logits(0, 0, 0, 0, 0), SamplingParams(), [1, 2])

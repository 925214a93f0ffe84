from __future__ import annotations

import torch

from edgexpert.policy.coalescing import salient_channels


def test_section_iv_c_on_an_example_worked_out_by_hand() -> None:
    # Expert 0, depth 1, two tokens: channel 0 wanted by both, 1 by the strong one, 2 by the weak one, 3 by none.
    score = torch.tensor([[4.0, 6.0, 6.0, 9.0], [2.0, 2.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    expert, depth = torch.tensor([0, 0]), torch.tensor([1, 1])
    # S_s / S_c = 1, .75, .25, 0
    for ratio, loaded in ((0.0, [1, 1, 1, 0]), (0.25, [1, 1, 0, 0]), (0.7, [1, 1, 0, 0]), (0.75, [1, 0, 0, 0])):
        assert salient_channels(score, mask, expert, depth, 1, ratio).tolist() == [loaded]


def test_depths_are_judged_apart_and_what_they_load_adds_up() -> None:
    score = torch.ones(3, 2)
    mask = torch.tensor([[1, 0], [1, 0], [0, 1]]).bool()
    together = salient_channels(score, mask, torch.zeros(3).long(), torch.tensor([1, 1, 1]), 2, 0.5)
    apart = salient_channels(score, mask, torch.zeros(3).long(), torch.tensor([1, 1, 2]), 2, 0.5)
    assert together.tolist() == [[1, 0], [0, 0]]
    assert apart.tolist() == [[1, 1], [0, 0]]


def test_experts_are_judged_apart() -> None:
    score = torch.ones(2, 2)
    mask = torch.tensor([[1, 0], [0, 1]]).bool()
    loaded = salient_channels(score, mask, torch.tensor([1, 2]), torch.tensor([3, 3]), 3, 0.9)
    assert loaded.tolist() == [[0, 0], [1, 0], [0, 1]]

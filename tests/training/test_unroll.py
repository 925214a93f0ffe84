"""The training-time test against the draft as it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.speculation.eagle3 import Eagle3Model
from edgexpert.training.capture import Batch, Captured, logit_scale, teacher_logits
from edgexpert.training.draft import draft_config, initialise, new_draft
from edgexpert.training.recipes import DraftRecipe
from edgexpert.training.unroll import attend_unrolled, head_loss, learn_unrolled, unroll

STEPS = 4


@pytest.fixture
def draft(target: PreTrainedModel, captured: Captured) -> Eagle3Model:
    recipe = DraftRecipe(steps=1, num_attention_heads=4, num_key_value_heads=2)
    draft = new_draft(draft_config(target, recipe, captured), target)
    initialise(draft, target, 1.0, torch.arange(64), seed=0)
    return draft.double()


def test_the_diagonal_trick_equals_the_dense_mask() -> None:
    torch.manual_seed(0)
    n = 5
    q = torch.randn(2, 4, n, 8, dtype=torch.float64)
    steps = [(torch.randn(2, 2, n, 8, dtype=torch.float64), torch.randn(2, 2, n, 8, dtype=torch.float64)) for _ in range(3)]
    eye = torch.eye(n, dtype=torch.bool)
    mask = torch.cat([torch.ones(n, n, dtype=torch.bool).tril(), eye, eye], 1)
    keys, values = (torch.cat(part, 2) for part in zip(*steps, strict=True))
    dense = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
    torch.testing.assert_close(attend_unrolled(q, steps), dense)


@pytest.mark.parametrize("position", [0, 2, 5])
def test_a_training_step_equals_the_draft_running_along_the_true_tokens(draft: Eagle3Model, position: int) -> None:
    torch.manual_seed(0)
    n = 6
    tokens, features = torch.randint(0, 64, (1, n + STEPS + 1)), torch.randn(1, n, 96, dtype=torch.float64)
    trained = unroll(draft, tokens, features, STEPS)
    known = slice(0, position + 1)
    states, past = draft.step(tokens[0, 1 : position + 2], draft.fuse(features[0, known]), torch.arange(position + 1))
    for step, state in enumerate(trained):
        torch.testing.assert_close(state[0, position], states[-1])
        next_token = tokens[0, position + 2 + step : position + 3 + step]
        states, new = draft.step(next_token, states[-1:], torch.tensor([position + 1 + step]), past)
        past = torch.cat([past[0], new[0]], -2), torch.cat([past[1], new[1]], -2)


def test_the_drafts_own_guesses_are_never_fed_back(draft: Eagle3Model) -> None:
    torch.manual_seed(0)
    tokens, features = torch.randint(0, 64, (1, 5 + STEPS)), torch.randn(1, 5, 96, dtype=torch.float64)
    before = unroll(draft, tokens, features, STEPS)
    with torch.no_grad():
        draft.lm_head.weight.copy_(draft.lm_head.weight.roll(1, 0))  # every guess is another token now
    after = unroll(draft, tokens, features, STEPS)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def batch_of(captured: Captured) -> Batch:
    batch = captured.batch([0, 9], STEPS - 1)
    return Batch(batch.tokens, batch.loss_mask, batch.features.double(), batch.hidden.double(), batch.best)


def learned(draft: Eagle3Model, target: PreTrainedModel, batch: Batch) -> tuple[list[float], Tensor]:
    """Losses of a batch, and a gradient that they leave."""
    with torch.no_grad():
        teacher = teacher_logits(target, batch.hidden.float(), logit_scale(target)).double().softmax(-1)
    draft.zero_grad()
    depths = learn_unrolled(draft, head_loss(draft.logits), batch, teacher, STEPS, 0.8)
    gradient = draft.midlayer.self_attn.k_proj.weight.grad
    assert gradient is not None
    return [depth.loss for depth in depths], gradient.clone()


def test_losses_and_gradients_are_those_of_the_weighted_sum_written_out(draft: Eagle3Model, captured: Captured,
                                                                        target: PreTrainedModel) -> None:
    batch = batch_of(captured)
    losses, gradient = learned(draft, target, batch)
    with torch.no_grad():
        teacher = teacher_logits(target, batch.hidden.float(), logit_scale(target)).double().softmax(-1)
    n = batch.tokens.shape[1] - STEPS
    states = unroll(draft, batch.tokens, batch.features[:, :n], STEPS)
    draft.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for step, state in enumerate(states):
        terms = []
        for row in range(2):
            for t in range(n):
                at = t + 1 + step  # the last token that the draft saw: the target's state there tells what follows it
                if batch.loss_mask[row, at]:
                    terms.append(-(teacher[row, at] * draft.logits(state[row, t]).log_softmax(-1)).sum())
        mean = torch.stack(terms).mean()
        assert mean.item() == pytest.approx(losses[step], rel=1e-5)
        total = total + 0.8**step * mean
    total.backward()  # type: ignore[no-untyped-call]
    written_out = draft.midlayer.self_attn.k_proj.weight.grad
    assert written_out is not None
    torch.testing.assert_close(gradient, written_out, rtol=1e-5, atol=1e-8)


def test_tokens_outside_the_loss_mask_leave_no_gradient(draft: Eagle3Model, captured: Captured, target: PreTrainedModel
                                                        ) -> None:
    batch = batch_of(captured)
    losses, gradient = learned(draft, target, Batch(batch.tokens, torch.zeros_like(batch.loss_mask), batch.features,
                                                    batch.hidden, batch.best))
    assert losses == [0.0] * STEPS
    assert not gradient.any()

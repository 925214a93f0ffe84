"""Training-time test: the draft runs on its own states for several steps while it learns (EAGLE-3, section 3.2).

Step 0 pairs the token at position t + 1 with the target's feature at t and learns the target's distribution after it. Step
i pairs the *true* token at t + 1 + i with the draft's own state of step i - 1, as the i-th token of a drafted chain would.
There a query sees the keys of step 0 up to t, as committed text, and of the later steps its own position alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from edgexpert.speculation.eagle3 import Attention, Eagle3Model, KeyValue
from edgexpert.training.capture import Batch


class UnrolledAttention(Attention):
    """The draft's attention, which also takes a list as ``past``: keys and values of the steps so far, for training."""

    def forward(self, x: Tensor, positions: Tensor, past: Any, mask: Tensor | None) -> tuple[Tensor, KeyValue]:
        if not isinstance(past, list):
            return super().forward(x, positions, past, mask)
        q, k, v = (projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
                   for projection in (self.q_proj, self.k_proj, self.v_proj))  # [B, heads, n, head_dim]
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        if past:
            out = attend_unrolled(q, [*past, (k, v)])
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(-2, -3).flatten(-2)), (k, v)


def attend_unrolled(q: Tensor, steps: list[KeyValue]) -> Tensor:
    """Attention under the mask [causal | I | I ...], without the n x n scores of the diagonal blocks.

    Args:
        q: queries of the last step, [B, heads, n, d].
        steps: keys and values of every step, each [B, kv heads, n, d].

    Returns the attended values [B, heads, n, d].
    """
    q_heads = q.unflatten(1, (steps[0][0].shape[1], -1)) * q.shape[-1] ** -0.5  # [B, kv, group, n, d]
    (k, v), *own = [(k.unsqueeze(2), v.unsqueeze(2)) for k, v in steps]  # [B, kv, 1, n, d]
    n = q.shape[-2]
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    text = (q_heads @ k.transpose(-1, -2)).masked_fill(future, -torch.inf)  # [B, kv, group, n, n]
    scores = [text, *((q_heads * k_own).sum(-1, keepdim=True) for k_own, _ in own)]
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)  # [B, kv, group, n, n + steps - 1]
    out = weights[..., :n] @ v
    for index, (_, v_own) in enumerate(own):
        out = out + weights[..., n + index, None] * v_own
    return out.flatten(1, 2)


def unroll(draft: Eagle3Model, tokens: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """The states of every step.

    Args:
        tokens: int64 [B, n + steps].
        features: the target's, [B, n, 3 * H].

    Returns one [B, n, H] a step: at t, the state that predicts token t + 2 + step.
    """
    n = features.shape[1]
    positions = torch.arange(n, device=tokens.device)
    hidden = draft.fuse(features).to(draft.fc.weight.dtype)  # under autocast, states stay float32 between the products
    past: list[KeyValue] = []
    states: list[Tensor] = []
    for step in range(steps):
        hidden, key_value = draft.step(tokens[:, 1 + step : 1 + step + n], hidden, positions + step, cast(Any, past))
        past = [*past, key_value]
        states.append(hidden)
    return states


@dataclass(frozen=True)
class Depth:
    """How one step of a batch went: cross-entropy in nats, and how often draft and target agree on the next token."""

    loss: float
    accuracy: float


Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def head_loss(logits: Callable[[Tensor], Tensor]) -> Head:
    """The loss of a head: from states [B, n, H], the teacher's probabilities [B, n, V] and a mask [B, n] to the mean
    cross-entropy over the mask, and the head's most likely ids [B, n]."""

    def loss(states: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        z = logits(states)  # [B, n, V]
        entropy = F.cross_entropy(z.flatten(0, 1).float(), teacher.flatten(0, 1), reduction="none") * mask.flatten()
        return entropy.sum() / mask.sum().clamp(min=1), z.detach().topk(1).indices.squeeze(-1)  # topk: faster than argmax

    return loss


def learn(heads: list[Head], states: list[Tensor], teacher: Tensor, best: Tensor, mask: Tensor, draftable: Tensor,
          to_target: Callable[[Tensor], Tensor], decay: float) -> list[Depth]:
    """Backpropagates the losses of all steps, each weighted by ``decay ** step``.

    A step's logits are freed before the next step's are made: they are the bulk of the memory.

    Args:
        heads, states: one a step; the states [B, n, H].
        teacher: the target's probabilities after token t + 1, on the draft's vocabulary, [B, n + steps - 1, V].
        best: the target's most likely token there, int64 [B, n + steps - 1].
        mask: where text is learned, bool [B, n + steps - 1].
        draftable: where ``best`` is in the draft's vocabulary, bool [B, n + steps - 1].
        to_target: target ids of draft ids.
    """
    n = states[0].shape[1]
    depths: list[Depth] = []
    gradients: list[Tensor | None] = []
    for step, (head, state) in enumerate(zip(heads, states, strict=True)):
        here = slice(step, step + n)
        leaf = state.detach().requires_grad_()
        loss, guess = head(leaf, teacher[:, here], mask[:, here] & draftable[:, here])
        (decay**step * loss).backward()
        gradients.append(leaf.grad)
        agreed = int(((to_target(guess) == best[:, here]) & mask[:, here]).sum())
        depths.append(Depth(loss.item(), agreed / max(1, int(mask[:, here].sum()))))
    rooted = [(state, grad) for state, grad in zip(states, gradients, strict=True) if state.requires_grad]
    if rooted:
        torch.autograd.backward([state for state, _ in rooted], [grad for _, grad in rooted])
    return depths


def learn_unrolled(draft: Eagle3Model, head: Head, batch: Batch, teacher: Tensor, steps: int, decay: float) -> list[Depth]:
    """One training-time test on a batch, backpropagated.

    Args:
        batch: sequences [B, n + steps]: at least ``steps`` of padding, so that every step has n positions.
        teacher: the target's probabilities, renormalised on the draft's vocabulary, [B, n + steps, V].
    """
    n = batch.tokens.shape[1] - steps
    draftable = torch.ones_like(batch.loss_mask) if draft.t2d is None else draft.t2d[batch.best]
    states = unroll(draft, batch.tokens, batch.features[:, :n], steps)
    return learn([head] * steps, states, teacher[:, 1:], batch.best[:, 1:], batch.loss_mask[:, 1:], draftable[:, 1:],
                 draft.to_target, decay)

"""Reading a router's opinion: from its logits to scores that every policy can use.

Routers differ in their scoring (softmax or sigmoid, a bias for choosing, group limits, renormalised or scaled weights). The
form is not looked up by the model's name: it is the one that reproduces what the router itself returns on random inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from edgexpert.core.routing import Scores


@dataclass(frozen=True)
class RouterForm:
    """How one router scores experts.

    Attributes:
        sigmoid: weights come from a sigmoid of the logits, else from their softmax.
        bias: added to the weights for choosing only, [E].
        groups: (number of groups, groups that may be chosen, best experts that are summed into a group's score).
    """

    sigmoid: bool
    normalise: bool
    scale: float
    bias: Tensor | None
    groups: tuple[int, int, int] | None

    def scores(self, logits: Tensor) -> Scores:
        """Scores [T, E] of router logits [T, E]."""
        logits = logits.float()
        gate = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        choice = gate if self.bias is None else gate + self.bias
        if self.groups is not None:
            number, allowed, best = self.groups
            grouped = choice.view(len(choice), number, -1)  # [T, G, E/G]
            group_score = grouped.topk(best, dim=-1).values.sum(-1)
            forbidden = torch.ones_like(group_score, dtype=torch.bool)
            forbidden.scatter_(1, group_score.topk(allowed, dim=-1).indices, False)
            choice = grouped.masked_fill(forbidden.unsqueeze(-1), float("-inf")).view_as(choice)
        return Scores(choice, gate, self.normalise, self.scale)


@torch.no_grad()
def detect_form(router: nn.Module) -> RouterForm | None:
    """The form that gives this router's own choices and weights on random inputs; None when no known form does."""
    weight = router.weight
    assert isinstance(weight, Tensor)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, weight.shape[1], generator=generator).to(weight.dtype).to(weight.device)
    logits, weights, index = router.forward(x)  # not through the hooks of a running host
    bias = getattr(router, "e_score_correction_bias", None)
    scale = float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)
    number, allowed = getattr(router, "num_group", None) or 1, getattr(router, "topk_group", None) or 1
    groups: list[tuple[int, int, int] | None] = [None]
    if number > 1:
        groups += [(number, allowed, 1), (number, allowed, 2)]
    for sigmoid, normalise, factor, limit in product((False, True), (True, False), {scale, 1.0}, groups):
        form = RouterForm(sigmoid, normalise, factor, bias.float() if isinstance(bias, Tensor) else None, limit)
        scores = form.scores(logits)
        chosen = scores.choice.topk(index.shape[1], dim=-1).indices
        same_choice = torch.equal(chosen.sort(-1).values, index.sort(-1).values)
        if same_choice and torch.allclose(scores.weights(index), weights.float(), rtol=2e-2, atol=2e-3):
            return form
    return None

"""Reading a router's opinion: from its logits to scores that every policy can use.

Routers differ in their scoring (softmax or sigmoid, a bias for choosing, group limits, renormalised or scaled weights). The
form is not looked up by the model's name: it is the one that reproduces what the router itself returns on random inputs.
"""

from __future__ import annotations

import inspect
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


@dataclass(frozen=True, eq=False)
class Tried:
    """What a router gave on random inputs.

    Attributes:
        logits, weights, index: [T, E], [T, k] and int64 [T, k].
        biases: every vector of the block with an element for each expert, not all the same: one of them may be added for
            choosing.
        scales: every number of the router that may scale its weights.
        groups: groups of experts, and how many of them may be chosen.
    """

    logits: Tensor
    weights: Tensor
    index: Tensor
    biases: list[Tensor]
    scales: list[float]
    groups: tuple[int, int]


@torch.no_grad()
def try_router(block: nn.Module, router: nn.Module, experts: int) -> Tried | None:
    """Runs a router on random inputs, with the other arguments that its block has for it; None where it does not run alone.

    Not through the hooks of a running host.
    """
    weight = next((p for p in router.parameters() if p.dim() == 2 and len(p) == experts), None)
    if weight is None:
        return None
    x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype).to(weight.device)
    names = list(inspect.signature(router.forward).parameters)[1:]
    others = {name: getattr(block, name) for name in names if isinstance(getattr(block, name, None), Tensor)}
    for states in (x, x[None]):
        try:
            logits, weights, index = router.forward(states, **others)
            break
        except (TypeError, ValueError, RuntimeError, AttributeError):
            continue
    else:
        return None
    own = [value for name in ("routed_scaling_factor", "route_scale", "router_scaling_factor", "moe_routed_scaling_factor")
           if (value := getattr(router, name, None))]
    vectors = [*router.named_parameters(), *router.named_buffers(), *block.named_parameters(recurse=False),
               *block.named_buffers(recurse=False)]
    fitting = [vector.float().flatten() for _, vector in vectors if vector.numel() == experts == vector.shape[-1]]
    biases = [vector for vector in fitting if bool((vector != vector[0]).any())]
    number, allowed = (getattr(router, name, None) or 1 for name in ("num_group", "topk_group"))
    return Tried(logits, weights, index, biases, [float(value) for value in own], (int(number), int(allowed)))


def detect_form(tried: Tried | None) -> RouterForm | None:
    """The form that gives a router's own choices and weights; None when no known form does."""
    if tried is None:
        return None
    limits: list[tuple[int, int, int] | None] = [None]
    number, allowed = tried.groups
    if number > 1:
        limits += [(number, allowed, 1), (number, allowed, 2)]
    biases: list[Tensor | None] = [*tried.biases, None]
    for sigmoid, normalise, scale, bias, groups in product(
        (False, True), (True, False), {*tried.scales, 1.0}, biases, limits
    ):
        form = RouterForm(sigmoid, normalise, scale, bias, groups)
        scores = form.scores(tried.logits)
        chosen = scores.choice.topk(tried.index.shape[1], dim=-1).indices
        same_choice = torch.equal(chosen.sort(-1).values, tried.index.sort(-1).values)
        if same_choice and torch.allclose(scores.weights(tried.index), tried.weights.float(), rtol=2e-2, atol=2e-3):
            return form
    return None

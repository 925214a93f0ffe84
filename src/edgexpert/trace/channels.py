"""Channel inputs of a synthetic trace: drawn anew from its seed whenever they are wanted, so that the file need not hold them.

There is no published figure to fit. What is assumed: magnitudes are lognormal, so few channels hold most of a token's
importance; some channels are large for every token; candidates of one depth share another part (section III-B calls them
similar in context); the rest is each token's own.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from edgexpert.core.routing import Routing
from edgexpert.trace.schema import Facts

SPREAD = 1.2  # standard deviation of the logarithm: half of the channels hold 90 % of the sum
FIXED_SHARE, DEPTH_SHARE, TOKEN_SHARE = 0.3, 0.3, 0.4  # of that variance


def generator(*names: object) -> torch.Generator:
    """Random numbers of their own for every combination of names."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class SyntheticChannels:
    """Magnitudes of the inputs of one layer in one stage, for any routing.

    Args:
        depth: of each token, int64 [T].
    """

    def __init__(self, facts: Facts, stage: int, layer: int, depth: Tensor) -> None:
        self._facts, self._names, self._depth = facts, (facts.model, facts.seed, layer), depth
        self._stage = stage

    def gate_up(self, routing: Routing) -> Tensor:
        """One input for all experts of a token, float32 [P, H]."""
        hidden = self._facts.hidden
        fixed, of_depth, of_token = self._parts("gate_up", (hidden,), hidden)
        return self._magnitude(fixed, of_depth[self._depth], of_token)[routing.pairs[0]]

    def down(self, routing: Routing) -> Tensor:
        """Each expert has large channels of its own and treats the tokens of a depth alike, float32 [P, I]."""
        intermediate = self._facts.intermediate
        fixed, of_depth, of_token = self._parts("down", (self._facts.num_experts, intermediate), intermediate)
        token, expert = routing.pairs[0], routing.pair_expert
        return self._magnitude(fixed[expert], of_depth[self._depth[token], expert], of_token[token])

    def _parts(self, matrix: str, shape: tuple[int, ...], channels: int) -> tuple[Tensor, Tensor, Tensor]:
        fixed = torch.randn(shape, generator=generator(*self._names, matrix))
        own = generator(*self._names, matrix, self._stage)
        of_depth = torch.randn(int(self._depth.max()) + 1, *shape, generator=own)
        return fixed, of_depth, torch.randn(len(self._depth), channels, generator=own)

    def _magnitude(self, fixed: Tensor, of_depth: Tensor, of_token: Tensor) -> Tensor:
        mixed = FIXED_SHARE**0.5 * fixed + DEPTH_SHARE**0.5 * of_depth + TOKEN_SHARE**0.5 * of_token
        return (SPREAD * mixed).exp()

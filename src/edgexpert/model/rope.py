"""Rotary embeddings whose frequencies depend on how far a text reaches (dynamic and long-context scaling).

The library chooses them by the largest position of a call, and keeps them for the next. In a token tree each node has those of
a call that ends with it, as in plain decoding; and no text has those of another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from edgexpert.core.library import forget_frequencies, frequencies_depend_on_call
from edgexpert.model.attention import running_stage


class StageRotary:
    """Takes the place of a rotary embedding's ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.library = module, module.forward

    def __call__(self, x: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        stage = running_stage()
        if stage is None:
            return self.library(x, position_ids, **kwargs)
        if not stage.is_tree:
            forget_frequencies(self.module)
            return self.library(x, position_ids, **kwargs)
        levels, level_of = torch.unique(stage.positions, return_inverse=True)
        first = [int((level_of == level).nonzero()[0]) for level in range(len(levels))]
        made = []
        for node in first:
            forget_frequencies(self.module)
            made.append(self.library(x, position_ids[..., node : node + 1], **kwargs))
        if isinstance(made[0], Tensor):
            return torch.cat(made, dim=1)[:, level_of]
        return tuple(torch.cat(parts, dim=1)[:, level_of] for parts in zip(*made, strict=True))


def follow_stages(model: nn.Module) -> list[nn.Module]:
    """Makes the rotary embeddings of a model whose frequencies depend on the call follow its stages; returns them."""
    followed = [module for module in model.modules() if frequencies_depend_on_call(module)]
    for module in followed:
        module.forward = StageRotary(module)  # type: ignore[method-assign, assignment]
    return followed

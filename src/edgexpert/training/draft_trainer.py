"""Training a draft of any kind on captured states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from edgexpert.training.capture import Batch, Captured
from edgexpert.training.loop import Record, Trainer
from edgexpert.training.recipes import DraftRecipe
from edgexpert.training.unroll import Depth


class DraftTrainer(Trainer):
    """Learns from batches of captured sequences; what is frozen belongs to the target, and no checkpoint repeats it.

    Args:
        draft_loss: backpropagates the loss of one batch, padded by ``recipe.ttt - 1`` tokens.
        evaluate: acceptance length of the draft as it is.
        validate_every: steps between such measurements.
    """

    clip = 0.5

    def __init__(self, draft: nn.Module, draft_loss: Callable[[Batch], list[Depth]], recipe: DraftRecipe, captured: Captured,
                 evaluate: Callable[[], float] | None, validate_every: int) -> None:
        self.network, self._loss, self._captured, self._evaluate = draft, draft_loss, captured, evaluate
        self._recipe, self.recipe, self.steps = recipe, asdict(recipe), recipe.steps
        self.validate_every = validate_every
        self.optimizer = torch.optim.AdamW(self.trained, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def rate(self, step: int) -> float:
        return self._recipe.rate(step)

    def learn(self, step: int) -> Record:
        recipe = self._recipe
        batch = self._captured.batch(recipe.sequences(step, self._captured), recipe.ttt - 1).to(self.trained[0].device)
        depths = self._loss(batch)
        return {"loss": [depth.loss for depth in depths], "accuracy": [depth.accuracy for depth in depths]}

    def validate(self) -> Record:
        return {} if self._evaluate is None else {"acceptance_length": self._evaluate()}

    def note(self, record: Record) -> str:
        return f"loss {record['loss'][0]:.3f}  accuracy by depth {' '.join(f'{part:.0%}' for part in record['accuracy'])}"

    def weights(self) -> dict[str, Tensor]:
        frozen = self._frozen
        return {name: value for name, value in self.network.state_dict().items() if name not in frozen}

    def restore(self, shape: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.network.load_state_dict(weights | self._frozen)

    @property
    def _frozen(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.network.named_parameters() if not parameter.requires_grad}

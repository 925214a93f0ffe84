"""`edgexpert train draft --kind medusa`: Medusa heads from the same captured states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.output import writing
from edgexpert.speculation.medusa import MedusaConfig, MedusaHead, MedusaModel, save_medusa
from edgexpert.training.capture import Batch, Captured, logit_scale, teacher_logits
from edgexpert.training.draft_trainer import DraftTrainer
from edgexpert.training.loop import CHECKPOINT, train
from edgexpert.training.recipes import DraftRecipe
from edgexpert.training.unroll import Depth, head_loss, learn


@torch.no_grad()
def new_medusa(target: PreTrainedModel, heads: int, scale: float) -> MedusaModel:
    """Heads that all guess what the target's own head does: their blocks start as zero."""
    config = target.config.get_text_config()
    norm = target.get_decoder().norm
    model = MedusaModel(MedusaConfig(heads, config.hidden_size, config.vocab_size, config.num_hidden_layers,
                                     getattr(config, "rms_norm_eps", 1e-6)))
    model.norm.weight.copy_(norm.weight)
    model.norm.weight.requires_grad_(False)
    _check_norm(target, model)
    for head in model.heads:
        assert isinstance(head, MedusaHead)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight * scale)
    return model.to(target.device)


def _check_norm(target: PreTrainedModel, model: MedusaModel) -> None:
    seen: list[Tensor] = []
    handle = target.get_decoder().norm.register_forward_hook(lambda module, args, output: seen.extend((args[0], output)))
    try:
        target(input_ids=torch.arange(4, device=target.device)[None], use_cache=False)
    finally:
        handle.remove()
    before, after = (state.float().cpu() for state in seen)
    if not torch.allclose(model.norm(before), after, rtol=2e-2, atol=2e-2):
        raise UserError("the target's final norm is not an RMSNorm, which Medusa heads need; train an EAGLE-3 draft instead")


def train_medusa(
    target: PreTrainedModel,
    recipe: DraftRecipe,
    states: Path,
    out: Path,
    *,
    evaluate: Callable[[MedusaModel], float] | None = None,
    checkpoint_every: int = 200,
    stop_at: int | None = None,
) -> Path:
    """Trains ``recipe.ttt`` heads on the states that `capture` kept of ``target``; arguments are those of `train_draft`.

    Returns the folder of the finished heads (``out/draft``), or the checkpoint when stopped early.
    """
    if recipe.draft_vocab is not None:
        raise UserError("Medusa heads use the target's whole vocabulary; leave `draft_vocab` out")
    captured = Captured(states)
    captured.check(target)
    scale = logit_scale(target)
    model = new_medusa(target, recipe.ttt, scale)
    losses = [head_loss(head) for head in model.heads]

    def learn_batch(batch: Batch) -> list[Depth]:
        with torch.no_grad():
            teacher = teacher_logits(target, batch.hidden, scale).softmax(-1, dtype=torch.float32)
        n = batch.tokens.shape[1] - recipe.ttt
        state, mask = batch.hidden[:, :n], batch.loss_mask[:, 1:]
        return learn(losses, [state] * recipe.ttt, teacher[:, 1:], batch.best[:, 1:], mask, torch.ones_like(mask),
                     lambda ids: ids, recipe.step_decay)

    measure = None if evaluate is None else lambda: evaluate(model)
    trainer = DraftTrainer(model, learn_batch, recipe, captured, measure, checkpoint_every)
    finished = train(trainer, out, checkpoint_every=checkpoint_every, stop_at=stop_at)
    if not finished:
        return out / CHECKPOINT
    with writing(out):
        save_medusa(model, out / "draft")
    return out / "draft"

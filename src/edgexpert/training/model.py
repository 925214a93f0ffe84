"""`edgexpert train model`: a small MoE language model from scratch, in a standard transformers architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgexpert.core.errors import UserError
from edgexpert.core.output import writing
from edgexpert.model.loading import load_model
from edgexpert.training import corpus as corpora
from edgexpert.training.capture import require_weights
from edgexpert.training.experts import SORTED
from edgexpert.training.growth import split_experts
from edgexpert.training.loop import CHECKPOINT, Record, Trainer, train
from edgexpert.training.recipes import Recipe, learning_rate


def balance_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Switch-style load-balancing loss, the mean over layers; 1 when every expert gets the same share.

    The library's own concatenates the layers first, so that an expert dead in one layer hides behind a busy namesake.
    """
    if not router_logits:
        return torch.zeros(())  # a dense model
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)  # [T, E]
        experts = probabilities.shape[-1]
        chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        losses.append(experts / top_k * (chosen.mean(0) * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, stream: np.ndarray, length: int, windows: int = 32) -> float:
    """Mean next-token loss in nats over the first ``windows`` windows of a held-out stream."""
    model.eval()
    losses = []
    for start in range(0, min(len(stream) - length - 1, windows * length), length):
        ids = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))[None]
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits[0].float(), ids[0, 1:]).item())
    model.train()
    return float(np.mean(losses))


def _prepared(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """Puts a model into training mode and makes its optimiser."""
    model.set_experts_implementation(SORTED)
    model.train()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )


class ModelTrainer(Trainer):
    """Learns next tokens, with a load-balancing loss beside it; experts are split where a phase of the recipe says so."""

    network: PreTrainedModel
    record_every = 10

    def __init__(
        self, model: PreTrainedModel, recipe: Recipe, mixture: corpora.Mixture, held_out: Mapping[str, np.ndarray]
    ) -> None:
        self.network, self.optimizer = model, _prepared(model, recipe)
        self._recipe, self.recipe, self.steps = recipe, asdict(recipe), recipe.steps
        self._mixture, self._held_out = mixture, held_out

    def begin(self, step: int) -> None:
        width = self._recipe.phase_at(step).width
        if width is not None and self.network.config.moe_intermediate_size > width:
            self.network = split_experts(self.network, width)
            self.optimizer = _prepared(self.network, self._recipe)

    def rate(self, step: int) -> float:
        return learning_rate(self._recipe, step)

    def learn(self, step: int) -> Record:
        recipe, phase, config = self._recipe, self._recipe.phase_at(step), self.network.config
        ids = self._mixture.batch(step, recipe.seed, phase.shares, recipe.tokens_per_step // phase.length, phase.length)
        routed = len(config.mlp_only_layers) < config.num_hidden_layers
        outputs = self.network(input_ids=ids[:, :-1], use_cache=False, output_router_logits=routed)
        entropy = F.cross_entropy(outputs.logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        balance = balance_loss(outputs.router_logits or (), config.num_experts_per_tok)
        loss = entropy + phase.balance * balance
        with torch.autocast("cpu", enabled=False):
            loss.backward()
        return {"loss": entropy.item(), "balance": balance.item()}

    def validate(self) -> Record:
        return {f"held_out/{name}": held_out_loss(self.network, stream, self._recipe.longest)
                for name, stream in self._held_out.items()}

    def note(self, record: Record) -> str:
        return f"loss {record['loss']:.3f}  balance {record['balance']:.2f}"

    def shape(self) -> dict[str, Any]:
        return dict(self.network.config.to_diff_dict())

    def restore(self, shape: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.network = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
        self.network.load_state_dict(weights)
        self.optimizer = _prepared(self.network, self._recipe)


def train_model(
    recipe: Recipe,
    corpus: Path,
    out: Path,
    *,
    start: tuple[str, int] | None = None,
    checkpoint_every: int = 100,
    stop_at: int | None = None,
) -> Path:
    """Trains ``recipe`` on ``corpus``, resuming from ``out`` when it holds a checkpoint.

    Args:
        start: a model whose weights stand for those of the recipe after so many steps; its tokenizer is used, too.
        stop_at: stop after this many steps, with a checkpoint, as an interruption would.

    Returns the folder of the finished model (``out/model``), or of the checkpoint when stopped early.
    """
    if not corpus.is_dir():
        raise UserError(f"the corpus folder {corpus} does not exist; give the folder with the text files as `corpus`")
    out.mkdir(parents=True, exist_ok=True)
    started = load_model(start[0], dtype="float32") if start is not None else None
    if started is not None:
        require_weights(started.model)
    tokenizer, mixture, held_out = corpora.prepare(
        corpus, recipe.domains, recipe.config["vocab_size"], out, started.tokenizer if started is not None else None
    )
    torch.manual_seed(recipe.seed)
    model: PreTrainedModel = started.model if started is not None else Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **recipe.config, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=None
    ))  # fmt: skip
    trainer = ModelTrainer(model, recipe, mixture, held_out)
    if not train(trainer, out, first=start[1] if start is not None else 0, checkpoint_every=checkpoint_every, stop_at=stop_at):
        return out / CHECKPOINT
    with writing(out):
        trainer.network.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
    return out / "model"

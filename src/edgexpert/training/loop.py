"""The loop that trains a draft of any kind on captured states. Runs resume exactly: batches are a function of the step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from edgexpert.core.errors import UserError
from edgexpert.training.capture import Batch, Captured
from edgexpert.training.model import fast_bfloat16, keep_freed_memory, warm_cosine
from edgexpert.training.unroll import Depth


@dataclass(frozen=True)
class DraftRecipe:
    """Everything that determines a trained draft, target and captured states apart.

    Attributes:
        ttt: steps of the training-time test; for Medusa, the number of heads.
        learning_rate: peak of a cosine that ends at 5 % of it, after a linear warm-up of ``warmup`` steps.
        step_decay: step i weighs ``step_decay ** i`` (0.8 in the official code).
        draft_vocab: how many tokens the draft can propose; None for all of the target's.
        intermediate_size: None for three times the hidden size.
        num_attention_heads, num_key_value_heads: None for as many as the target's attention heads.
    """

    steps: int = 2000
    ttt: int = 7
    learning_rate: float = 1e-3
    warmup: int = 100
    tokens_per_batch: int = 4096
    step_decay: float = 0.8
    draft_vocab: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "ttt", "learning_rate", "tokens_per_batch", "step_decay"):
            if getattr(self, name) <= 0:
                raise UserError(f"`{name}` must be positive, not {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        return warm_cosine(step, self.steps, self.warmup, self.learning_rate, final=0.05)

    def sequences(self, step: int, captured: Captured) -> list[int]:
        """Which sequences one step learns: the next ones of an endless row of permutations."""
        size = max(1, self.tokens_per_batch // captured.longest)
        chosen = []
        for place in range(step * size, (step + 1) * size):
            epoch, index = divmod(place, len(captured))
            order = torch.randperm(len(captured), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
            chosen.append(int(order[index]))
        return chosen


def has_checkpoint(out: Path) -> bool:
    return (out / "checkpoint.pt").exists()


def fit(
    draft: nn.Module,
    learn: Callable[[Batch], list[Depth]],
    recipe: DraftRecipe,
    captured: Captured,
    out: Path,
    *,
    evaluate: Callable[[], float] | None,
    checkpoint_every: int,
    stop_at: int | None,
) -> bool:
    """Trains the parameters of ``draft`` that need gradients, resuming from ``out`` when it holds a checkpoint.

    Args:
        learn: backpropagates the loss of one batch, padded by ``recipe.ttt - 1`` tokens.
        evaluate: acceptance length of the draft as it is, measured with every checkpoint.
        stop_at: stop after this many steps, with a checkpoint, as an interruption would.

    Returns whether the recipe's last step is done. Losses of every step are kept in ``out/history.json``.
    """
    keep_freed_memory()
    out.mkdir(parents=True, exist_ok=True)
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    checkpoint, step, history = out / "checkpoint.pt", 0, []
    if has_checkpoint(out):
        saved = torch.load(checkpoint, weights_only=True, map_location=trained[0].device)
        if saved["recipe"] != asdict(recipe):
            raise UserError(f"the folder {out} holds a draft of another recipe; resume with the same options, or "
                            "give another folder")
        draft.load_state_dict(saved["draft"] | _frozen(draft))
        optimizer.load_state_dict(saved["optimizer"])
        step, history = saved["step"], saved["history"]
    assert all(bool(parameter.isfinite().all()) for parameter in draft.parameters()), "a weight was not initialised"

    def save() -> None:
        frozen = _frozen(draft)
        weights = {name: value for name, value in draft.state_dict().items() if name not in frozen}
        unfinished = checkpoint.with_suffix(".unfinished")
        torch.save({"draft": weights, "optimizer": optimizer.state_dict(), "step": step, "history": history,
                    "recipe": asdict(recipe)}, unfinished)
        os.replace(unfinished, checkpoint)
        (out / "history.json").write_text(json.dumps(history, indent=0))

    device, last = trained[0].device, min(recipe.steps, stop_at or recipe.steps)
    bfloat16 = device.type != "cpu" or fast_bfloat16()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[note]}"))
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=recipe.steps, completed=step, note="")
        while step < last:
            started = time.perf_counter()
            batch = captured.batch(recipe.sequences(step, captured), recipe.ttt - 1).to(device)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(step)
            with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                depths = learn(batch)
            norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            record: dict[str, Any] = {
                "step": step, "loss": [depth.loss for depth in depths], "accuracy": [depth.accuracy for depth in depths],
                "gradient": float(norm), "seconds": time.perf_counter() - started}
            history.append(record)
            if step % checkpoint_every == 0 or step == last:
                if evaluate is not None:
                    record["acceptance_length"] = evaluate()
                save()
            accuracy = " ".join(f"{depth.accuracy:.0%}" for depth in depths)
            progress.update(task, advance=1, note=f"loss {depths[0].loss:.3f}  accuracy by depth {accuracy}")
    return step == recipe.steps


def _frozen(draft: nn.Module) -> dict[str, torch.Tensor]:
    """Weights that belong to the target, so that no checkpoint repeats them."""
    return {name: parameter.data for name, parameter in draft.named_parameters() if not parameter.requires_grad}

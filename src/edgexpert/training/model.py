"""`edgexpert train model`: a small MoE language model from scratch, in a standard transformers architecture.

Runs resume exactly: batches are a function of the step, and a checkpoint holds weights, optimiser and step.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgexpert.core.errors import UserError
from edgexpert.model.loading import load_model
from edgexpert.training import corpus as corpora
from edgexpert.training.experts import SORTED
from edgexpert.training.growth import split_experts


@dataclass(frozen=True)
class Phase:
    """A stretch of training: how many steps, on which shares of the domains, with sequences of which length.

    Attributes:
        balance: weight of the load-balancing loss.
        peak: a phase with a peak begins a new warm-up and cosine of the learning rate, which lasts until the next such phase.
        width: the experts' width from here on: wider ones are split into two (`growth.py`) as the phase begins.
    """

    steps: int
    shares: Mapping[str, float]
    length: int
    balance: float = 0.004
    peak: float | None = None
    width: int | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained model, its corpus apart."""

    domains: Mapping[str, Sequence[str]]
    config: Mapping[str, Any]
    phases: Sequence[Phase]
    tokens_per_step: int = 4096
    warmup: int = 150
    final_rate: float = 0.05  # of the peak
    weight_decay: float = 0.1
    seed: int = 1

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequences; held-out windows have it throughout, so that their losses compare."""
        return max(phase.length for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.phases[-1]


LATER = {"simple": 0.45, "tales": 0.12, "books": 0.43}
STORIES = Recipe(
    domains={
        "simple": [
            "tinystories_sample.txt",
            "synthetic_fables_permissive.txt",
            "african_storybook_en.txt",
            "pratham_storyweaver_en.txt",
        ],
        "tales": ["fairytaleqa_stories.txt", "grimm_fairy_tales.txt", "aesop_for_children.txt"],
        "books": ["gutenberg_simple_1.txt", "gutenberg_simple_2.txt"],
    },
    config=dict(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        moe_intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    ),
    phases=[
        Phase(2100, {"simple": 0.5, "tales": 0.15, "books": 0.35}, 512, peak=2e-3),
        Phase(700, {"simple": 0.75, "tales": 0.15, "books": 0.1}, 1024),
        # Trained on with a weaker balance, so that one text may keep to fewer experts, as in models of many domains.
        Phase(400, {"simple": 0.65, "tales": 0.2, "books": 0.15}, 1024, balance=0.0005, peak=1e-3),
        # 64 experts of which a token takes 4 become 128 of which it takes 8, as in the larger Qwen3-MoE models.
        Phase(1300, LATER, 256, balance=0.001, peak=1.5e-3, width=64),
        Phase(600, LATER, 512, balance=0.001),
        Phase(100, LATER, 1024, balance=0.001),
    ],
)
DENSE = replace(
    STORIES,
    config={**STORIES.config, "mlp_only_layers": list(range(8)), "intermediate_size": 4 * 96},
    phases=STORIES.phases[:3],  # a dense layer has no experts to split
)
"""The dense twin: as many active parameters, the same batches and schedule; stopped early, it shows what the experts bring."""
LITTLE = replace(
    STORIES,
    config={
        **STORIES.config, "hidden_size": 128, "num_hidden_layers": 2, "mlp_only_layers": [0, 1], "intermediate_size": 384,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    phases=[Phase(500, {"simple": 0.7, "tales": 0.15, "books": 0.15}, 256, peak=3e-3)],
)
"""A small dense model with the same tokenizer, as the little one beside `stories` in benchmarks/frameworks.py."""
RECIPES = {"stories": STORIES, "stories-dense": DENSE, "stories-little": LITTLE}


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine to ``final_rate`` of the peak; anew from each phase that has a peak."""
    starts = np.cumsum([0, *(phase.steps for phase in recipe.phases)]).tolist()
    cycles = [(start, phase.peak) for start, phase in zip(starts, recipe.phases, strict=False) if phase.peak is not None]
    start, peak = next(cycle for cycle in reversed(cycles) if cycle[0] <= step)
    end = next((later for later, _ in cycles if later > start), recipe.steps)
    warmup = min(recipe.warmup, (end - start) // 10)
    return warm_cosine(step - start, end - start, warmup, peak, recipe.final_rate)


def warm_cosine(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """A linear warm-up to ``peak``, then a cosine that ends at ``final`` of it after ``steps`` steps."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


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


def keep_freed_memory() -> None:
    """Tells glibc to keep freed activations: giving them back and faulting them in again takes a third of a step."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except OSError:
        pass  # another C library


def fast_bfloat16() -> bool:
    """Whether this CPU has a unit for bfloat16 products; without one they take ten times as long as float32 ones."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16", False) or has.get("avx512_bf16", False))


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


@dataclass
class _State:
    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def _prepared(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """Puts a model into training mode and makes its optimiser."""
    model.config._experts_implementation = SORTED
    model.train()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )


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
    keep_freed_memory()
    started = load_model(start[0]) if start is not None else None
    tokenizer, mixture, held_out = corpora.prepare(
        corpus, recipe.domains, recipe.config["vocab_size"], out, started.tokenizer if started is not None else None
    )
    torch.manual_seed(recipe.seed)
    checkpoint = out / "checkpoint.pt"
    saved = torch.load(checkpoint, weights_only=True) if checkpoint.exists() else None
    if saved is not None:
        model: PreTrainedModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**saved["config"]))
        model.load_state_dict(saved["model"])
    elif started is not None:
        model = started.model
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
            **recipe.config, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=None
        ))  # fmt: skip
    optimizer = _prepared(model, recipe)
    state = _State(start[1] if start is not None else 0)
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        state = _State(**saved["state"])

    def save() -> None:
        unfinished = checkpoint.with_suffix(".unfinished")
        torch.save(
            {
                "config": model.config.to_diff_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "state": vars(state),
            },
            unfinished,
        )  # fmt: skip
        os.replace(unfinished, checkpoint)
        (out / "history.json").write_text(json.dumps(state.history, indent=0))

    def losses(ids: Tensor) -> tuple[Tensor, Tensor]:
        config = model.config
        routed = len(config.mlp_only_layers) < config.num_hidden_layers
        outputs = model(input_ids=ids[:, :-1], use_cache=False, output_router_logits=routed)
        entropy = F.cross_entropy(outputs.logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return entropy, balance_loss(outputs.router_logits or (), config.num_experts_per_tok)

    last = min(recipe.steps, stop_at or recipe.steps)
    with Progress(
        TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}")
    ) as progress:
        task = progress.add_task("training", total=recipe.steps, completed=state.step, note="")
        while state.step < last:
            began = time.perf_counter()
            phase = recipe.phase_at(state.step)
            if phase.width is not None and model.config.moe_intermediate_size > phase.width:
                model = split_experts(model, phase.width)
                optimizer = _prepared(model, recipe)
            rate = learning_rate(recipe, state.step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            sequences = recipe.tokens_per_step // phase.length
            ids = mixture.batch(state.step, recipe.seed, phase.shares, sequences, phase.length)
            with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16()):
                entropy, balance = losses(ids)
                loss = entropy + phase.balance * balance
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state.step += 1
            state.seconds += time.perf_counter() - began
            record = {"step": state.step, "loss": entropy.item(), "balance": balance.item(), "rate": rate,
                      "gradient": float(norm), "seconds": state.seconds}
            if state.step % 500 == 0 or state.step == last:
                for name, stream in held_out.items():
                    record[f"held_out/{name}"] = held_out_loss(model, stream, recipe.longest)
            if state.step % 10 == 0 or len(record) > 6:
                state.history.append(record)
            if state.step % checkpoint_every == 0 or state.step == last:
                save()
            progress.update(task, advance=1, note=f"loss {record['loss']:.3f}  balance {record['balance']:.2f}")
    if state.step < recipe.steps:
        return checkpoint
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return out / "model"

"""`edgexpert train draft`: an EAGLE-3 draft for any target, from its captured states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edgexpert.core.errors import UserError
from edgexpert.core.output import writing
from edgexpert.speculation.checkpoint import load_eagle3, save_eagle3
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model
from edgexpert.training.capture import Batch, Captured, logit_scale, teacher_logits
from edgexpert.training.corpus import documents, is_held_out
from edgexpert.training.draft_trainer import DraftTrainer
from edgexpert.training.examples import Continuations, text_prompts
from edgexpert.training.loop import CHECKPOINT, has_checkpoint, train
from edgexpert.training.recipes import STORIES, DraftRecipe
from edgexpert.training.unroll import Depth, UnrolledAttention, head_loss, learn_unrolled

STORIES_DRAFT = DraftRecipe(
    steps=1200, ttt=6, learning_rate=2e-3, warmup=60, tokens_per_batch=3072, intermediate_size=768, num_attention_heads=4)
RECIPES = {"stories": STORIES_DRAFT}


def stories_data(corpus: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[Continuations, list[Tensor]]:
    """What `STORIES_DRAFT` learns from: 3,072 texts of 256 tokens that ``stories`` goes on with, 0.6 million of their tokens
    its own, after beginnings and middles of the corpus's training documents. And prompts of documents that are held out."""
    counts = {"simple": 2304, "tales": 512, "books": 256}
    prompts: list[Tensor] = []
    for domain, count in counts.items():
        texts = (text for file in STORIES.domains[domain] for text in documents(corpus / file) if not is_held_out(text))
        few = itertools.islice(texts, 200) if domain == "books" else texts  # whole books: enough prompts in a few
        prompts += text_prompts(few, tokenizer, lengths=(16, 64, 128), spacing=256, count=count)
    kept_out = (text for file in STORIES.domains["simple"] for text in documents(corpus / file) if is_held_out(text))
    held_out = text_prompts(kept_out, tokenizer, lengths=(16, 64), spacing=256, count=8)
    return Continuations(prompts, length=256, per_shard=128), held_out


def draft_config(target: PreTrainedModel, recipe: DraftRecipe, captured: Captured) -> Eagle3Config:
    """Sizes of a draft for a target: its hidden size, attention heads and vocabulary, unless the recipe says otherwise."""
    config = target.config.get_text_config()
    hidden, vocabulary = config.hidden_size, config.vocab_size
    size = recipe.draft_vocab or vocabulary
    if size > vocabulary:
        raise UserError(f"a draft vocabulary of {size} is larger than the target's {vocabulary}; give at most that")
    heads = recipe.num_attention_heads or config.num_attention_heads
    keys = recipe.num_key_value_heads or heads
    if hidden % (2 * heads) or heads % keys:
        raise UserError(f"the draft's {heads} attention heads with {keys} key/value heads do not divide a hidden "
                        f"size of {hidden}; choose numbers that do")
    rope = getattr(config, "rope_parameters", None) or {}
    return Eagle3Config(
        hidden_size=hidden, intermediate_size=recipe.intermediate_size or 3 * hidden, num_attention_heads=heads,
        num_key_value_heads=keys, head_dim=hidden // heads, vocab_size=vocabulary, draft_vocab_size=size,
        target_hidden_size=hidden, fused_layers=captured.fused_layers, rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=config.max_position_embeddings, rope_theta=rope.get("rope_theta", 10000.0))


def new_draft(config: Eagle3Config, target: PreTrainedModel) -> Eagle3Model:
    """A draft for training: the target's embedding, frozen, and NaN in every other weight until it is initialised or loaded,
    so that a weight that was missed cannot go unnoticed."""
    embedding = cast(Tensor, target.get_input_embeddings().weight).detach().float()
    draft = Eagle3Model(config, embedding)
    draft.midlayer.self_attn = UnrolledAttention(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter.fill_(torch.nan)
    return draft.to(target.device)


@torch.no_grad()
def initialise(draft: Eagle3Model, target: PreTrainedModel, scale: float, ids: Tensor, seed: int) -> None:
    """First weights: the output head is the target's own for its ``ids``, the rest is random."""
    generator = torch.Generator().manual_seed(seed)
    for module in draft.modules():
        if isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear):
            drawn = torch.randn(module.weight.shape, generator=generator) * module.in_features**-0.5
            module.weight.copy_(drawn)
    draft.lm_head.weight.copy_(target.get_output_embeddings().weight[ids] * scale)


def begin_from(draft: Eagle3Model, start: Path, target: PreTrainedModel) -> None:
    """First weights, and vocabulary map, of another draft: of an earlier version of the target, say.

    Raises:
        UserError: the other draft is of other sizes, or none for this target.
    """
    other = load_eagle3(start, target.config, draft.embed_tokens.weight)
    differing = [field.name for field in fields(Eagle3Config)
                 if getattr(other.config, field.name) != getattr(draft.config, field.name)]
    if other.owns_embedding or differing:
        raise UserError(f"the draft in {start} has {', '.join(differing) or 'an embedding'} of its own, so that this training "
                        "cannot begin from it; leave it out, or give options that fit it")
    draft.load_state_dict(other.state_dict())


def train_draft(
    target: PreTrainedModel,
    recipe: DraftRecipe,
    states: Path,
    out: Path,
    *,
    start: Path | None = None,
    evaluate: Callable[[Eagle3Model], float] | None = None,
    format: Literal["official", "speculators"] = "official",
    compile: bool = False,
    checkpoint_every: int = 200,
    stop_at: int | None = None,
) -> Path:
    """Trains ``recipe`` on the states that `capture` kept of ``target``, resuming from ``out`` when it holds a checkpoint.

    Args:
        start: folder of a draft whose weights are the first ones; without it they are random.
        evaluate: acceptance length of a draft by real decoding, asked with every checkpoint.
        compile: fuses the loss with torch.compile, which needs a C++ compiler.
        stop_at: stop after this many steps, with a checkpoint, as an interruption would.

    Returns the folder of the finished draft (``out/draft``), or the checkpoint when stopped early.
    """
    captured = Captured(states)
    captured.check(target)
    draft = new_draft(draft_config(target, recipe, captured), target)
    scale = logit_scale(target)
    if not has_checkpoint(out):
        if start is not None:
            begin_from(draft, start, target)
        else:
            if draft.d2t is not None:  # only ever for a new draft: another map under trained weights would be noise
                draft.set_vocabulary(captured.vocabulary(len(draft.d2t)).to(draft.d2t.device))
            initialise(draft, target, scale, draft.to_target(torch.arange(draft.config.draft_vocab_size)), recipe.seed)
    head = head_loss(draft.logits)
    if compile:
        head = torch.compile(head)

    def learn(batch: Batch) -> list[Depth]:
        ids = None if draft.d2t is None else draft.to_target(torch.arange(len(draft.d2t), device=draft.d2t.device))
        with torch.no_grad():
            teacher = teacher_logits(target, batch.hidden, scale, ids).softmax(-1, dtype=torch.float32)
        return learn_unrolled(draft, head, batch, teacher, recipe.ttt, recipe.step_decay)

    measure = None if evaluate is None else lambda: evaluate(draft)
    trainer = DraftTrainer(draft, learn, recipe, captured, measure, checkpoint_every)
    finished = train(trainer, out, checkpoint_every=checkpoint_every, stop_at=stop_at)
    if not finished:
        return out / CHECKPOINT
    with writing(out):
        save_eagle3(draft, out / "draft", format, target.config)
    return out / "draft"

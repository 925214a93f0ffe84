"""What a target model computes on training tokens, kept on disk for the drafts that learn from it.

A shard is one safetensors file with the sequences of one shard of the source, one after another. Shards are written whole
or not at all, so an interrupted capture goes on where it stopped; memory holds one shard at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.output import output_file
from edgexpert.kernels.modules import PackedLinear
from edgexpert.speculation.eagle3_config import default_fused_layers
from edgexpert.training.examples import Example, Source

DESCRIPTION = "capture.json"
FORWARD_TOKENS = 4096  # bounds the logits that are in memory at once


def require_weights(target: PreTrainedModel) -> None:
    """Raises UserError for a model whose weights are packed: they have no gradients, and nothing starts from them."""
    if isinstance(target.get_output_embeddings(), PackedLinear):
        raise UserError("the target is a packed checkpoint, which has no weights to train with; give the one it was made from")


def fused_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 fuses: low, middle, high."""
    layers = default_fused_layers(num_layers)
    if not 2 < layers[1] < layers[2]:
        raise UserError(f"the target has {num_layers} layers, but EAGLE-3 needs three distinct ones out of at least 7; "
                        "use a deeper target, or the draft 'ngram', which needs no training")
    return layers


@contextmanager
def _watched(target: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int | str, Tensor]]:
    """Keeps, at every forward pass, the inputs of ``layers`` (by number), and the input and output of ``lm_head``."""
    seen: dict[int | str, Tensor] = {}

    def keep(key: int | str) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            seen[key] = args[0] if args else kwargs["hidden_states"]
        return hook

    def keep_output(module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["lm_head output"] = output

    blocks, head = target.get_decoder().layers, target.get_output_embeddings()
    handles = [blocks[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layers]
    handles += [head.register_forward_pre_hook(keep("lm_head"), with_kwargs=True), head.register_forward_hook(keep_output)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def logit_scale(target: PreTrainedModel) -> float:
    """The factor between what ``lm_head`` gives and the model's logits (Granite divides them), measured on a few tokens."""
    with _watched(target, ()) as seen:
        tokens = torch.arange(min(16, target.config.vocab_size), device=target.device)[None]
        logits = target(input_ids=tokens, use_cache=False).logits.float()
    output = seen["lm_head output"].float()
    scale = float((logits * output).sum() / output.square().sum())
    if not torch.allclose(logits, output * scale, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
        raise UserError("the target changes its logits after lm_head by more than a constant factor, which draft training "
                        "cannot follow; choose another target")
    return scale


def teacher_logits(target: PreTrainedModel, hidden: Tensor, scale: float, ids: Tensor | None = None) -> Tensor:
    """The target's logits [..., V] of captured inputs of its ``lm_head`` [..., H]; of the tokens ``ids`` alone if given."""
    head = target.get_output_embeddings()
    weight, bias = head.weight, head.bias
    if ids is not None:
        weight, bias = weight[ids], None if bias is None else bias[ids]
    return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias) * scale


@dataclass(frozen=True, eq=False)
class Batch:
    """Captured sequences side by side, padded with zeros at the end.

    Attributes:
        tokens: int64 [B, S].
        loss_mask: bool [B, S]; False at padding.
        features: inputs of the three fused layers, low to high, float32 [B, S, 3 * H].
        hidden: inputs of the target's ``lm_head``, float32 [B, S, H].
        best: the target's most likely next token, int64 [B, S].
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    hidden: Tensor
    best: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@torch.no_grad()
def observe(target: PreTrainedModel, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the target on int64 [B, S]: fused features [B, S, len(layers) * H], ``lm_head`` inputs [B, S, H], best [B, S]."""
    with _watched(target, layers) as seen:
        logits = target(input_ids=tokens.to(target.device), use_cache=False).logits
    return torch.cat([seen[layer] for layer in layers], -1), seen["lm_head"], logits.argmax(-1)


def _observed(target: PreTrainedModel, examples: Sequence[Example], layers: Sequence[int], dtype: torch.dtype
              ) -> dict[str, Tensor]:
    """The tensors of a shard, all sequences joined: [N, ...]."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    rest = list(examples)
    while rest:
        longest, taken = 0, 0
        while taken < len(rest) and (not taken or max(longest, len(rest[taken].tokens)) * (taken + 1) <= FORWARD_TOKENS):
            longest, taken = max(longest, len(rest[taken].tokens)), taken + 1
        group, rest = [example.tokens for example in rest[:taken]], rest[taken:]
        rows = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)  # attention is causal: nobody sees the padding
        features, hidden, best = observe(target, rows, layers)
        parts += [(features[i, :n].to(dtype).cpu(), hidden[i, :n].to(dtype).cpu(), best[i, :n].int().cpu())
                  for i, n in enumerate(map(len, group))]
    features, hidden, best = (torch.cat(column) for column in zip(*parts, strict=True))
    return {
        "tokens": torch.cat([example.tokens for example in examples]).int(),
        "loss_mask": torch.cat([example.loss_mask for example in examples]),
        "lengths": torch.tensor([len(example.tokens) for example in examples]),
        "features": features, "hidden": hidden, "best": best,
    }


def capture(target: PreTrainedModel, source: Source, folder: Path) -> Captured:
    """Runs the target on a source and keeps what it computes under ``folder``, going on where an earlier call stopped.

    States are kept in bfloat16, or float16 where that is the target's dtype: bfloat16 holds any residual stream.

    Raises:
        UserError: the target is packed or has too few layers, the disk too little room, or the folder holds another capture.
    """
    require_weights(target)
    layers = fused_layers(target.config.get_text_config().num_hidden_layers)
    dtype = torch.float16 if target.dtype == torch.float16 else torch.bfloat16
    width = target.get_output_embeddings().in_features
    about = {"fused_layers": layers, "hidden_size": width, "vocab_size": target.config.vocab_size, "shards": len(source),
             "tokens": source.max_tokens, "dtype": str(dtype)}
    folder.mkdir(parents=True, exist_ok=True)
    description = folder / DESCRIPTION
    if description.exists() and _described(folder) != json.loads(json.dumps(about)):
        raise UserError(f"the folder {folder} holds states of another target or source; give an empty folder, or remove it")
    missing = [index for index in range(len(source)) if not _shard(folder, index).exists()]
    needed = source.max_tokens * ((len(layers) + 1) * width * dtype.itemsize + 9) * len(missing) // max(1, len(source))
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"the captured states need {needed:,} bytes, but {folder} has {free:,} bytes free; "
                        "make room, choose another disk, or capture fewer tokens")
    with output_file(description) as part:
        part.write_text(json.dumps(about))
    target.eval()
    for index in track(missing, "capturing"):
        with output_file(_shard(folder, index)) as part:
            save_file(_observed(target, source.shard(index, target), layers, dtype), part)
    return Captured(folder)


def _shard(folder: Path, index: int) -> Path:
    return folder / f"{index:06}.safetensors"


def _described(folder: Path) -> Any:
    with _reading(folder):
        return json.loads((folder / DESCRIPTION).read_text())


@contextmanager
def _reading(place: Path) -> Iterator[None]:
    """Raises UserError where captured states are damaged."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"the captured states in {place} cannot be read ({error}); remove them, and they are captured again"
                        ) from None


class Captured:
    """Captured sequences, read from disk as they are asked for.

    Raises:
        UserError: the capture is missing or unfinished.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / DESCRIPTION).exists():
            raise UserError(f"the folder {folder} holds no captured states; capture them first")
        with _reading(folder):
            about = _described(folder)
            self.fused_layers: tuple[int, int, int] = tuple(about["fused_layers"])
            self.hidden_size, self.vocab_size, self.shards = about["hidden_size"], about["vocab_size"], int(about["shards"])
        absent = [index for index in range(self.shards) if not _shard(folder, index).exists()]
        if absent:
            raise UserError(f"the folder {folder} lacks {len(absent)} of {self.shards} shards; capture again, and it goes on")
        self.places: list[tuple[int, int, int]] = []  # shard, first token, length
        for index in range(self.shards):
            with _reading(_shard(folder, index)), safe_open(_shard(folder, index), "pt") as file:
                start = 0
                for length in file.get_tensor("lengths").tolist():
                    self.places.append((index, start, length))
                    start += length

    def __len__(self) -> int:
        return len(self.places)

    def check(self, target: PreTrainedModel) -> None:
        """Raises UserError when the states cannot be this target's."""
        if (self.hidden_size, self.vocab_size) != (target.get_output_embeddings().in_features, target.config.vocab_size):
            raise UserError(f"the states in {self.folder} are of another target; capture this one's into an empty folder")

    @property
    def longest(self) -> int:
        return max(length for _, _, length in self.places)

    def vocabulary(self, size: int) -> Tensor:
        """The ``size`` most frequent of the learned tokens (the lower id where two tie), ascending int64 [size]."""
        counts = torch.zeros(self.vocab_size, dtype=torch.int64)
        for index in range(self.shards):
            with safe_open(_shard(self.folder, index), "pt") as file:
                learned = file.get_tensor("tokens")[file.get_tensor("loss_mask")]
                counts += torch.bincount(learned, minlength=self.vocab_size)
        return counts.sort(descending=True, stable=True).indices[:size].sort().values

    def batch(self, indices: Sequence[int], padding: int) -> Batch:
        """The named sequences, padded to ``padding`` tokens more than the longest of them."""
        length = max(self.places[sequence][2] for sequence in indices) + padding
        states = {"tokens": torch.zeros(len(indices), length, dtype=torch.int64),
                  "loss_mask": torch.zeros(len(indices), length, dtype=torch.bool),
                  "best": torch.zeros(len(indices), length, dtype=torch.int64)}
        for row, sequence in enumerate(indices):
            index, start, n = self.places[sequence]
            with safe_open(_shard(self.folder, index), "pt") as file:
                for name in ("tokens", "loss_mask", "best", "features", "hidden"):
                    part = file.get_slice(name)[start : start + n]
                    if name not in states:
                        states[name] = torch.zeros(len(indices), length, part.shape[-1])
                    states[name][row, :n] = part
        return Batch(**states)

"""Attention of a stage: the mask of a token tree, and how much attention each candidate receives.

The library's models say what each of their layers may see with a function of two positions: all that came before, a window of
it, or a chunk. A token tree asks that function for every node at the node's own position, and takes away what is not on the
node's path. So windows are those of the library, wherever a configuration has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    MaskFunction,
    attention_implementation,
    is_causal,
)
from edgexpert.core.stage import Stage
from edgexpert.kernels.modules import ATTENTION

_running: ContextVar[Stage | None] = ContextVar("stage", default=None)
_asked: ContextVar[list[MaskFunction] | None] = ContextVar("asked", default=None)
_watched: ContextVar[tuple[Stage, dict[int, Tensor]] | None] = ContextVar("watched", default=None)


@contextmanager
def attending(stage: Stage) -> Iterator[None]:
    """While open, the library's models make the masks of this stage, and rotary embeddings know its positions."""
    token = _running.set(stage)
    try:
        yield
    finally:
        _running.reset(token)


def running_stage() -> Stage | None:
    """The stage that is going through a model of the library right now."""
    return _running.get()


@contextmanager
def asked_masks() -> Iterator[list[MaskFunction]]:
    """While open, gathers what models ask of their masks, mask by mask."""
    asked: list[MaskFunction] = []
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def stage_mask(stage: Stage, sees: MaskFunction) -> Tensor | None:
    """Who attends to whom, bool [1, 1, T, prefix + T]; None for a text in which every token sees all before it.

    Args:
        sees: whether a position sees another one.
    """
    if not stage.is_tree and is_causal(sees):
        return None
    tokens, positions = len(stage.tokens), stage.positions
    block = stage.tree.mask if stage.tree is not None else torch.ones(tokens, tokens, dtype=torch.bool).tril()
    path = torch.cat([torch.ones(tokens, stage.prefix, dtype=torch.bool), block], dim=1)[None, None]
    if is_causal(sees):
        return path
    keys, zero = torch.cat([torch.arange(stage.prefix), positions]), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return path & sees(zero, zero, positions[None, None, :, None], keys[None, None, None, :])


def _for_trees(library: Any, adds: bool) -> Any:
    """The library's way to make a mask, and ours for the stage of a token tree.

    Args:
        adds: its attention adds the mask to the scores, instead of taking booleans.
    """

    def make(*args: Any, mask_function: MaskFunction, **kwargs: Any) -> Tensor | None:
        asked, stage = _asked.get(), _running.get()
        if asked is not None:
            asked.append(mask_function)
        if stage is None or not stage.is_tree:
            made: Tensor | None = library(*args, mask_function=mask_function, **kwargs)
            return made
        if kwargs["kv_length"] != stage.prefix + len(stage.tokens):
            raise UserError("a layer of this model keeps other keys than those of the tokens before it, which is not supported; "
                            "give another model")
        mask, device = stage_mask(stage, mask_function), kwargs.get("device", "cpu")
        assert mask is not None
        if not adds:
            return mask.to(device)
        scores = torch.zeros(mask.shape, dtype=kwargs["dtype"])
        return scores.masked_fill_(~mask, torch.finfo(scores.dtype).min).to(device)

    return make


for _name, _adds in (("sdpa", False), ("eager", True), (ATTENTION, False)):
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _for_trees(ALL_MASK_ATTENTION_FUNCTIONS[_name], _adds))


@contextmanager
def watch_received_attention(
    model: PreTrainedModel, received: dict[int, Tensor], stage: Stage, wanted: bool
) -> Iterator[None]:
    """While open, fills ``received[layer]`` with the attention that each token of a verify stage gets from the stage.

    The mean over heads and over the queries that may attend to the token, float32 [T]. A second product of queries and
    keys gives it, so that the model's own attention stays what it is.
    """
    if not wanted or stage.tree is None:
        yield
        return
    name = attention_implementation(model)
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UserError(
            f"the model type {model.config.model_type} runs with its own {name} attention, whose weights cannot be read; "
            "weigh channels by routing weight or path probability instead"
        )
    _make_watchable(name)
    token = _watched.set((stage, received))
    try:
        yield
    finally:
        _watched.reset(token)


def is_attention_watched() -> bool:
    """Whether the stage that runs in this thread wants to know what attention its tokens receive."""
    return _watched.get() is not None


@cache
def _make_watchable(name: str) -> None:
    """Lets the library's attention ``name`` report to whoever watches in the same thread; others see no difference."""
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def watched(module: torch.nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        watching = _watched.get()
        if watching is not None:
            stage, received = watching
            received[int(module.layer_idx)] = _received(stage, query, key, kwargs.get("scaling"))  # type: ignore[arg-type]
        return attend(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, watched)


def _received(stage: Stage, query: Tensor, key: Tensor, scaling: float | None) -> Tensor:
    assert stage.tree is not None
    mask = stage.tree.mask
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ keys.transpose(2, 3)).float() * (scaling or query.shape[-1] ** -0.5)  # [1, h, T, n]
    scores[..., stage.prefix :] = scores[..., stage.prefix :].masked_fill(~mask.to(scores.device), float("-inf"))
    share = scores.softmax(-1)[0, :, :, stage.prefix :].mean(0).cpu()  # [T, T]
    return share.sum(0) / mask.sum(0)

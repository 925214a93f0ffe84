"""Attention of a stage: the mask of a token tree, and how much attention each candidate receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from edgexpert.core.errors import UserError
from edgexpert.core.stage import Stage
from edgexpert.kernels.modules import ATTENTION


def stage_mask(stage: Stage, model: PreTrainedModel, device: torch.device) -> Tensor | dict[str, Tensor] | None:
    """Who attends to whom, [1, 1, T, prefix + T]; None where the library's own causal mask does.

    A model with sliding-window layers gets one mask for each of its layer types.
    """
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = int(getattr(config, "sliding_window", None) or 0)
    slides = window > 0 and "sliding_attention" in types
    if not stage.is_tree and not slides:
        return None
    block = stage.tree.mask if stage.tree is not None else torch.ones(len(stage.tokens), len(stage.tokens)).tril().bool()
    full = torch.cat([torch.ones(len(stage.tokens), stage.prefix, dtype=torch.bool), block], dim=1)
    if not slides:
        return _as_attention_wants(full, model).to(device)
    key_positions = torch.cat([torch.arange(stage.prefix), stage.positions])
    near = stage.positions[:, None] - key_positions[None, :] < window
    masks = {"full_attention": full, "sliding_attention": full & near}
    return {kind: _as_attention_wants(masks[kind], model).to(device) for kind in types}


def _as_attention_wants(mask: Tensor, model: PreTrainedModel) -> Tensor:
    """SDPA and our own take booleans; eager attention adds the mask to its scores."""
    if model.config._attn_implementation in ("sdpa", ATTENTION):
        return mask[None, None]
    scores = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
    return scores[None, None]


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
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UserError(
            f"the model type {model.config.model_type} runs with its own {name} attention, whose weights cannot be read; "
            "weigh channels by routing weight or path probability instead"
        )
    attend, mask = ALL_ATTENTION_FUNCTIONS[name], stage.tree.mask

    def watching(module: torch.nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = (query @ keys.transpose(2, 3)).float() * (kwargs.get("scaling") or query.shape[-1] ** -0.5)  # [1, h, T, n]
        scores[..., stage.prefix :] = scores[..., stage.prefix :].masked_fill(~mask.to(scores.device), float("-inf"))
        share = scores.softmax(-1)[0, :, :, stage.prefix :].mean(0).cpu()  # [T, T]
        received[int(module.layer_idx)] = share.sum(0) / mask.sum(0)  # type: ignore[arg-type]
        return attend(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, watching)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(name, attend)

"""What can be hosted: models that cannot are refused when they are loaded or converted, with the reason."""

from __future__ import annotations

import re

import torch
from transformers import PreTrainedModel

from edgexpert.core.errors import UserError
from edgexpert.core.library import (
    ALL_EXPERTS_FUNCTIONS,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
    attention_implementation,
    cache_layers,
    experts_implementation,
    forward_arguments,
    use_implementations,
)
from edgexpert.model.blocks import MoeBlock, decoder_layers, find_blocks
from edgexpert.model.cache import TreeCache

KEYS_AND_VALUES = ("DynamicLayer", "DynamicSlidingWindowLayer")


def known_blocks(model: PreTrainedModel) -> list[MoeBlock]:
    """The MoE blocks of a model.

    Raises:
        UserError: there are none of a known form.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise UserError(f"the model {_name(model)} {_why_no_blocks(model)}")
    return blocks


def check_supported(model: PreTrainedModel) -> None:
    """Token trees must be able to go through a model, which is on the meta device.

    Raises:
        UserError: they cannot; the text says why.
    """
    reason = _why_no_cache(model)
    if reason is not None:
        raise UserError(f"the model {_name(model)} {reason}")
    known_blocks(model)
    try:
        run_without_numbers(model, attention_implementation(model))
    except (ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
        first_line = str(error).split("\n")[0][:160].rstrip(".")
        raise UserError(
            f"the model {_name(model)} does not run with the cache of token trees ({first_line}); give another model"
        ) from error


def run_without_numbers(model: PreTrainedModel, attention: str) -> None:
    """Two tokens through a model on the meta device, with an attention by name.

    Raises:
        UserError, ValueError, TypeError, AttributeError, KeyError, AssertionError: what some part of it does not take.
    """
    own = attention_implementation(model), experts_implementation(model)
    use_implementations(model, attention, SHAPES_ALONE)
    ids, cache = torch.zeros(1, 2, dtype=torch.int64, device="meta"), TreeCache(len(decoder_layers(model)), 2)
    try:
        model(input_ids=ids, position_ids=torch.arange(2, device="meta")[None], **forward_arguments(model, cache))
    except (RuntimeError, NotImplementedError):
        pass  # something in it needs numbers; what comes before has been tried
    finally:
        use_implementations(model, *own)


SHAPES_ALONE = "edgexpert_shapes"
ALL_EXPERTS_FUNCTIONS.register(SHAPES_ALONE, lambda module, x, *args, **kwargs: torch.zeros_like(x))


def _name(model: PreTrainedModel) -> str:
    return f"{model.config.name_or_path or 'at hand'} (model type {model.config.get_text_config().model_type})"


def _why_no_blocks(model: PreTrainedModel) -> str:
    forms = sorted({type(m).__name__ for m in model.modules() if re.search(r"Expert|MoE$|MoeBlock$", type(m).__name__)})
    if forms:
        return f"keeps its experts in a form that EdgeXpert cannot take over ({', '.join(forms)}); give another model"
    return "has no mixture-of-experts layer, so there is nothing for EdgeXpert to do: give an MoE model"


def _why_no_cache(model: PreTrainedModel) -> str | None:
    """Why a token tree cannot go through the model's cache; None if it can."""
    layers = cache_layers(model.config)
    recurrent = sum(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    if recurrent:
        return (f"keeps a recurrent or convolutional state in {recurrent} of its {len(layers)} layers, which a token tree cannot "
                "branch; give a model that has attention in every layer")
    if any(isinstance(layer, DynamicIndexedLayer) for layer in layers):
        return "chooses the keys that it attends to with an indexer (sparse attention); give a model that attends to all"
    others = sorted({type(layer).__name__ for layer in layers} - set(KEYS_AND_VALUES))
    if others:
        return f"has layers that cache no plain keys and values ({', '.join(others)}); give another model"
    return None

"""transformers' private and version-dependent names: every use of one goes through here.

What the rest of the package needs beyond the library's documented interface has one name here, so that a new version of the
library means a look at one file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, __version__

from edgexpert.core.errors import UserError

try:
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicCache,
        DynamicIndexedLayer,
        LinearAttentionCacheLayerMixin,
    )
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise UserError(
        f"the installed transformers {__version__} does not fit ({error}); install the version that this edgexpert asks for"
    ) from error

for _name in ("_init_weights", "get_expanded_tied_weights_keys", "set_experts_implementation"):
    if not hasattr(PreTrainedModel, _name):
        raise UserError(f"the installed transformers {__version__} has no PreTrainedModel.{_name}; "
                        "install the version that this edgexpert asks for")

__all__ = [
    "ALL_ATTENTION_FUNCTIONS", "ALL_EXPERTS_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS", "ROPE_INIT_FUNCTIONS", "Cache",
    "CacheLayerMixin", "Concatenate", "DynamicCache", "DynamicIndexedLayer", "LinearAttentionCacheLayerMixin", "MergeModulelist",
    "WeightConverter", "WeightRenaming", "dot_natural_key", "get_model_conversion_mapping", "rename_source_key",
    "revert_weight_conversion", "sdpa_mask",
]

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""Whether a query attends to a key: (batch index, head index, query position, key position)."""


def is_causal(mask_function: MaskFunction) -> bool:
    """Whether a mask function asks for nothing but that no token sees a later one."""
    return mask_function is causal_mask_function


def attention_implementation(model: PreTrainedModel) -> str:
    """The name of the attention that a model runs with."""
    return str(model.config._attn_implementation)


def experts_implementation(model: PreTrainedModel) -> str:
    """The name of the experts' implementation that a model runs with."""
    return str(model.config._experts_implementation)


def use_implementations(model: PreTrainedModel, attention: str, experts: str) -> None:
    """Sets by name what computes a model's attention and its experts; not asked whether the model knows the attention."""
    model.set_experts_implementation(experts)
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config._attn_implementation = attention


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts whose execution the library lets others take over."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, Tensor) and down.dim() == 3 and hasattr(module, "_is_expert_parallel")


def library_experts(module: nn.Module, implementation: str, *args: Any, **kwargs: Any) -> Tensor:
    """What the library's own implementation of that name makes of an experts module's arguments."""
    own = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    out: Tensor = ALL_EXPERTS_FUNCTIONS.get(implementation, own)(module, *args, **kwargs)
    return out


def activation(experts: Any) -> Callable[[Tensor], Tensor]:
    """What stands between an experts module's two products."""
    function: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    return function


def forward_arguments(model: PreTrainedModel, cache: Cache) -> dict[str, Any]:
    """Keyword arguments of a model's ``forward`` that make it use a cache and leave out what only training needs."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    settings = ("output_router_logits",)  # its balancing loss knows no stages
    config = model.config.get_text_config()
    return {name: cache, "use_cache": True, **{key: False for key in settings if getattr(config, key, False)}}


def cache_of(holder: Any) -> Cache | None:
    """The cache among the keyword arguments of a ``forward``, or in its output."""
    for name in ("cache", "past_key_values"):
        cache: Cache | None = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
        if cache is not None:
            return cache
    return None


def cache_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that the library makes for a configuration, one for each decoder layer."""
    return list(DynamicCache(config=config).layers)


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """For each tied parameter the one that it is tied to."""
    return dict(model.all_tied_weights_keys or {})


def compute_buffers(model: PreTrainedModel) -> None:
    """Computes what no checkpoint stores, such as rotary frequencies, where it is still on the meta device."""
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]:
            delattr(module, name)  # what a pass without numbers left behind; made anew when it is wanted
        missing = [name for name in module._non_persistent_buffers_set if module.get_buffer(name).is_meta]
        if not missing:
            continue
        for name in missing:
            module._buffers[name] = torch.empty_like(module.get_buffer(name), device="cpu")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in missing:
                tensor._is_hf_initialized = True
        model._init_weights(module)


def frequencies_depend_on_call(module: nn.Module) -> bool:
    """Whether a rotary embedding chooses its frequencies by the positions of a call."""
    kinds = getattr(module, "rope_type", None)
    return any("dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else [kinds or ""]))


def forget_frequencies(module: Any) -> None:
    """Makes a rotary embedding forget how far the texts before reached."""
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
    for layer_type, kind in kinds.items():
        prefix = f"{layer_type}_" if layer_type else ""
        if "dynamic" in kind:
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

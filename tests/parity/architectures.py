"""Tiny random models of every mixture-of-experts architecture that the installed transformers knows.

No list of names: each configuration of a causal language model is shrunk by the meaning of its fields' names, and the model is
looked through for experts.
"""

from __future__ import annotations

import logging
import re
import warnings
import zlib
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
VOCABULARY = 128
STD = 0.2
WINDOW = 16

SIZES: list[tuple[str, int]] = [  # the first pattern that matches a whole field name decides
    (r"(unpadded_)?(\w*_)?vocab_size(_\w+)?", VOCABULARY),
    (r"(bos|eos|pad|sep|eod|unk|cls)_token_id", 0),
    (r"(num_hidden_layers|num_layers|n_layers?)", LAYERS),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", 1),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"(loop_layer_index_start|n_layers_per_attn_res_block)", 1),
    (r"loop_layer_index_end", 3),
    (r"(num_kv_shared_layers|num_nextn_predict_layers)", 0),
    (r"max_window_layers", 2),
    (r"(num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts)", 2),
    (r"(n_group|num_expert_group|num_groups?)", 2),
    (r"(topk_group|num_limited_groups)", 1),
    (r"(n_shared_experts?|num_shared_experts?|moe_num_shared_experts?)", 1),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num)", 8),
    (r"(sliding_window(_size)?|attention_chunk_size|keep_window_size)", WINDOW),
    (r"(max_position_embeddings|model_max_length|n_positions|n_ctx|max_seq_len)", 256),
    (r"(index_topk|indexer_budget)", 8),
    (r"indexer_compress_ratio", 4),
    (r"indexer_kv_heads", 1),
    (r"indexer_n_heads", 2),
    (r"(index_topk_blocks|index_local_blocks|index_n_heads|heads_per_ngram)", 2),
    (r"(block_size|index_block_size|chunk_size|mamba_chunk_size)", 8),
    (r"(mamba_n_groups|n_groups|o_groups|split_ngram_parts)", 1),
    (r"(mamba_n_heads|mamba_num_heads)", 8),
    (r"linear_num_(key|value)_heads", 2),
    (r"\w*num_attention_heads|linear_num_heads|n_heads?|num_heads", 4),
    (r"\w*num_(key_value|kv)_heads|kv_n_heads", 2),
    (r"(qk|swa)_head_dim", 32),
    (r"(\w*head_dim|mamba_d_head|kv_channels|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|rotary_dim)", 16),
    (r"(mamba_d_state|ssm_state_size|mamba_dt_rank|d_rel|rel_extent)", 16),
    (r"(kv_lora_rank|q_lora_rank|o_lora_rank|hc_lowrank|gated_norm_rank|loop_gate_rank)", 32),
    (r"(ple_embed_dim|hidden_size_per_layer_input|router_hidden_size|n_embd|d_model)", 64),
    (r"(moe_intermediate_size|expert_ffn_hidden_size|moe_ffn_hidden_size)", 64),
    (r"\w*(intermediate_size|ffn_hidden_size|intermediate_size_mlp)", 96),
    (r"hidden_size", 64),
    (r"ngram_vocab_size_base|make_ngram_vocab_size_divisible_by", VOCABULARY),
]
FILLED = {"attn_config": {"rope_theta": 10000.0}}
"""Nested fields that the library's own defaults lack."""
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
SWITCHES = r"is_moe|enable_moe_block|use_sliding_window"
"""Fields that give a model what its name promises: experts, or a window."""
NEEDED = (
    r"sliding_window|num_experts_per_tok|n_(routed|shared)_experts|num_experts|num_local_experts|top_k_experts|head_dim|"
    r"moe_intermediate_size|indexer_\w+"
)
"""Fields that have no default where the model needs one."""


def text_models() -> list[str]:
    """Model types of causal language models that are no shell around another one's text configuration."""
    names = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
            inner = config.get_text_config()
        except Exception:  # a configuration without a default form describes no model that could be made
            continue
        if inner is config:
            names.append(name)
    return names


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a model type with every size shrunk.

    Args:
        name: of the type; "TYPE:attention" has full attention in every layer.
    """
    name, _, variant = name.partition(":")
    kind = CONFIG_MAPPING[name]
    default = kind()
    layers = int(default.num_hidden_layers)
    fields = {field: value for field, value in default.to_dict().items() if not field.startswith(("_", "id2", "label2"))}
    shrunk: dict[str, Any] = {}
    for field, value in fields.items():
        if field in ("model_type", "architectures", "transformers_version", "dtype"):
            continue
        shrunk[field] = _shrink(field, value, layers)
    heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
    if heads == kv_heads and kv_heads is not None:
        shrunk["num_key_value_heads"] = shrunk["num_attention_heads"]
    if "qk_nope_head_dim" in shrunk and fields.get("head_dim", 0) > fields["qk_rope_head_dim"]:
        shrunk["head_dim"] = shrunk["qk_nope_head_dim"] + shrunk["qk_rope_head_dim"]
    if "layer_types" in shrunk and shrunk["layer_types"] is None and kind(**shrunk).layer_types is None:
        shrunk["layer_types"] = ["full_attention"] * LAYERS
    if variant:
        shrunk["layer_types"] = ["full_attention"] * LAYERS
    shrunk |= dict(tie_word_embeddings=False, initializer_range=STD, bos_token_id=0, eos_token_id=1, pad_token_id=None)
    return kind(**{**shrunk, **changes})


def _shrink(field: str, value: Any, layers: int) -> Any:
    if isinstance(value, bool):
        return value or re.fullmatch(SWITCHES, field) is not None
    if value is None and re.fullmatch(NEEDED, field):
        value = 2  # some number, so that the field's own size is taken
    if isinstance(value, int):
        size = next((size for pattern, size in SIZES if re.fullmatch(pattern, field)), None)
        switched_off = value <= 1 and re.search("token_id|top_?k|num_experts$|^shared_intermediate_size$", field) is None
        return value if size is None or switched_off else size
    if isinstance(value, list) and len(value) == layers:
        if value == list(range(layers)):
            return list(range(LAYERS))
        return [_shrink(field.removesuffix("_per_layer"), item, layers) for item in _representative(value)]
    if isinstance(value, list) and value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [item for item in value if item < LAYERS]
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return {}  # exceptions for some layers, of sizes that are not ours
    if isinstance(value, dict):
        return {key: _shrink(str(key), item, layers) for key, item in value.items()} | FILLED.get(field, {})
    return value


def _representative(values: list[Any]) -> list[Any]:
    """As many entries as there are layers, each kind among them, in their order."""
    kept = [i for i, value in enumerate(values) if value not in values[:i]][:LAYERS]
    kept += [i for i in range(len(values)) if i not in kept][: LAYERS - len(kept)]
    return [values[i] for i in sorted(kept)]


def tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A random float32 model: weights of ``STD``, biases and norms that do something."""
    seed = zlib.crc32(config.model_type.encode())
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, STD, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.data.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator))
        else:
            parameter.data.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.add_(torch.empty_like(buffer).normal_(0, 0.1, generator=generator))
    return model


def has_experts(model: nn.Module) -> bool:
    """Whether some module holds experts: weights of three dimensions, or a list of them."""
    return any(re.search(r"expert|moe(block|layer|mlp)?$", type(module).__name__.lower()) is not None
               or name.endswith("experts") for name, module in model.named_modules())


def moe_architectures() -> list[str]:
    """Names of all architectures with experts; behind a colon, a variant that has attention in every layer."""
    quiet()
    return [name for own in text_models() for name in (own, f"{own}:attention") if _is_architecture(name)]


def _is_architecture(name: str) -> bool:
    try:
        config = tiny_config(name)
        with torch.device("meta"):
            found = has_experts(AutoModelForCausalLM.from_config(config))
        if not found or ":" not in name:
            return found
        types = set(getattr(tiny_config(name.partition(":")[0]), "layer_types", None) or [])
        if types <= ATTENTION_TYPES:
            return False
        tiny_model(config).generate(torch.arange(2, 8)[None], max_new_tokens=2, pad_token_id=0)  # the library runs it
    except Exception:  # no such model can be made; without a variant: of a model without experts, in all cases known
        return False
    return True


def quiet() -> None:
    """Silences what tiny configurations make the library say."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)

"""A GGUF file's metadata as a transformers configuration, and its tensor names as those of the transformers model.

The keys are those of the GGUF specification; how llama.cpp's converter fills them is said where it matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from edgexpert.core.errors import UserError

Metadata = Mapping[str, Any]

COMMON = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
SPECIAL_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}

TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


@dataclass(frozen=True)
class Architecture:
    """What sets one GGUF architecture apart.

    Attributes:
        keys: configuration names and the metadata keys that hold them.
        permuted: llama.cpp stores the rows of q and k in the order of its own rotary embedding.
    """

    model_type: str
    keys: dict[str, str]
    constants: dict[str, Any]
    permuted: bool = False
    finish: Callable[[dict[str, Any], Metadata], None] = lambda config, metadata: None


def _latent_attention(config: dict[str, Any], metadata: Metadata) -> None:
    """DeepSeek's compressed attention. Newer files state the lengths after decompression under keys of their own."""
    head = metadata.get("attention.key_length_mla", metadata.get("attention.key_length"))
    config["v_head_dim"] = metadata.get("attention.value_length_mla", metadata.get("attention.value_length"))
    config["qk_nope_head_dim"] = head - config["qk_rope_head_dim"] if head else None
    config["num_key_value_heads"] = config["num_attention_heads"]
    config.setdefault("q_lora_rank", None)
    if metadata.get("rope.scaling.type") == "yarn":
        # the file holds a tenth of mscale_all_dim; the published models have mscale equal to it
        mscale = 10 * metadata.get("rope.scaling.yarn_log_multiplier", 0.0)
        config["rope_parameters"] |= {
            "rope_type": "yarn",
            "factor": metadata["rope.scaling.factor"],
            "original_max_position_embeddings": metadata["rope.scaling.original_context_length"],
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }


ARCHITECTURES = {
    "granitemoe": Architecture(
        "granitemoe",
        {
            "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length",
            "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
            "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale", "logits_scaling": "logit_scale",
        },
        {},
        permuted=True,
    ),
    "olmoe": Architecture(
        "olmoe",
        {
            "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length",
            "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        },
        {"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        {
            "num_key_value_heads": "attention.head_count_kv", "intermediate_size": "feed_forward_length",
            "head_dim": "attention.key_length", "moe_intermediate_size": "expert_feed_forward_length",
            "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
        },
        {"norm_topk_prob": True},  # llama.cpp always normalises here
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        {
            "intermediate_size": "feed_forward_length", "moe_intermediate_size": "expert_feed_forward_length",
            "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
            "n_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count",
            "kv_lora_rank": "attention.kv_lora_rank", "q_lora_rank": "attention.q_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count", "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
        },
        {"topk_method": "greedy"},
        finish=_latent_attention,
    ),
}
OPTIONAL = {"q_lora_rank", "routed_scaling_factor", "norm_topk_prob", "head_dim", "residual_multiplier",
            "attention_multiplier", "embedding_multiplier", "logits_scaling", "n_shared_experts"}
UNREAD = {
    "deepseek2": {"expert_gating_func": 1},  # 1: softmax; others are those of DeepSeek-V3
    "granitemoe": {"expert_shared_feed_forward_length": 0},
}
"""Keys that only this value of is understood."""


def architecture_of(metadata: Metadata, file: str) -> Architecture:
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"the file {file} holds a model of architecture {name}; "
            f"those that are read are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def config_from_metadata(metadata: Metadata, vocabulary: int, tied: bool, file: str) -> PreTrainedConfig:
    """The transformers configuration that a file's metadata describe.

    Raises:
        UserError: the architecture is not one of `ARCHITECTURES`, or a key is missing.
    """
    architecture = architecture_of(metadata, file)
    prefix = str(metadata["general.architecture"]) + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in UNREAD.get(prefix[:-1], {}).items():
        if own.get(key, value) != value:
            raise UserError(f"the file {file} has {prefix}{key} = {own[key]}, a variant of the architecture that is not read")
    config: dict[str, Any] = {"vocab_size": vocabulary, "tie_word_embeddings": tied, **architecture.constants}
    for name, key in {**COMMON, **architecture.keys}.items():
        if key in own:
            config[name] = own[key]
        elif name not in OPTIONAL:
            raise UserError(
                f"the file {file} lacks the metadata key {prefix}{key}; "
                "make the file again with llama.cpp's converter"
            )
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 10000.0)}
    scaling = own.get("rope.scaling.type", "none")
    if scaling != "none" and prefix != "deepseek2.":
        config["rope_parameters"] |= {"rope_type": scaling, "factor": own.get("rope.scaling.factor", 1.0)}
    for name, key in SPECIAL_TOKENS.items():
        config[name] = metadata.get(f"tokenizer.ggml.{key}")
    architecture.finish(config, own)
    return CONFIG_MAPPING[architecture.model_type](**config)


def gguf_name(parameter: str) -> str | None:
    """The GGUF name of a parameter that is not an expert's."""
    module, _, kind = parameter.rpartition(".")
    if module in TOP_NAMES:
        return f"{TOP_NAMES[module]}.{kind}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None or layer[2] not in LAYER_NAMES:
        return None
    return f"blk.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"

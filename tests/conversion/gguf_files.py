"""Writing tiny models as GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PreTrainedModel

from edgexpert.conversion.sources.gguf_config import gguf_name

ARCHITECTURES = {"granitemoe": "granitemoe", "olmoe": "olmoe", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2"}
NATIVE = {Type.F32: np.float32, Type.F16: np.float16}


def write_gguf(
    model: PreTrainedModel, path: Path, type: Type = Type.F32, *, split_latent: bool = False, leave_out: str = ""
) -> None:
    """Writes every matrix in ``type`` and every vector in F32; ``leave_out`` names a tensor that is missing."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "granitemoe":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    elif config.model_type == "qwen3_moe":
        writer.add_key_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    elif config.model_type == "deepseek_v2":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    add_tokenizer(writer)
    for name, tensor in gguf_tensors(model, split_latent).items():
        if name != leave_out:
            add_tensor(writer, name, tensor, type if tensor.dim() > 1 and "ffn_gate_inp" not in name else Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """One token for each ASCII character, and "ab" in the place of a control character."""
    tokens = ["<bos>", "<eos>", "ab", *map(chr, range(3, 128))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, type: Type) -> None:
    values = tensor.detach().numpy()
    if type in NATIVE:
        writer.add_tensor(name, values.astype(NATIVE[type]))
    else:
        writer.add_tensor(name, quantised(values, type), raw_dtype=type)


def quantised(values: np.ndarray, type: Type) -> np.ndarray:
    """Blocks of ``type``. The package rounds to no K-quant, so those are random bytes with small scales."""
    try:
        return gguf.quantize(values, type)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[type]
        random = np.random.default_rng(0)
        raw = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
        scales = random.uniform(1e-3, 1e-2, (*raw.shape[:-1], 2)).astype(np.float16).view(np.uint8)
        if type == Type.Q6_K:
            raw[..., -2:] = scales[..., :2]
        else:
            raw[..., :4] = scales
        return raw.reshape(*values.shape[:-1], -1)


def gguf_tensors(model: PreTrainedModel, split_latent: bool) -> dict[str, Tensor]:
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach()
        if ".experts." in name:
            stem = f"blk.{name.split('.')[2]}.ffn_"
            if name.endswith("gate_up_proj"):
                tensors[stem + "gate_exps.weight"], tensors[stem + "up_exps.weight"] = tensor.chunk(2, dim=1)
            else:
                tensors[stem + "down_exps.weight"] = tensor
            continue
        if config.model_type == "granitemoe" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        gguf_tensor = gguf_name(name)
        assert gguf_tensor is not None, name
        if split_latent and "attn_kv_b" in gguf_tensor:
            joint = tensor.unflatten(0, (config.num_attention_heads, -1))
            keys, values = joint.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            tensors[gguf_tensor.replace("kv_b", "k_b")] = keys.transpose(1, 2).contiguous()
            tensors[gguf_tensor.replace("kv_b", "v_b")] = values.contiguous()
            continue
        tensors[gguf_tensor] = tensor
    return {name: torch.clone(tensor) for name, tensor in tensors.items()}

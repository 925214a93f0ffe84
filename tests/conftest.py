"""Tiny random models of many families, made once a session."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

torch.set_num_threads(1)

COMMON = dict(
    vocab_size=128,
    hidden_size=32,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
    initializer_range=0.2,
)
FAMILIES: dict[str, dict[str, object]] = {
    "granitemoe": dict(
        intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, embedding_multiplier=2.0,
        attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=3.0,
    ),
    "olmoe": dict(intermediate_size=24, num_experts=8, num_experts_per_tok=2),
    "deepseek_v2": dict(
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
        routed_scaling_factor=1.5, topk_method="greedy", norm_topk_prob=False, num_key_value_heads=4,
    ),
    "qwen3_moe": dict(
        intermediate_size=48, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=2, head_dim=16, norm_topk_prob=True,
    ),
    "mixtral": dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2),
    "qwen2_moe": dict(
        intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=8, num_experts_per_tok=2,
    ),
    "granitemoeshared": dict(
        intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=40,
        attention_multiplier=0.3, logits_scaling=3.0,
    ),
    "gpt_oss": dict(
        intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, head_dim=16, sliding_window=16,
    ),
    "glm4_moe": dict(
        intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=2, topk_group=1, head_dim=16,
    ),
}


def make_model(family: str, **changes: object) -> PreTrainedModel:
    """A tiny random model of a family, float32, in evaluation mode."""
    torch.manual_seed(sum(map(ord, family)))
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each ASCII character: id = code, <bos> = 0, <eos> = 1."""
    vocab = {"<bos>": 0, "<eos>": 1, **{chr(code): code for code in range(2, 128)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")

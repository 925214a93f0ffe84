"""Tiny targets of the four families, random and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from edgexpert.training.capture import Captured, capture
from edgexpert.training.examples import Continuations, Given

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
    "initializer_range": 0.3,
}


def qwen3_moe(**changes: int) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | changes, moe_intermediate_size=16, num_experts=8,
                                              num_experts_per_tok=2, head_dim=8))


def granitemoe() -> PreTrainedModel:
    return GraniteMoeForCausalLM(GraniteMoeConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2, logits_scaling=6.0,
                                                  embedding_multiplier=12.0, residual_multiplier=0.22))


def olmoe() -> PreTrainedModel:
    return OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=2))


def deepseek_v2() -> PreTrainedModel:
    shape = SHAPE | {"num_key_value_heads": 4}
    return DeepseekV2ForCausalLM(DeepseekV2Config(
        **shape, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, kv_lora_rank=16,
        q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, first_k_dense_replace=1))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    family.__name__: family for family in (qwen3_moe, granitemoe, olmoe, deepseek_v2)}


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    torch.manual_seed(0)
    return qwen3_moe().eval()


@pytest.fixture(scope="session")
def source() -> Continuations:
    prompts = torch.randint(1, 64, (24, 4), generator=torch.Generator().manual_seed(0))
    return Continuations(list(prompts), length=20, temperatures=(0.0, 0.5), per_shard=8)


@pytest.fixture(scope="session")
def states(target: PreTrainedModel, source: Continuations, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of captured states."""
    folder = tmp_path_factory.mktemp("states")
    capture(target, source, folder)
    return folder


@pytest.fixture(scope="session")
def captured(states: Path) -> Captured:
    return Captured(states)


@pytest.fixture
def given(source: Continuations, target: PreTrainedModel) -> Given:
    return Given(source.shard(0, target), per_shard=3)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: ``w1`` ... ``w59``, the marks of a chat, and an end-of-text token."""
    words = ["<|end|>", "<|user|>", "<|bot|>", "<|unknown|>", *(f"w{number}" for number in range(1, 60))]
    model = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|unknown|>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|end|>",
        chat_template="{% for m in messages %}{{ '<|user|> ' if m.role == 'user' else '<|bot|> ' }}{{ m.content }}"
                      "{{ ' <|end|> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|> ' }}{% endif %}")

"""A random EAGLE-3 draft beside a dummy model, so that drafting takes the time that it would take."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from edgexpert.speculation.checkpoint import save_eagle3
from edgexpert.speculation.eagle3 import Eagle3Config, Eagle3Model
from edgexpert.speculation.eagle3_config import default_fused_layers
from edgexpert.speculation.loading import BESIDE_MODEL

VOCABULARY_SHARE = 4  # published drafts propose a quarter of the tokens: 32,000 of Llama 3.1's 128,256, or of Qwen3's 151,936
INTERMEDIATE = 3  # times the hidden size, as in published drafts
LOGIT_STD = 6.0
"""A trained draft is sure of some tokens, so its trees are deep. Logits this far apart give random ones the same form."""


def write_dummy_draft(config: PreTrainedConfig, folder: Path) -> bool:
    """Writes a draft for a model of this configuration; False where it has too few layers for one."""
    layers = config.num_hidden_layers
    if layers < 7:
        return False
    hidden, vocabulary = config.hidden_size, config.vocab_size
    heads = config.num_attention_heads
    sizes = Eagle3Config(
        hidden_size=hidden, intermediate_size=INTERMEDIATE * hidden, num_attention_heads=heads,
        num_key_value_heads=min(heads, config.num_key_value_heads), head_dim=hidden // heads, vocab_size=vocabulary,
        draft_vocab_size=max(1, vocabulary // VOCABULARY_SHARE), target_hidden_size=hidden,
        fused_layers=default_fused_layers(layers), max_position_embeddings=config.max_position_embeddings,
    )
    torch.manual_seed(0)
    draft = Eagle3Model(sizes, torch.empty(vocabulary, hidden, device="meta"))
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    nn.init.normal_(draft.lm_head.weight, std=LOGIT_STD * hidden**-0.5)
    save_eagle3(draft.bfloat16(), folder / BESIDE_MODEL)
    return True

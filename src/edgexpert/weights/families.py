"""What is known of model types before they are loaded. Loading finds it by form; a test holds these names to what it finds.

Of a type in none of these sets only loading tells: some depend on their configuration, such as hybrids of attention and
recurrent layers.
"""

from __future__ import annotations

EVERY_POLICY = frozenset((
    "afmoe", "aria_text", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "mimo_v2_flash", "minimax_m2",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
))
"""Their routers are read, so that every policy works."""

EXACT_ALONE = frozenset(("gemma4_text", "phimoe"))
"""They run, but their routers score experts in a way that policies cannot use."""

REFUSED = frozenset((
    "bailing_hybrid", "dbrx", "deepseek_v32", "glm_moe_dsa", "jamba", "jetmoe", "kimi_linear", "llama4_text", "longcat_flash",
    "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_next",
))
"""Loading refuses them: their caches cannot branch, or their experts have a form of their own."""

GGUF = {"granitemoe": "granitemoe", "olmoe": "olmoe", "deepseek2": "deepseek_v2", "qwen3moe": "qwen3_moe"}
"""The model type of each architecture that is converted from GGUF files."""

"""What a checkpoint's generation_config.json wants, as the library would take it when nothing else is asked for."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from edgexpert.core.errors import UserError
from edgexpert.speculation.sampling import SamplingParams

LIBRARY_TOP_K = 50
"""What `generate` takes for a checkpoint that samples and names no top_k."""

NOT_SUPPORTED = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "bad_words_ids",
                 "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "min_length", "min_new_tokens", "num_beams",
                 "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "guidance_scale")
NEUTRAL = (None, 0, 1, 1.0)


def sampling_defaults(config: GenerationConfig | None) -> tuple[SamplingParams, list[str]]:
    """The checkpoint's own sampling parameters, and notes on settings that `SamplingParams` does not have.

    Raises:
        UserError: a setting has a value that makes no sense.
    """
    if config is None:
        return SamplingParams(), []
    wanted = ("temperature", "top_k", "top_p", "repetition_penalty") if config.do_sample else ("repetition_penalty",)
    values: dict[str, Any] = {"temperature": 1.0, "top_k": LIBRARY_TOP_K} if config.do_sample else {}
    values |= {name: getattr(config, name) for name in wanted if getattr(config, name) is not None}
    if config.stop_strings:
        values["stop"] = config.stop_strings
    try:
        params = SamplingParams(**values)
    except UserError as error:
        raise UserError(f"the checkpoint's generation_config.json is wrong: {error}; correct or remove the file") from error
    ignored = [name for name in NOT_SUPPORTED if getattr(config, name, None) not in NEUTRAL]
    return params, [f"the checkpoint's generation_config.json asks for {', '.join(ignored)}, which is ignored"] if ignored else []

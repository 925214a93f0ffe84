"""The configuration of an EAGLE-3 draft as ``config.json`` files hold it: flat, or nested as speculators does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from edgexpert.core.errors import UserError
from edgexpert.speculation.eagle3 import Eagle3Config
from edgexpert.speculation.fit import check_eagle3

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def default_fused_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are fused when a configuration names none (as in the official code)."""
    return 2, num_layers // 2, num_layers - 3


def normalise_layers(ids: list[int], num_layers: int) -> tuple[int, int, int]:
    """Layers whose *inputs* are the features.

    Some count layers by their outputs: their first one is 1 where others have 2. That is how the two are told apart, for
    nobody fuses the input of layer 1 (it is the output of the first layer alone).

    Raises:
        UserError: not three distinct layers of a target with ``num_layers``.
    """
    shift = 1 if ids and ids[0] == 1 else 0
    layers = tuple(layer + shift for layer in ids)
    if len(layers) != 3 or len(set(layers)) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise UserError(f"EAGLE-3 fuses three distinct layers, but the draft has {ids} for a model of {num_layers}; "
                        "use a draft that was trained for this model")
    return layers


def parse_config(folder: Path, raw: Mapping[str, Any], num_layers: int) -> Eagle3Config:
    """Reads either form of configuration, for a target of ``num_layers``.

    Raises:
        UserError: it asks for something that `Eagle3Model` is not.
    """
    layer = _layer_config(folder, raw)
    rope = dict(layer.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    if layer.hidden_act != "silu" or "sliding_attention" in (getattr(layer, "layer_types", None) or ()):
        raise UserError(f"the draft in {folder} must have SiLU activation and full attention; use another draft")
    if kind not in ROPE_KINDS or rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(f"the draft in {folder} must have a whole rotary embedding, one of {', '.join(ROPE_KINDS)}")
    more = raw.get("eagle_config") or {}
    ids = raw.get(LAYER_IDS) or more.get(LAYER_IDS)
    return Eagle3Config(
        hidden_size=layer.hidden_size, intermediate_size=layer.intermediate_size,
        num_attention_heads=layer.num_attention_heads, num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim, vocab_size=layer.vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or layer.hidden_size,
        fused_layers=normalise_layers(list(ids or default_fused_layers(num_layers)), num_layers),
        max_position_embeddings=layer.max_position_embeddings, rms_norm_eps=layer.rms_norm_eps, rope_theta=theta,
        rope_scaling=None if kind == "default" else rope, attention_bias=layer.attention_bias,
        **{flag: bool(raw.get(flag, more.get(flag, False))) for flag in FLAGS})


def _layer_config(folder: Path, raw: Mapping[str, Any]) -> Any:
    """The configuration of the draft's layer, with the defaults of transformers, which nested ones leave out."""
    nested = raw.get("transformer_layer_config")
    try:
        if nested is None:
            return LlamaConfig(**{key: value for key, value in raw.items() if key != "model_type"})
        return AutoConfig.for_model(**{"model_type": "llama", **nested})
    except Exception as error:  # transformers raises errors of many kinds for values that it does not accept
        reason = str(error).strip().split("\n")[0].replace("`", "'").rstrip(".")
        raise UserError(f"the config.json of the draft in {folder} is not that of a Llama layer ({reason}); get a complete "
                        "copy of the draft") from error


def check_target(folder: Path, raw: Mapping[str, Any], config: Eagle3Config, target_config: PreTrainedConfig) -> None:
    """Raises a `UserError` where a draft's configuration tells that it was trained for another model."""
    text = target_config.get_text_config()
    target = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size, "architectures": target_config.architectures}
    check_eagle3(folder, raw, config.target_hidden_size, config.vocab_size, target)


def official_config(config: Eagle3Config) -> dict[str, Any]:
    """The flat form."""
    more = {LAYER_IDS: list(config.fused_layers), **{flag: getattr(config, flag) for flag in FLAGS}}
    if config.target_hidden_size != config.hidden_size:  # its presence alone tells other loaders to expect embeddings
        more["target_hidden_size"] = config.target_hidden_size
    return {"architectures": ["LlamaForCausalLMEagle3"], **_layer_values(config),
            "draft_vocab_size": config.draft_vocab_size, **more}


def speculators_config(config: Eagle3Config, target_config: PreTrainedConfig | None) -> dict[str, Any]:
    """The nested form, which names the target it is for."""
    verifier = {"name_or_path": getattr(target_config, "name_or_path", None) or None,
                "architectures": getattr(target_config, "architectures", None) or []}
    method = {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"], "model_type": "speculators", "speculators_model_type": "eagle3",
        "transformer_layer_config": _layer_values(config), "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        LAYER_IDS: list(config.fused_layers), **{flag: getattr(config, flag) for flag in FLAGS},
        "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [method],
                               "verifier": verifier},
    }


def _layer_values(config: Eagle3Config) -> dict[str, Any]:
    """A Llama configuration of the one layer."""
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "attention_bias")
    return {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False,
            **{name: getattr(config, name) for name in same}}

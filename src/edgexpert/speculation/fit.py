"""Whether a draft is for a model, as far as the two configurations tell. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgexpert.core.errors import UserError

MEDUSA = ("hidden_size", "vocab_size", "num_hidden_layers")
"""Settings that Medusa heads share with their target."""


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config.json is an EAGLE-3 draft's, in any of the formats found in the wild."""
    architectures = " ".join(map(str, config.get("architectures") or [])).lower()
    return "draft_vocab_size" in config or "eagle" in architectures or config.get("speculators_model_type") == "eagle3"


def kind_of_draft(config: Mapping[str, Any]) -> str:
    """``medusa``, ``eagle3`` or ``causal``."""
    return "medusa" if config.get("model_type") == "medusa" else "eagle3" if is_eagle3(config) else "causal"


def check_eagle3(folder: Path, raw: Mapping[str, Any], hidden: int, vocabulary: int, target: Mapping[str, Any]) -> None:
    """Raises a `UserError` where an EAGLE-3 draft's configuration tells that it was trained for another model.

    Args:
        raw: the draft's config.json.
        hidden, vocabulary: sizes of the target that the draft asks for.
        target: the target's ``hidden_size``, ``vocab_size`` and ``architectures``.
    """
    for what, draft, model in (("hidden size", hidden, target["hidden_size"]),
                               ("vocabulary size", vocabulary, target["vocab_size"])):
        if draft != model:
            raise UserError(f"the draft in {folder} is for a model of {what} {draft}, but this model's is {model}; "
                            "use a draft that was trained for this model")
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    names, architectures = verifier.get("architectures"), target.get("architectures")
    if names and architectures and not set(names) & set(architectures):
        raise UserError(f"the draft in {folder} is for {names[0]}, but this model is {architectures[0]}; "
                        "use a draft that was trained for this model")


def check_medusa(folder: Path, raw: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raises a `UserError` where Medusa heads are for a target with other settings."""
    for name in MEDUSA:
        if target.get(name) != raw.get(name):
            raise UserError(f"the Medusa heads in {folder} are for a target with {name} {raw.get(name)}, but "
                            f"this one has {target.get(name)}; give heads that were trained for it")


def check_config(folder: Path, raw: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """The checks of a draft of any kind that need nothing but the two config.json files.

    Raises:
        UserError: the draft is for another model.
    """
    kind = kind_of_draft(raw)
    if kind == "medusa":
        check_medusa(folder, raw, target)
    elif kind == "eagle3":
        layer = raw.get("transformer_layer_config") or raw
        hidden = raw.get("target_hidden_size") or layer.get("hidden_size", target["hidden_size"])
        check_eagle3(folder, raw, hidden, layer.get("vocab_size", target["vocab_size"]), target)

"""The Python entry points: `load` a model with a draft and a policy, or `attach` a policy to a model at hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from edgexpert.core.errors import UserError
from edgexpert.encoder.encoder import ImportanceEncoder
from edgexpert.kernels import native
from edgexpert.model.attach import AttachedPolicy
from edgexpert.model.calibrated import read_calibrated
from edgexpert.model.host import HostedModel
from edgexpert.model.loading import load_model
from edgexpert.policy import Policy, policy_named, with_settings
from edgexpert.runtime.engine import Engine
from edgexpert.runtime.tokens import text_and_offsets
from edgexpert.speculation.loading import load_draft


def load(
    model: str = "stories",
    *,
    draft: str = "auto",
    policy: str | Policy = "exact",
    dtype: str | None = None,
    device: str = "cpu",
    encoder: str | None = None,
    threads: int | None = None,
    **overrides: Any,
) -> Engine:
    """An engine that answers prompts.

    On a packed checkpoint the native kernels compute, and PyTorch is set to one thread, since its threads would disturb theirs.

    Args:
        model: a bundled name, a folder or a Hub name of an MoE causal language model.
        draft: ``auto``, ``none``, ``ngram``, or the folder or Hub name of an EAGLE-3 draft or of a smaller causal model.
        policy: a policy's name, or the policy itself.
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``auto`` (the checkpoint's own); see `load_model` for None.
        encoder: folder or Hub name of a BERT-like encoder for prompt-wise reuse; the bundled MiniLM by default.
        threads: that compute, in this process from now on; one for each processor unless given.
        overrides: settings of the policy, such as ``fine_pruning=False`` or ``selection_ratio=0.5``.

    Raises:
        UserError: something cannot be had or does not fit; its text says what to do.
    """
    for option, value in (("model", model), ("draft", draft), ("dtype", dtype), ("device", device)):
        if option == "dtype" and value is None:
            continue
        if not isinstance(value, str):
            raise UserError(f"`{option}` must be a name, not {value!r}")
    chosen = _policy(policy, overrides)
    if threads is not None:
        native.set_threads(threads)
        torch.set_num_threads(threads)
    loaded = load_model(model, dtype=dtype, device=device)
    host = HostedModel(loaded.model, calibrated=read_calibrated(loaded.folder))
    drafting, notes = load_draft(draft, loaded.model, loaded.tokenizer, loaded.folder)
    weigher = ImportanceEncoder.from_pretrained(encoder) if encoder else None
    return Engine(
        host, loaded.tokenizer, name=model, policy=chosen, draft=drafting, encoder=weigher, notes=[*loaded.notes, *notes]
    )


def attach(
    model: PreTrainedModel,
    policy: str | Policy,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    encoder: ImportanceEncoder | None = None,
    **overrides: Any,
) -> AttachedPolicy:
    """Puts a policy onto a transformers model, so that `model.generate` and evaluation harnesses run through it.

    Args:
        tokenizer: the model's; loaded from the model's own folder or Hub name when left out. Prompt-wise reuse needs it.

    Returns what is attached: its ``ledger`` counts the traffic, its ``detach()`` undoes everything.
    """
    chosen = _policy(policy, overrides)
    if chosen.needs_importance:
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.config.name_or_path)
        encoder = encoder or ImportanceEncoder.bundled()

    def weigh(ids: Sequence[int]) -> Tensor:
        assert tokenizer is not None and encoder is not None
        return chosen.weigh_prompt(encoder.weigh(*text_and_offsets(tokenizer, ids)))

    folder = Path(model.config.name_or_path)
    return AttachedPolicy(HostedModel(model, read_calibrated(folder if folder.is_dir() else None)), chosen, weigh)


def _policy(policy: str | Policy, overrides: dict[str, Any]) -> Policy:
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    if not isinstance(chosen, Policy):
        raise UserError(f"`policy` must be a policy or the name of one, not {policy!r}")
    return with_settings(chosen, overrides)

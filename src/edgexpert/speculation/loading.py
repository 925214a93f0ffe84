"""From ``--draft`` to a draft for a given model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edgexpert.core.errors import UserError
from edgexpert.kernels.modules import FloatEmbedding, PackedLinear, RowNorm
from edgexpert.speculation.causal import load_causal_draft
from edgexpert.speculation.checkpoint import load_eagle3
from edgexpert.speculation.draft import Draft
from edgexpert.speculation.eagle3 import Eagle3Model
from edgexpert.speculation.eagle3_draft import Eagle3Draft
from edgexpert.speculation.fit import is_eagle3
from edgexpert.speculation.medusa import MedusaDraft, load_medusa
from edgexpert.speculation.ngram import NgramDraft
from edgexpert.weights.matrix import PackedMatrix
from edgexpert.weights.memory import placed
from edgexpert.weights.rounding import quantise

BESIDE_MODEL = "draft"  # sub-folder of a model in which ``auto`` looks for an EAGLE-3 draft


def load_draft(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> tuple[Draft | None, list[str]]:
    """The draft that ``name`` stands for, and what the user should know about the choice.

    Args:
        name: ``auto`` (an EAGLE-3 draft beside the model, else n-grams), ``none``, ``ngram``, or the folder or Hub name of an
            EAGLE-3 draft or of a smaller causal model.
        folder: where the target lies; None when it came from the Hub.
    """
    if name == "none":
        return None, []
    if name == "ngram":
        return NgramDraft(), []
    if name == "auto":
        beside = folder / BESIDE_MODEL if folder is not None else None
        if beside is None or not (beside / "config.json").is_file():
            return NgramDraft(), ["no EAGLE-3 draft lies beside this model, so prompt look-up (ngram) drafts; see --draft"]
        name = str(beside)
    source = _folder_of(name)
    try:
        config = json.loads((source / "config.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the config.json of the draft {name} is damaged ({error}); download the draft again") from error
    # a packed model computes in float32, whatever its embedding is stored in
    dtype = torch.float32 if isinstance(model.get_input_embeddings(), FloatEmbedding) else model.dtype
    if config.get("model_type") == "medusa":
        return MedusaDraft(load_medusa(source, model.config.get_text_config()).to(model.device, dtype)), []
    if is_eagle3(config):
        draft = load_eagle3(source, model.config, model.get_input_embeddings().weight)
        head = model.get_output_embeddings()
        if not isinstance(head, PackedLinear):
            return Eagle3Draft(draft.to(model.device, dtype)), []
        bits = pack_draft(draft, head.matrix)
        packed = Eagle3Draft(draft)
        runs = "one native call" if packed.is_native else "PyTorch modules"
        return packed, [f"the draft's weights were rounded to {bits} bits, as the target's are; its layer runs in {runs}"]
    return load_causal_draft(source, tokenizer, model.config.get_text_config().vocab_size, dtype, model.device), []


def pack_draft(draft: Eagle3Model, like: PackedMatrix) -> int:
    """Packs a draft's linear layers in place, in the bits of a target's matrix, which are returned. The rest becomes float32, its
    norms those of our kernels."""
    matrices: dict[str, PackedMatrix] = {}
    biases: dict[str, Tensor | None] = {}
    for name, module in list(draft.named_modules()):
        if isinstance(module, nn.Linear):
            group = like.group if like.bits < 16 and module.in_features % like.group == 0 else module.in_features
            matrices[name] = quantise(module.weight.detach().float().T, like.bits, group)
            biases[name] = None if module.bias is None else module.bias.detach().float()
        elif isinstance(module, nn.RMSNorm):
            draft.set_submodule(name, RowNorm(module.weight, draft.config.rms_norm_eps))
    for name, matrix in zip(matrices, placed(list(matrices.values())), strict=True):
        draft.set_submodule(name, PackedLinear(matrix, biases[name]))
    for name, part in draft.named_children():
        if name != "embed_tokens":  # the target's own, in its dtype
            part.float()
    if draft.embed_tokens.weight.dtype != torch.float32:
        draft.embed_tokens.__class__ = FloatEmbedding
    return like.bits


def _folder_of(name: str) -> Path:
    path = Path(name).expanduser()
    if name.strip() and path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"the draft folder {name} has no config.json; give the folder of a draft checkpoint")
        return path
    if not name.strip() or path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"there is no draft {name!r}: give auto, none, ngram, a folder, or a Hub name like owner/name")
    try:
        return Path(snapshot_download(name))
    except Exception as error:  # the Hub client raises many kinds; all mean that the draft cannot be had
        raise UserError(f"the draft {name} could not be had from the Hub; offline, give its folder instead") from error

"""EAGLE-3 checkpoints: reads the formats found in the wild, strictly, and writes two of them.

Official, SpecForge and AngelSlim checkpoints have a flat Llama configuration and a ``midlayer``; those of speculators have
the configuration of their layer nested and call it ``layers.0``.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from edgexpert.core.errors import UserError
from edgexpert.speculation.eagle3 import Eagle3Model
from edgexpert.speculation.eagle3_config import check_target, official_config, parse_config, speculators_config

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def load_eagle3(folder: str | Path, target_config: PreTrainedConfig, target_embedding: Tensor) -> Eagle3Model:
    """Loads a draft for a target.

    Args:
        folder: holds ``config.json`` and the weights, in one file or sharded, as safetensors or pickled tensors.
        target_config: configuration of the target.
        target_embedding: the target's token embedding [V, Ht], which the draft shares unless it brings another one; weights
            take its dtype and device.

    Raises:
        UserError: the draft is damaged, incomplete, of a form that is not supported, or not for this target.
    """
    folder = Path(folder)
    raw = _read_json(folder / "config.json")
    config = parse_config(folder, raw, target_config.get_text_config().num_hidden_layers)
    check_target(folder, raw, config, target_config)
    tensors = {_official_name(name): tensor for name, tensor in _read_tensors(folder).items()
               if not name.endswith("rotary_emb.inv_freq")}

    own = tensors.pop("embed_tokens.weight", None)
    if own is not None and own.shape == target_embedding.shape and torch.equal(own.to(target_embedding), target_embedding):
        own = None
    if own is None and config.hidden_size != config.target_hidden_size:
        raise UserError(f"the draft in {folder} is of another width than its target, so it must hold embed_tokens.weight")
    if config.draft_vocab_size == config.vocab_size and not tensors.get("d2t", torch.zeros(1)).any():
        tensors.pop("d2t", None)  # some write the map that changes nothing
        tensors.pop("t2d", None)

    with torch.device("meta"):
        model = Eagle3Model(config, target_embedding if own is None else None)
    expected = model.state_dict()
    tensors["embed_tokens.weight"] = target_embedding if own is None else own
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise UserError(f"the draft in {folder} lacks the tensor {name}; get a complete copy of it")
        if name not in expected:
            raise UserError(f"the draft in {folder} has the tensor {name}, which EAGLE-3 with this configuration has no use "
                            "for; check its config.json")
        if tensors[name].shape != expected[name].shape:
            raise UserError(f"the tensor {name} of the draft in {folder} has the shape {list(tensors[name].shape)}, but its "
                            f"config.json asks for {list(expected[name].shape)}")
    if "d2t" in tensors:
        tensors["d2t"], tensors["t2d"] = tensors["d2t"].long(), tensors["t2d"].bool()
        _check_vocabulary(folder, tensors["d2t"], tensors["t2d"])
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(target_embedding if tensor.is_floating_point() else target_embedding.device)
    model.load_state_dict(tensors, assign=True)
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the draft needs {path}, which cannot be read; give the folder of an EAGLE-3 draft") from error
    except ValueError as error:
        raise UserError(f"the file {path} is no valid JSON; get a complete copy of the draft") from error
    if not isinstance(value, dict):
        raise UserError(f"the file {path} must hold a JSON object; get a complete copy of the draft")
    return value


def _check_vocabulary(folder: Path, d2t: Tensor, t2d: Tensor) -> None:
    ids = torch.arange(len(d2t)) + d2t
    if sorted(ids.tolist()) != t2d.nonzero()[:, 0].tolist():
        raise UserError(f"the d2t of the draft in {folder} must hold the offset from each draft id to its target id, and t2d "
                        "must mark these ids and no others; get a complete copy of the draft")


def _official_name(name: str) -> str:
    name = name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
    return "embed_tokens.weight" if name.endswith("embed_tokens.weight") else name


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    for index in INDICES:
        if (folder / index).exists():
            shards = {Path(shard).name for shard in _read_json(folder / index).get("weight_map", {}).values()}
            return {name: tensor for shard in sorted(shards) for name, tensor in _read_file(folder / shard).items()}
    for file in SINGLE_FILES:
        if (folder / file).exists():
            return _read_file(folder / file)
    raise UserError(f"the draft in {folder} has no weights; it needs one of {', '.join(SINGLE_FILES + INDICES)}")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return tensors
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"the file {path} is missing or damaged; get a complete copy of the draft") from error


def save_eagle3(model: Eagle3Model, folder: str | Path, format: Literal["official", "speculators"] = "official",
                target_config: PreTrainedConfig | None = None) -> None:
    """Writes a draft as a folder that is complete or not there.

    Args:
        format: ``official`` for most servers, ``speculators`` for vLLM.
        target_config: names the target in the speculators format.

    Raises:
        UserError: the folder holds other files.
    """
    assert model.config.fused_layers[0] != 1, "readers would take it for the output of layer 1"
    folder = Path(folder)
    other = {path.name for path in folder.iterdir()} - {"config.json", "model.safetensors"} if folder.exists() else set()
    if other:
        raise UserError(f"the folder {folder} holds other files ({min(other)}); give an empty folder for the draft")
    tensors = model.state_dict()
    if not model.owns_embedding:
        del tensors["embed_tokens.weight"]
    config = official_config(model.config)
    if format == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        config = speculators_config(model.config, target_config)

    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{role}") for role in ("new", "old"))
    new.mkdir(parents=True)
    (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, new / "model.safetensors")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)

"""From a name to a model: bundled names, folders and Hub names, with errors that say what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

from edgexpert.core.errors import UserError
from edgexpert.kernels import native
from edgexpert.model.packed import load_dequantised, load_pack
from edgexpert.model.supported import check_supported
from edgexpert.weights.files import is_pack
from edgexpert.weights.manifest import read_manifest
from edgexpert.weights.places import local_folder

DTYPES: dict[str, Any] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}
MOST_LAYERS = 4096


@dataclass(frozen=True)
class LoadedModel:
    """A model, its tokenizer and where they came from.

    Attributes:
        folder: None for a Hub name.
        notes: what the user should know about how it computes.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    folder: Path | None
    notes: tuple[str, ...] = ()


def resolve(name: str) -> tuple[str, Path | None]:
    """Where a model name points to: (what transformers is given, the local folder or None for a Hub name)."""
    folder = local_folder(name)
    if folder is None:
        return name, None
    _check_config(folder)
    return str(folder), folder


def _check_config(folder: Path) -> None:
    """A local checkpoint must name a model type that transformers knows."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"the config.json in {folder} is no JSON object with a model_type; download the checkpoint again")
    if not isinstance(config["model_type"], str) or config["model_type"] not in CONFIG_MAPPING:
        raise UserError(f"the model type {config['model_type']} in {folder} is not one that transformers {transformers_version} "
                        "knows; give another model, or upgrade transformers")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:  # a module is made for each before any weight is looked for
        raise UserError(f"the config.json in {folder} asks for {layers} layers, and {MOST_LAYERS} are the most; "
                        "download the checkpoint again")
    if any(isinstance(value, float) and not abs(value) <= torch.finfo(torch.float32).max for value in text.values()):
        raise UserError(f"the config.json in {folder} has a number that no float32 holds; download the checkpoint again")


def load_model(name: str, *, dtype: str | None = None, device: str = "cpu") -> LoadedModel:
    """Loads a causal language model and its tokenizer.

    Args:
        dtype: None for a packed checkpoint as it is, with our kernels, and for any other in float32. A type that is named makes
            floats of a packed checkpoint, too, which PyTorch computes with. ``auto`` is what the checkpoint is stored in.

    Raises:
        UserError: the name leads nowhere, the checkpoint is damaged or of an unknown type, or the device is not there.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown `dtype` {dtype}; choose one of {', '.join(DTYPES)}")
    check_device(device)
    source, folder = resolve(name)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(source)
        if folder is not None and is_pack(folder) and dtype in (None, "auto"):
            if torch.device(device).type != "cpu":
                raise UserError(f"the packed checkpoint {name} runs on the CPU; use `device` cpu, or name a `dtype` to make "
                                "floats of it")
            if native.path() != "torch":
                # PyTorch's threads spin for a while after each of its operations, on the processors that the kernels need:
                # with two threads of each on two processors, plain decoding took 1.4 times as long.
                torch.set_num_threads(1)
            return LoadedModel(load_pack(folder), _load_tokenizer(source, name), name, folder, _notes(folder))
        notes: tuple[str, ...] = ()
        if folder is not None and is_pack(folder):
            model = load_dequantised(folder, DTYPES[dtype or "float32"])
            notes = (f"the packed weights were made {dtype}, and PyTorch computes; leave `dtype` out for the native kernels",)
        else:
            _check_weights(folder)
            with torch.device("meta"):
                check_supported(AutoModelForCausalLM.from_config(config))
            model, info = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype or "float32"], output_loading_info=True)
            missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
            if missing:
                raise UserError(
                    f"the checkpoint {name} lacks {len(missing)} of the model's tensors, {missing[0]} for one; download it again"
                )
        tokenizer = _load_tokenizer(source, name)
    except UserError:
        raise
    except PermissionError as error:
        raise UserError(f"permission to read {error.filename or name} is denied; allow it") from error
    except SafetensorError as error:
        raise UserError(f"a safetensors file of {name} is damaged or truncated ({error}); download it again") from error
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, as a configuration has many fields that may be wrong
        raise UserError(_explain(name, folder, error)) from error
    return LoadedModel(model.to(device), tokenizer, name, folder, notes + _rounding_notes(model.dtype))


def _rounding_notes(dtype: torch.dtype) -> tuple[str, ...]:
    """Where trees may give another text than plain decoding."""
    if dtype == torch.float32:
        return ()
    return (f"in {str(dtype).removeprefix('torch.')} a draft may change the text where two tokens or two experts score alike but "
            "for rounding; float32 has no such ties",)


def _notes(pack: Path) -> tuple[str, ...]:
    """What computes on a packed checkpoint, and whether its text means something."""
    path, threads = native.path(), native.get_threads()
    kernels = "PyTorch instead of native kernels" if path == "torch" else f"{path} kernels"
    computing = f"packed weights, {kernels}, {threads} thread{'s' * (threads != 1)}"
    return (computing, "random weights: speed only, the text means nothing") if read_manifest(pack).dummy else (computing,)


def _load_tokenizer(source: str, name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"the model {name} has no tokenizer that loads; put its tokenizer.json beside its weights") from error


def check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"unknown `device` {device}; use cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("`device` cuda was asked for, but PyTorch sees no CUDA device here; use `device` cpu")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"`device` {device} is not supported; use cpu or cuda")


def _check_weights(folder: Path | None) -> None:
    """Every safetensors file that a local checkpoint names must be there."""
    if folder is None:
        return
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for name in sorted(names):
        if not (folder / name).is_file():
            raise UserError(f"the model folder {folder} lacks the weight file {name}; download the checkpoint again")


def _explain(name: str, folder: Path | None, error: Exception) -> str:
    if folder is None and isinstance(error, OSError):
        return (
            f"the model {name} is not on the Hub, or the Hub cannot be reached; check the name, or give the folder of a "
            "downloaded checkpoint"
        )
    reason = " ".join(str(error).split())[:200].replace("`", "'").rstrip(".") or type(error).__name__
    return f"the model {name} cannot be loaded as a causal language model ({reason}); give another checkpoint"

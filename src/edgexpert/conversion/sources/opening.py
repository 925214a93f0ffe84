"""From what the user calls a source to the source."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig

from edgexpert.conversion.sources.compressed_tensors import CompressedTensorsSource
from edgexpert.conversion.sources.gguf import GgufSource
from edgexpert.conversion.sources.huggingface import HuggingFaceSource, download
from edgexpert.conversion.sources.packed import PackedSource
from edgexpert.conversion.sources.source import Source
from edgexpert.core.errors import UserError
from edgexpert.model.loading import resolve
from edgexpert.weights.files import is_pack


def open_source(name: str) -> Source:
    """The source that a GGUF file, a folder or a Hub name stands for.

    Raises:
        UserError: there is nothing there that can be converted.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return GgufSource(path)
    resolved, folder = resolve(name)
    folder = folder or download(resolved)
    if is_pack(folder):
        return PackedSource(folder, name)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        first_line = str(error).strip().split("\n")[0][:200]
        raise UserError(f"the config.json of {name} cannot be read ({first_line})") from error
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and quantised.get("quant_method") == "compressed-tensors":
        return CompressedTensorsSource(Path(folder), config, name)
    if quantised is not None:
        method = quantised.get("quant_method", "an unknown method")
        raise UserError(
            f"the checkpoint {name} is quantised with {method}, which is not read; "
            "give the checkpoint with 16-bit weights"
        )
    return HuggingFaceSource(Path(folder), config, name)

"""What a checkpoint is, told from its configuration and the headers of its files: no weight is read, and PyTorch stays out.

Sizes follow from the shapes in the files, the rest from config.json (or a GGUF file's metadata).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgexpert.core.errors import UserError
from edgexpert.weights.headers import Header, gguf_headers, safetensors_headers

Kind = Literal["float", "packed", "compressed-tensors", "quantised", "gguf"]
MANIFEST = "manifest.json"
DENSE = "dense.safetensors"
DRAFT = "draft"
"""Sub-folder of a model in which its draft lies."""

TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_selected_experts", "top_k_experts", "top_k")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SCALES = (".scale", "_scale", "_scales", "_scale_inv", "_zero_point")
"""Endings of the names of tensors that belong to another one."""
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64", "I8": "int8", "F8_E4M3": "float8"}
FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Weight:
    """One parameter of the model.

    Attributes:
        shape: [out, in]; of a stack of experts [E, ...].
        bytes: in the file.
        packed: they are computed with as they are in the file, by our kernels.
    """

    values: int
    shape: tuple[int, ...]
    bytes: int
    packed: bool = False


@dataclass(frozen=True)
class Facts:
    """A checkpoint of a causal language model.

    Attributes:
        stored: how its weights are stored, in words: ``bfloat16``, ``packed 4 bits``, ``GGUF Q4_0``.
        dtype: of its floats, for ``float`` alone.
        bits: of the experts, for ``packed`` alone.
        weights: by name, those of the layers that the configuration counts.
        parts: bytes in the file by part; see `part_of`.
        values: the same as number of values.
        kv_values: values of one token in the KV cache.
        disk: bytes of all files.
        random: the weights are random, for timing alone.
        draft: folder of the draft beside the model.
    """

    path: Path
    kind: Kind
    stored: str
    dtype: str | None
    bits: int | None
    family: str
    config: Mapping[str, Any]
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    context: int
    weights: Mapping[str, Weight]
    parts: Mapping[str, int]
    values: Mapping[str, int]
    kv_values: int
    disk: int
    random: bool = False
    draft: Path | None = None

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert in the file."""
        return self.parts.get("experts", 0) / max(1, self.experts * self.moe_layers)

    @property
    def expert_values(self) -> float:
        return self.values.get("experts", 0) / max(1, self.experts * self.moe_layers)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return "lm_head" not in self.parts

    @property
    def parameters(self) -> int:
        return sum(self.values.values())


def is_checkpoint(path: Path) -> bool:
    """Whether there may be a model: a folder with a config.json, or a GGUF file."""
    return (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file())


def read_facts(path: Path) -> Facts:
    """The facts of a folder that holds config.json and safetensors files, be they packed, or of a GGUF file.

    Raises:
        UserError: a file is missing or damaged.
    """
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path)
    config = read_config(path)
    if (path / MANIFEST).is_file():
        manifest = _read_json(path / MANIFEST)
        try:
            weights, bits = dict(_packed_weights(path, manifest)), int(manifest["bits"]["experts"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the file {path / MANIFEST} is damaged ({error}); convert the checkpoint again") from None
        random = manifest.get("dummy") is True
        return _facts(path, "packed", f"packed {bits} bits", config, weights, bits=bits, random=random)
    headers = {name: header for file in weight_files(path) for name, header in safetensors_headers(file).items()}
    return facts_of(path, config, headers)


def facts_of(path: Path, config: Mapping[str, Any], headers: Mapping[str, Header]) -> Facts:
    """The facts of a checkpoint that is not packed, by its configuration and the headers of its files."""
    kind: Kind
    method = (config.get("quantization_config") or {}).get("quant_method")
    largest = Counter[str]()
    for header in headers.values():
        largest[header.dtype] += header.bytes
    dtype = NAMES.get(largest.most_common(1)[0][0], largest.most_common(1)[0][0].lower()) if headers else "nothing"
    if method == "compressed-tensors":
        kind, stored = "compressed-tensors", "compressed-tensors"
    elif method is not None:
        kind, stored = "quantised", str(method)
    else:
        kind, stored = "float", dtype
    return _facts(path, kind, stored, config, dict(_float_weights(headers)), dtype=dtype if kind == "float" else None)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the language model; of one that sees or hears, too, its text part."""
    config = _read_json(folder / "config.json")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder.

    Raises:
        UserError: there is none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted({Path(name).name for name in _read_json(index)["weight_map"].values()})
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"the file {index} is damaged; download the checkpoint again") from None
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("model*.safetensors")) or [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise UserError(f"the model folder {folder} lacks the weight file {file.name}; download the checkpoint again")
    return files


def part_of(name: str, shape: tuple[int, ...]) -> str:
    """The part of the model that a parameter belongs to: as `edgexpert.model.blocks.bytes_by_part` has them."""
    if re.search(r"(^|\.)(embed_tokens|word_embeddings|wte|embed_in|token_embd)\.", name):
        return "embeddings"
    if re.search(r"(^|\.)(lm_head|embed_out)\.weight$|^output\.weight$", name):
        return "lm_head"
    if re.search(r"\.experts\.|_exps\.", name) or (len(shape) == 3 and "conv" not in name):
        return "experts"
    if re.search(r"\.(gate|router)\.|ffn_gate_inp\.|exp_probs_b", name) and "attn" not in name:
        return "router"
    return "attention" if re.search("attn|attention|norm", name) else "shared_experts"


def _facts(path: Path, kind: Kind, stored: str, config: Mapping[str, Any], weights: dict[str, Weight], *,
           dtype: str | None = None, bits: int | None = None, random: bool = False) -> Facts:
    layers = _number(config, path, "num_hidden_layers", "n_layer", "num_layers")
    if layers:  # some checkpoints bring layers that only predict further ahead
        weights = {name: weight for name, weight in weights.items() if (_layer_of(name) or 0) < layers}
    parts, values, moe, routed = Counter[str](), Counter[str](), set(), 0
    for name, weight in weights.items():
        part = part_of(name, weight.shape)
        parts[part] += weight.bytes
        values[part] += weight.values
        if part == "experts":
            moe.add(_layer_of(name))
            number = re.search(r"\.experts\.(\d+)\.", name)
            routed = max(routed, int(number[1]) + 1 if number else weight.shape[0])
    draft = path / DRAFT if (path / DRAFT / "config.json").is_file() else None
    return Facts(
        path, kind, stored, dtype, bits, str(config.get("model_type", "unknown")), config, layers, len(moe),
        routed, _number(config, path, *TOP_K), _number(config, path, "max_position_embeddings", "n_positions"),
        weights, dict(parts), dict(values), _kv_values(weights, config), disk_bytes(path), random, draft,
    )


def _number(config: Mapping[str, Any], path: Path, *names: str) -> int:
    """The first of these settings that is there; 0 for none."""
    value = next((config[name] for name in names if config.get(name) is not None), 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"the config.json in {path} has a {names[0]} that is no number of things; download the checkpoint again")
    return value


def _layer_of(name: str) -> int | None:
    found = re.search(r"(?:layers|blk|h|blocks)\.(\d+)\.", name)
    return int(found[1]) if found else None


def _float_weights(headers: Mapping[str, Header]) -> Iterator[tuple[str, Weight]]:
    """Parameters of plain safetensors files. Tensors that hold the scales of others add their bytes to them."""
    for name, header in headers.items():
        if name.endswith((*SCALES, "_shape", "_g_idx")):
            continue
        own = re.sub("_(packed|blocks)$", "", name)
        beside = sum(headers[own + suffix].bytes for suffix in SCALES if own + suffix in headers)
        values, shape = header.values, header.shape
        if own != name and header.dtype == "I32" and (whole := headers.get(own + "_scale")) is not None and len(shape) == 2:
            # eight 4-bit values, or four of 8 bits, in each integer: as many as make the scales' groups even
            per = 8 if (shape[1] * 8) % max(1, whole.shape[-1]) == 0 else 4
            values, shape = values * per, (shape[0], shape[1] * per)
        elif name.endswith("_blocks"):  # MXFP4: two values in a byte, [E, N, groups, 16]
            values, shape = 2 * values, (*shape[:2], 2 * values // max(1, shape[0] * shape[1]))
        yield own, Weight(values, shape, header.bytes + beside)


def _packed_weights(folder: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, Weight]]:
    """Parameters of a packed checkpoint: an expert's record is one parameter here."""
    dense = safetensors_headers(folder / DENSE)
    for layer in manifest["layers"]:
        gate_up, down = layer["gate_up"], layer["down"]
        values = gate_up["channels"] * gate_up["outputs"] + down["channels"] * down["outputs"]
        count = int(layer["experts"])
        yield (f"model.layers.{int(layer['layer'])}.mlp.experts.records",
               Weight(int(values) * count, (count,), int(layer["stride"]) * count, packed=True))
    for name, linear in manifest["linears"].items():
        size = sum(dense.pop(f"{name}.{array}").bytes for array in ("values", "scales", "zeros") if f"{name}.{array}" in dense)
        shape = int(linear["outputs"]), int(linear["channels"])
        yield name, Weight(shape[0] * shape[1], shape, size, packed=True)
    for name, header in dense.items():
        yield name, Weight(header.values, header.shape, header.bytes)


def _gguf(path: Path) -> Facts:
    metadata, headers = gguf_headers(path)
    architecture = str(metadata.get("general.architecture", "unknown"))

    def setting(name: str) -> Any:
        return metadata.get(f"{architecture}.{name}")

    config = {
        "model_type": architecture, "num_hidden_layers": setting("block_count"), "top_k": setting("expert_used_count"),
        "max_position_embeddings": setting("context_length"), "num_attention_heads": setting("attention.head_count"),
        "num_key_value_heads": setting("attention.head_count_kv"), "head_dim": setting("attention.key_length"),
        "hidden_size": setting("embedding_length"),
    }
    kinds = Counter[str]()
    for header in headers.values():
        kinds[header.dtype] += header.bytes
    largest = kinds.most_common(1)[0][0] if kinds else "without tensors"
    weights = {name: Weight(header.values, header.shape, header.bytes) for name, header in headers.items()}
    return _facts(path, "gguf", f"GGUF {largest}", config, weights)


def _kv_values(weights: Mapping[str, Weight], config: Mapping[str, Any]) -> int:
    """What the KV cache has of one token in all layers: keys and values, or the latent vector that stands for both."""
    total = 0
    for name, weight in weights.items():
        if name.endswith(("kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight")):
            total += weight.shape[0]
        elif name.endswith((".k_proj.weight", ".attn_k.weight")):
            value = weights.get(name.replace("k_proj", "v_proj").replace("attn_k", "attn_v"))
            total += weight.shape[0] + (value.shape[0] if value else weight.shape[0])
    if total:
        return total
    heads = config.get("num_attention_heads") or 0
    kv_heads, size = config.get("num_key_value_heads") or heads, config.get("head_dim")
    layers = config.get("num_hidden_layers") or 0
    if not all(isinstance(number, int) for number in (heads, kv_heads, layers)) or not heads:
        return 0
    return int(2 * layers * kv_heads * (size or (config.get("hidden_size") or 0) // heads))


def disk_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a folder; links count as what they point to."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"the file {path} is no JSON object; download the checkpoint again")
    return value

"""GGUF files, by the `gguf` package. Blocks of 32 four- or eight-bit weights are taken over as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast

from edgexpert.conversion.sources.gguf_config import architecture_of, config_from_metadata, gguf_name
from edgexpert.conversion.sources.source import Source, file_fingerprint, meta_model
from edgexpert.core.errors import UserError
from edgexpert.model.blocks import find_blocks
from edgexpert.weights.manifest import Linear, MatrixLayout
from edgexpert.weights.rounding import PackedMatrix, pack_codes

BLOCK = 32
READY = {4: "Q4_0", 8: "Q8_0"}
"""The GGUF type that is the packed form already, by bits, with groups of 32."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource(Source):
    """One GGUF file."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = _reader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.metadata: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.tokens")
            and not name.startswith("tokenizer.ggml.merges")
        }
        if self.metadata.get("split.count", 1) > 1:
            raise UserError(f"the file {path.name} is one part of several; join them with llama-gguf-split --merge")
        self.architecture = architecture_of(self.metadata, path.name)
        embeddings = self._tensor("token_embd.weight")
        self.config = config_from_metadata(
            self.metadata, int(embeddings.shape[1]), "output.weight" not in self._tensors, path.name
        )
        self.config.dtype = torch.bfloat16
        self.model = meta_model(self.config)
        self.origin = {"kind": self.kind, "name": str(path), "types": sorted({t.tensor_type.name for t in reader.tensors})}
        self.fingerprint = [file_fingerprint(path)]
        self._experts = self._expert_names()

    def _expert_names(self) -> dict[str, list[str]]:
        """GGUF tensors that each expert parameter is made from, gate before up."""
        names: dict[str, list[str]] = {}
        by_id = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for block in find_blocks(self.model):
            stem = f"blk.{block.layer}.ffn_"
            names[by_id[id(block.experts.gate_up_proj)]] = [f"{stem}gate_exps.weight", f"{stem}up_exps.weight"]
            names[by_id[id(block.experts.down_proj)]] = [f"{stem}down_exps.weight"]
        return names

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise UserError(f"the file {self.path.name} lacks the tensor {name}; it is incomplete, so download it again")
        return self._tensors[name]

    def _parts(self, parameter: str) -> list[str]:
        """GGUF tensors that a parameter is made from."""
        if parameter in self._experts:
            return self._experts[parameter]
        name = gguf_name(parameter)
        if name is None:
            raise UserError(f"the parameter {parameter} has no counterpart in a GGUF file of this architecture")
        if name not in self._tensors and name == "output.weight":
            return ["token_embd.weight"]
        if name not in self._tensors and name.endswith("attn_kv_b.weight"):
            return [name.replace("kv_b", "k_b"), name.replace("kv_b", "v_b")]
        return [name]

    def dtype(self, name: str) -> torch.dtype:
        types = [self._tensor(part).tensor_type.name for part in self._parts(name)]
        return FLOATS.get(types[0], torch.float32)

    def read(self, name: str) -> Tensor:
        if name in self._experts:
            return self._read_experts([self._tensor(part) for part in self._experts[name]])
        parts = self._parts(name)
        if len(parts) > 1:
            return self._join_latent(*parts)
        tensor = dequantise_tensor(self._tensor(parts[0]))
        return tensor[self._row_order(name)] if self._is_permuted(name) else tensor

    def _read_experts(self, parts: list[Any]) -> Tensor:
        """[E, N, C] in float32, gate above up, one expert after the other so that nothing is held twice."""
        shapes = [tuple(int(n) for n in reversed(part.shape)) for part in parts]
        whole = torch.empty(shapes[0][0], sum(shape[1] for shape in shapes), shapes[0][2])
        for expert, rows in enumerate(whole):
            for part, target in zip(parts, rows.split([shape[1] for shape in shapes]), strict=True):
                target.copy_(dequantise_tensor(part, expert))
        return whole

    def _join_latent(self, key: str, value: str) -> Tensor:
        """DeepSeek's kv_b_proj, which newer files split by heads into a transposed key part and a value part."""
        keys = dequantise_tensor(self._tensor(key)).transpose(1, 2)  # [heads, nope, rank]
        values = dequantise_tensor(self._tensor(value))  # [heads, v, rank]
        return torch.cat((keys, values), dim=1).flatten(0, 1)

    def _is_permuted(self, name: str) -> bool:
        return self.architecture.permuted and (".q_proj." in name or ".k_proj." in name)

    def _row_order(self, name: str) -> Tensor:
        """Rows of the file's q or k in the order that transformers expects: llama.cpp pairs neighbours for its rotary
        embedding, where transformers pairs the halves of a head."""
        heads = self.config.num_attention_heads if ".q_proj." in name else self.config.num_key_value_heads
        rows = self.model.state_dict()[name].shape[0]
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()

    def packed(
        self, name: str, matrix: MatrixLayout | Linear, count: int, zero_point: bool
    ) -> Iterator[PackedMatrix] | None:
        if zero_point or matrix.group != BLOCK:
            return None
        tensors = [self._tensor(part) for part in self._parts(name)]
        joined = len(tensors) > 1 and name not in self._experts
        if joined or {tensor.tensor_type.name for tensor in tensors} != {READY.get(matrix.bits)}:
            return None
        return self._take_over(name, tensors, matrix, count)

    def _take_over(
        self, name: str, tensors: list[Any], matrix: MatrixLayout | Linear, count: int
    ) -> Iterator[PackedMatrix]:
        for expert in range(count):
            blocks = [_codes_and_scales(t.data[expert] if name in self._experts else t.data, matrix.bits) for t in tensors]
            codes, scales = (torch.cat(parts) for parts in zip(*blocks, strict=True))
            if self._is_permuted(name):
                order = self._row_order(name)
                codes, scales = codes[order], scales[order]
            yield pack_codes(codes.t(), scales.t(), None, matrix.bits)

    def save_extras(self, folder: Path) -> None:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        GenerationConfig(
            bos_token_id=self.config.bos_token_id, eos_token_id=self.config.eos_token_id, pad_token_id=self.config.pad_token_id
        ).save_pretrained(folder)
        if "tokenizer.ggml.model" not in self.metadata:
            return
        try:
            architecture, stored, options = get_gguf_tokenizer(str(self.path))
            backend, _ = convert_gguf_tokenizer(architecture, stored)
        except (ValueError, KeyError) as error:
            raise UserError(f"the tokenizer in {self.path.name} cannot be read ({error})") from error
        PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError("GGUF files are read with the gguf package; install it with: pip install 'edgexpert[gguf]'") from error
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"the file {path} is not a GGUF file; give one, or a folder that holds a Hugging Face checkpoint")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        if "GGMLQuantizationType" in str(error):
            number = re.findall(r"\d+", str(error))[-1]
            raise UserError(
                f"the file {path.name} has a tensor of the unknown type {number}; "
                "a newer gguf package may know it"
            ) from error
        raise UserError(f"the file {path} is truncated or damaged ({error}); download it again") from error
    return reader


def dequantise_tensor(tensor: Any, expert: int | None = None) -> Tensor:
    """A GGUF tensor, or that of one expert, as float32 in row-major order."""
    from gguf import dequantize

    data = tensor.data if expert is None else tensor.data[expert]
    if tensor.tensor_type.name in ("F32", "F16"):
        return torch.from_numpy(data.astype(np.float32))
    try:
        return torch.from_numpy(dequantize(data, tensor.tensor_type))
    except NotImplementedError as error:
        raise UserError(f"the tensor {tensor.name} has the type {tensor.tensor_type.name}, which cannot be read") from error


def _codes_and_scales(data: np.ndarray, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [N, C] and float16 scales [N, C / 32] of Q4_0 or Q8_0 rows.

    A block is a float16 scale and then its 32 codes: bytes for Q8_0; for Q4_0 sixteen bytes whose low halves are the first
    sixteen codes and whose high halves are the others (ggml's block_q4_0, block_q8_0).
    """
    raw = torch.from_numpy(np.array(data)).unflatten(-1, (-1, 2 + BLOCK * bits // 8))  # [N, blocks, bytes]
    scales = raw[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = raw[..., 2:]
    codes = torch.cat((codes & 15, codes >> 4), dim=-1) if bits == 4 else codes.contiguous().view(torch.int8)
    return codes.flatten(-2), scales

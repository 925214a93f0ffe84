"""A packed checkpoint back as a compressed-tensors one, for vLLM and everything else that reads that format.

Codes, scales and zero points are those of the packed checkpoint. Parts with 16 bits, the lm_head among them, are written as
bfloat16 weights. Experts of families whose checkpoints hold all of a layer's in one tensor, for which the format has no place,
are written as float16 weights; a tied lm_head is left to the embeddings, as the format's readers expect.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from edgexpert.conversion.convert import Advance
from edgexpert.conversion.sources.compressed_tensors import FORMAT, PACKED, WEIGHT, require_library
from edgexpert.conversion.sources.huggingface import EXTRAS, INDEX
from edgexpert.conversion.sources.source import meta_model
from edgexpert.core.library import revert_weight_conversion
from edgexpert.core.output import new_folder, synced, writing
from edgexpert.weights.files import Pack
from edgexpert.weights.manifest import DENSE, EXPERTS, LayerLayout
from edgexpert.weights.matrix import PackedMatrix, dequantise
from edgexpert.weights.rounding import decode

OWN_SETTINGS = ("edgexpert_dummy",)


class Exporter:
    """Writes one shard for each layer, and one for everything that is not in a layer with experts."""

    def __init__(self, pack: Pack, folder: Path) -> None:
        self.pack, self.folder = pack, folder
        self.model = meta_model(pack.config)
        self.files: dict[str, str] = {}
        self.size = 0
        self.quantised: dict[int, set[str]] = {}  # module patterns by bits

    def names(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A parameter under the checkpoint's names: experts' tensors one by one where the family stores them so."""
        return revert_weight_conversion(self.model, {name: tensor})

    def has_place(self, name: str) -> bool:
        """Whether the format can hold a parameter's integers: it knows matrices alone, one for each expert."""
        return all(part.dim() == 2 for part in self.names(name, self.model.get_parameter(name)).values())

    def parts(self, name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> dict[str, Tensor]:
        """The tensors of a parameter with signed codes [.., N, C], scales and zero points [.., N, C / group]."""
        from compressed_tensors.compressors.pack_quantized import pack_to_int32

        stored: dict[str, Tensor] = {}
        for key, part in self.names(name, codes).items():
            module = key.removesuffix(WEIGHT)
            stored[module + PACKED] = pack_to_int32(part.contiguous(), bits)
            stored[f"{module}.weight_shape"] = torch.tensor(part.shape)
            self.quantised.setdefault(bits, set()).add(pattern_of(module))
        for key, part in self.names(name, scales).items():
            stored[f"{key.removesuffix(WEIGHT)}.weight_scale"] = part.contiguous()
        if zeros is not None:
            for key, part in self.names(name, zeros).items():
                packed = pack_to_int32(part.contiguous(), bits, packed_dim=0)
                stored[f"{key.removesuffix(WEIGHT)}.weight_zero_point"] = packed
        return stored

    def linear(self, name: str, matrix: PackedMatrix) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        if head is not None and name in {f"{n}.weight" for n, module in self.model.named_modules() if module is head}:
            if self.pack.config.get_text_config().tie_word_embeddings:
                return {}
            return {name: dequantise(matrix).t().bfloat16().contiguous()}
        if matrix.bits == 16:
            return self.names(name, dequantise(matrix).t().bfloat16().contiguous())
        return self.parts(name, *signed(matrix), matrix.bits)

    def experts(self, layer: LayerLayout) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for part, matrices in self.pack.experts(layer).items():
            name = layer.parameters[part]
            if matrices.bits == 16 or not self.has_place(name):
                stored_as = torch.bfloat16 if matrices.bits == 16 else torch.float16  # the type of the scales
                weight = torch.stack([dequantise(matrices[e]).to(stored_as) for e in range(layer.experts)])
                stored.update(self.names(name, weight if layer.transposed else weight.transpose(1, 2).contiguous()))
                continue
            codes, scales, zeros = zip(*(signed(matrices[e]) for e in range(layer.experts)), strict=True)
            joined = None if zeros[0] is None else torch.stack(zeros)
            stored.update(self.parts(name, torch.stack(codes), torch.stack(scales), joined, matrices.bits))
        return stored

    def save(self, tensors: dict[str, Tensor], shard: str) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.folder / shard, metadata={"format": "pt"})
        self.files.update(dict.fromkeys(tensors, shard))
        self.size += sum(tensor.nbytes for tensor in tensors.values())

    def save_config(self) -> None:
        config = json.loads((self.pack.folder / "config.json").read_text())
        for setting in OWN_SETTINGS:
            config.pop(setting, None)
        config["quantization_config"] = self.quantisation()
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        index = {"metadata": {"total_size": self.size}, "weight_map": self.files}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for name in EXTRAS:
            if (self.pack.folder / name).is_file():
                shutil.copyfile(self.pack.folder / name, self.folder / name)

    def quantisation(self) -> dict[str, Any]:
        manifest = self.pack.manifest
        packed = set().union(*self.quantised.values()) if self.quantised else set()
        linears = {pattern_of(name) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        return {
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{bits}_bits": {
                    "targets": sorted(patterns),
                    "weights": {
                        "num_bits": bits, "type": "int", "strategy": "group", "group_size": manifest.group_size,
                        "symmetric": not (manifest.zero_point and bits == 4),
                    },
                }
                for bits, patterns in sorted(self.quantised.items())
            },
            "ignore": sorted(linears - packed),
        }


def export(source: Path, destination: Path, advance: Advance = lambda done, total: None) -> None:
    """Writes a packed checkpoint as a compressed-tensors one, layer by layer.

    Raises:
        UserError: the destination exists, the source is no packed checkpoint, or the family's experts do not fit the format.
    """
    require_library()
    pack = Pack(source)
    with new_folder(destination) as folder, writing(destination):
        shutil.rmtree(folder, ignore_errors=True)  # a shard takes seconds: an interrupted export begins anew
        folder.mkdir()
        try:
            _export(Exporter(pack, folder), advance)
            folder.rename(destination)
            synced(destination.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _export(exporter: Exporter, advance: Advance) -> None:
    pack = exporter.pack
    layers, total = pack.manifest.layers, len(pack.manifest.layers) + 1
    expected = sum(pack.manifest.files[file]["bytes"] for file in (DENSE, EXPERTS))  # the lm_head grows a little
    dense: dict[str, Tensor] = {}
    for name, stored in pack.dense().items():
        dense.update(exporter.linear(name, stored) if isinstance(stored, PackedMatrix) else exporter.names(name, stored))
    exporter.save(dense, shard_name(1, total))
    advance(exporter.size, max(expected, exporter.size))
    for done, layer in enumerate(layers, start=2):
        exporter.save(exporter.experts(layer), shard_name(done, total))
        advance(exporter.size, max(expected, exporter.size))
    exporter.save_config()


def shard_name(number: int, total: int) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def pattern_of(module: str) -> str:
    """A regular expression for a module and its like in other layers and experts."""
    return "re:^" + re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(module)) + "$"


def signed(matrix: PackedMatrix) -> tuple[Tensor, Tensor, Tensor | None]:
    """Signed codes [N, C], scales [N, C / group] and signed zero points of a packed matrix."""
    assert matrix.scales is not None
    codes = decode(matrix).t()
    if matrix.bits == 4:
        codes = codes.to(torch.int8) - 8
    zeros = None if matrix.zeros is None else matrix.zeros[:, : matrix.outputs].t().to(torch.int8) - 8
    return codes, matrix.scales[:, : matrix.outputs].t(), zeros

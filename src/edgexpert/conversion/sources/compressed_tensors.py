"""compressed-tensors checkpoints with integer weights ("pack-quantized"), as LLM Compressor writes and vLLM reads them.

A matrix [N, C] is stored as three or four tensors beside each other: NAME.weight_packed (int32, dense along C),
NAME.weight_scale [N, C / group], NAME.weight_shape and, if asymmetric, NAME.weight_zero_point (int32, dense along N).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from edgexpert.conversion.sources.huggingface import HuggingFaceSource
from edgexpert.core.errors import UserError
from edgexpert.core.library import Concatenate, MergeModulelist
from edgexpert.weights.manifest import Linear, MatrixLayout
from edgexpert.weights.rounding import SYMMETRIC_ZERO, PackedMatrix, pack_codes

FORMAT = "pack-quantized"
PACKED, WEIGHT = ".weight_packed", ".weight"


class CompressedTensorsSource(HuggingFaceSource):
    """A folder with config.json and safetensors files of packed integers."""

    kind = "compressed-tensors"

    def __init__(self, folder: Path, config: PreTrainedConfig, name: str) -> None:
        require_library()
        quantisation = config.quantization_config
        if quantisation.get("format") != FORMAT:
            raise UserError(
                f"the checkpoint {name} has the compressed-tensors format {quantisation.get('format')}; only {FORMAT} is read"
            )
        weights = [group["weights"] for group in quantisation["config_groups"].values()]
        self._bits = {int(w["num_bits"]) for w in weights}
        if any(w["type"] != "int" for w in weights) or len(self._bits) != 1:
            raise UserError(f"the checkpoint {name} has weights that are not integers of one width; that is not read")
        del config.quantization_config
        super().__init__(folder, config, name)

    def _stored(self, files: dict[str, str]) -> dict[str, str]:
        """Every packed matrix under the name that it had before it was packed."""
        self._raw = files
        stems = [key.removesuffix(PACKED) for key in files if key.endswith(PACKED)]
        if any(f"{stem}.weight_g_idx" in files for stem in stems):
            raise UserError("the checkpoint's groups are reordered by activation (weight_g_idx), which is not read")
        parts = {f"{stem}.weight_{part}" for stem in stems for part in ("packed", "scale", "shape", "zero_point")}
        self._packed = {stem + WEIGHT for stem in stems}
        return {**{k: f for k, f in files.items() if k not in parts}, **{stem + WEIGHT: files[stem + PACKED] for stem in stems}}

    def tensor_dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self._packed else super().tensor_dtype(key)

    def tensor(self, key: str) -> Tensor:
        if key not in self._packed:
            return super().tensor(key)
        codes, scales, zeros = self._codes(key)
        grouped = codes.unflatten(-1, (scales.shape[-1], -1)).float()
        if zeros is not None:
            grouped = grouped - zeros[..., None]
        return (grouped * scales.float()[..., None]).flatten(-2)

    def _codes(self, key: str) -> tuple[Tensor, Tensor, Tensor | None]:
        """Signed codes [.., N, C], scales [.., N, C / group] and signed zero points of a matrix, or a stack of matrices."""
        from compressed_tensors.compressors.pack_quantized import unpack_from_int32

        stem, bits = key.removesuffix(WEIGHT), next(iter(self._bits))
        packed, scales, shape = (self._part(f"{stem}.weight_{part}") for part in ("packed", "scale", "shape"))
        size = torch.Size(shape.tolist())
        codes = unpack_from_int32(packed, bits, size)
        zeros = None
        if f"{stem}.weight_zero_point" in self._raw:
            rows = torch.Size((*size[:-1], scales.shape[-1]))
            zeros = unpack_from_int32(self._part(f"{stem}.weight_zero_point"), bits, rows, packed_dim=0)
        return codes, scales, zeros

    def _part(self, key: str) -> Tensor:
        if key not in self._raw:
            raise UserError(f"the checkpoint {self.folder} lacks the tensor {key}; download it again")
        self._files.setdefault(key, self._raw[key])
        return self.open(key, lambda file: file.get_tensor(key))

    def packed(
        self, name: str, matrix: MatrixLayout | Linear, count: int, zero_point: bool
    ) -> Iterator[PackedMatrix] | None:
        name, found = self._made_from(name)
        keys = [key for key, _ in found]
        converter = self._converters.get(name)
        side_by_side = converter is None or all(isinstance(op, MergeModulelist | Concatenate) for op in converter.operations)
        if not side_by_side or not set(keys) <= self._packed or not all(self._fits(key, matrix, zero_point) for key in keys):
            return None
        if converter is None:
            return self._take_over_stack(keys[0], matrix, count, zero_point)
        parts = [[key for key, other in found if other == pattern] for pattern in converter.source_patterns]
        return (self._take_over([self._codes(k) for k in column], matrix, zero_point) for column in zip(*parts, strict=True))

    def _fits(self, key: str, matrix: MatrixLayout | Linear, zero_point: bool) -> bool:
        """Whether the packed form can hold a stored matrix exactly."""
        if matrix.group is None or matrix.bits not in self._bits:
            return False
        codes, scales, zeros = self._codes(key)
        return (
            codes.shape[-1] // scales.shape[-1] % matrix.group == 0
            and (zeros is None or (zero_point and matrix.bits == 4))
            and torch.equal(scales.half().float(), scales.float())
            and bool(codes.min() >= (-127 if matrix.bits == 8 else -8))
        )

    def _take_over_stack(
        self, key: str, matrix: MatrixLayout | Linear, count: int, zero_point: bool
    ) -> Iterator[PackedMatrix]:
        """The matrices of one tensor [E, N, C], or the one of a tensor [N, C]."""
        codes, scales, zeros = (
            [None] * count if part is None else part if part.dim() == 3 else part[None] for part in self._codes(key)
        )
        for parts in zip(codes, scales, zeros, strict=True):
            yield self._take_over([parts], matrix, zero_point)

    def _take_over(
        self, parts: list[tuple[Tensor, Tensor, Tensor | None]], matrix: MatrixLayout | Linear, zero_point: bool
    ) -> PackedMatrix:
        """One packed matrix of several that stand side by side."""
        assert matrix.group is not None
        offset, kind = (SYMMETRIC_ZERO, torch.uint8) if matrix.bits == 4 else (0, torch.int8)
        codes = (torch.cat([part[0] for part in parts]).t() + offset).to(kind)
        scales = torch.cat([part[1] for part in parts]).t().half()
        repeat = matrix.channels // matrix.group // len(scales)  # a stored group may be several of ours
        scales = scales.repeat_interleave(repeat, dim=0)
        zeros = None
        if zero_point and matrix.bits == 4:
            signed = [torch.zeros_like(part[0][:, :1]) if part[2] is None else part[2] for part in parts]
            zeros = (torch.cat(signed).t() + offset).to(kind).repeat_interleave(repeat, dim=0).expand_as(scales)
        return pack_codes(codes, scales, zeros, matrix.bits)


def require_library() -> None:
    """Raises a `UserError` where the package is not installed."""
    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise UserError(
            "compressed-tensors checkpoints need that package; install it with: pip install 'edgexpert[compressed-tensors]'"
        ) from error

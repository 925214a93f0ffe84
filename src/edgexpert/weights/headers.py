"""Names, types and shapes of the tensors in a file, from its header alone. Nothing here imports PyTorch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from edgexpert.core.errors import UserError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
              "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
"""Bytes of one value of a safetensors file, by type."""

GGUF_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}
"""Name, values of a block and bytes of a block, by the number that a GGUF file has for a type (ggml.h)."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME, _MOST_DIMENSIONS = 1 << 16, 8
_KEPT_ITEMS = 64


@dataclass(frozen=True)
class Header:
    """One tensor of a file: its type as the file calls it, its shape (row-major), its bytes."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def values(self) -> int:
        return prod(self.shape)


def safetensors_headers(path: Path) -> dict[str, Header]:
    """The tensors of a safetensors file.

    Raises:
        UserError: it cannot be read, or is no complete safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: of_shape(part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise UserError(f"the file {path} is damaged or truncated ({error}); download it again") from None


def of_shape(dtype: str, shape: list[int]) -> Header:
    """The header of a tensor in a safetensors file."""
    return Header(dtype, tuple(shape), prod(shape) * ITEM_BYTES.get(dtype, 1))


def gguf_headers(path: Path) -> tuple[dict[str, Any], dict[str, Header]]:
    """Metadata and tensors of a GGUF file. Of arrays longer than 64 items, such as vocabularies, only the length is kept.

    Raises:
        UserError: it cannot be read, or is no complete GGUF file of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            return _read_gguf(file, path)
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror})") from None
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError, ValueError) as error:
        raise UserError(f"the file {path} is damaged or truncated ({error}); download it again") from None


def _read_gguf(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, Header]]:
    size = path.stat().st_size
    if file.read(4) != b"GGUF":
        raise UserError(f"the file {path} is not a GGUF file; give one, or a folder that holds a Hugging Face checkpoint")
    version, tensors, entries = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise UserError(f"the file {path} is of GGUF version {version}; convert it with a newer llama.cpp")
    if tensors + entries > size:
        raise ValueError("more entries than bytes")
    metadata = {_name(file): _value(file, _unpack(file, "<I")[0], size) for _ in range(entries)}
    headers, end = {}, 0
    for _ in range(tensors):
        name = _name(file)
        (dimensions,) = _unpack(file, "<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = _unpack(file, f"<{dimensions}Q")[::-1]
        number, offset = _unpack(file, "<IQ")
        kind, values, block = GGUF_TYPES.get(number, (f"type {number}", 1, 0))
        headers[name] = Header(kind, shape, prod(shape) // values * block)
        end = max(end, offset + headers[name].bytes)
    alignment = int(metadata.get("general.alignment", 32)) or 32
    if -(-file.tell() // alignment) * alignment + end > size:
        raise ValueError(f"it ends after {size} bytes")
    return metadata, headers


def _unpack(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _name(file: BinaryIO, longest: int = _LONGEST_NAME) -> str:
    (length,) = _unpack(file, "<Q")
    if length > longest:
        raise ValueError(f"a name of {length} bytes")
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    if kind == _STRING:
        return _name(file, size)
    if kind != _ARRAY:
        return _unpack(file, _SCALARS[kind])[0]
    of, length = _unpack(file, "<IQ")
    if of == _ARRAY or length > size:
        raise ValueError(f"an array of {length} items")
    if of in _SCALARS and length > _KEPT_ITEMS:
        file.seek(length * struct.calcsize(_SCALARS[of]), 1)
        return length
    items = [_value(file, of, size) for _ in range(length)]
    return items if length <= _KEPT_ITEMS else length

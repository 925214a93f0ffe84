"""Writing a packed checkpoint so that a kill at any moment leaves something that the same command continues.

Everything is written into a folder beside the destination. A journal there names each parameter that is safely on disk; the
folder takes the destination's name when all are.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgexpert.conversion.layout import Layout
from edgexpert.conversion.options import PackOptions
from edgexpert.conversion.sources.source import Source
from edgexpert.core.errors import UserError
from edgexpert.core.output import synced, unfinished
from edgexpert.weights.files import sha256
from edgexpert.weights.manifest import DENSE, EXPERTS, MANIFEST, PART_ALIGNMENT, Manifest, align
from edgexpert.weights.rounding import PackedMatrix

JOURNAL = "journal.jsonl"
SAFETENSORS_DTYPES = {
    torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
}
SPARE_BYTES = 64 << 20
"""Room for the tokenizer, the configuration and the manifest."""


class Writer:
    """Fills the files of a packed checkpoint, parameter by parameter, in any order."""

    def __init__(self, destination: Path, layout: Layout, source: Source, request: dict[str, Any]) -> None:
        """Begins a conversion, or goes on with an interrupted one.

        Args:
            request: source and options as JSON; an interrupted conversion is continued by the same request only.
        """
        self.destination, self.layout = destination, layout
        self.folder = unfinished(destination)
        self.finished: dict[str, dict[str, Any]] = {}
        header = self._dense_header()
        self._dense_start = len(header)
        entries = self._read_journal()
        if entries:
            self._resume(entries, request)
            self._prepare(header, source)
            return
        self._begin(request)
        try:
            self._prepare(header, source)
        except UserError:
            shutil.rmtree(self.folder)
            raise

    def _read_journal(self) -> list[dict[str, Any]]:
        path = self.folder / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if lines and not lines[-1].endswith(b"\n"):  # a kill came while this line was written
            path.write_bytes(b"".join(lines[:-1]))
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def _begin(self, request: dict[str, Any]) -> None:
        if self.folder.exists() and {path.name for path in self.folder.iterdir()} - {JOURNAL}:
            raise UserError(f"the folder {self.folder} is in the way and holds no conversion; remove it")
        with self._disk():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._check_space()
            self.folder.mkdir(exist_ok=True)
            self._append({"request": request})

    def _resume(self, entries: list[dict[str, Any]], request: dict[str, Any]) -> None:
        if entries[0]["request"] != json.loads(json.dumps(request)):
            raise UserError(
                f"the folder {self.folder} holds an unfinished conversion of another source or with other options; "
                "give those again to continue it, or remove the folder"
            )
        self.finished = {entry["name"]: entry for entry in entries[1:]}

    def _prepare(self, header: bytes, source: Source) -> None:
        """Everything but the weights, and the weight files in their full size."""
        with self._disk():
            source.config.save_pretrained(self.folder)
            source.save_extras(self.folder)
            for name, content, size in (
                (EXPERTS, b"", self.layout.experts_bytes), (DENSE, header, len(header) + self.layout.dense_bytes)
            ):
                with (self.folder / name).open("r+b" if (self.folder / name).exists() else "wb") as file:
                    file.write(content)
                    file.truncate(size)

    def _check_space(self) -> None:
        needed = self.layout.experts_bytes + self.layout.dense_bytes + SPARE_BYTES
        free = shutil.disk_usage(self.folder.parent).free
        if free < needed:
            raise UserError(
                f"the folder {self.folder.parent} has {free / 1e9:.1f} GB free and the checkpoint takes {needed / 1e9:.1f} GB; "
                "make room, or give a folder on another disk"
            )

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"the disk is full; make room and give the same command again to continue, or remove {self.folder}"
                ) from error
            raise UserError(f"the folder {self.folder} cannot be written ({error.strerror}); give a folder that can") from error

    def write_experts(self, name: str, matrices: Iterator[PackedMatrix], facts: dict[str, Any]) -> None:
        """All experts' matrices of one parameter. ``facts`` go into the journal; they may be filled by the iteration."""
        layer, part = self.layout.experts[name]
        extents = getattr(layer, part).extents
        with (self.folder / EXPERTS).open("r+b") as file:
            for expert, matrix in enumerate(matrices):
                for field, extent in extents.items():
                    self._write(file, layer.offset + expert * layer.stride + extent.offset, getattr(matrix, field))
            self._sync(file)
        self._finish(name, facts)

    def write_linear(self, name: str, matrix: PackedMatrix, facts: dict[str, Any]) -> None:
        parts = {f"{name}.{part}": getattr(matrix, part) for part in ("values", "scales", "zeros")}
        self._write_dense(name, {key: tensor for key, tensor in parts.items() if tensor is not None}, facts)

    def write_float(self, name: str, tensor: Tensor) -> None:
        self._write_dense(name, {name: tensor.to(self.layout.dense[name].dtype)}, {})

    def _write_dense(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        with (self.folder / DENSE).open("r+b") as file:
            for key, tensor in tensors.items():
                place = self.layout.dense[key]
                assert tuple(tensor.shape) == place.shape and tensor.dtype == place.dtype, key
                self._write(file, self._dense_start + place.offset, tensor)
            self._sync(file)
        self._finish(name, facts)

    def _write(self, file: Any, offset: int, tensor: Tensor) -> None:
        with self._disk():
            file.seek(offset)
            file.write(tensor.contiguous().view(torch.uint8).numpy() if tensor.dim() else tensor[None].view(torch.uint8).numpy())

    def _sync(self, file: Any) -> None:
        with self._disk():
            file.flush()
            os.fsync(file.fileno())

    def _finish(self, name: str, facts: dict[str, Any]) -> None:
        self.finished[name] = {"name": name, **facts}
        self._append(self.finished[name])

    def _append(self, entry: dict[str, Any]) -> None:
        with self._disk(), (self.folder / JOURNAL).open("a") as file:
            file.write(json.dumps(entry) + "\n")
            self._sync(file)

    def _dense_header(self) -> bytes:
        """The head of a safetensors file: its length as eight bytes, then JSON, padded so that the tensors are aligned."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, tensor in self.layout.dense.items():
            header[name] = {
                "dtype": SAFETENSORS_DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [tensor.offset, tensor.offset + tensor.bytes],
            }
        text = json.dumps(header).encode()
        text += b" " * (align(8 + len(text), PART_ALIGNMENT) - 8 - len(text))
        return len(text).to_bytes(8, "little") + text

    def complete(self, source: Source, options: PackOptions) -> Manifest:
        """Adds the manifest and gives the folder its name."""
        with self._disk():
            manifest = self._manifest(source, options)
            manifest.save(self.folder)
            self.folder.rename(self.destination)
            synced(self.destination.parent)
            (self.destination / JOURNAL).unlink()
        return manifest

    def _manifest(self, source: Source, options: PackOptions) -> Manifest:
        def errors(name: str) -> list[float]:
            return self.finished[name].get("errors", [])

        layers = [
            replace(layer, errors={part: errors(name) for part, name in layer.parameters.items()}) for layer in self.layout.layers
        ]
        linears = {
            name: replace(linear, error=(errors(name) or [0.0])[0]) for name, linear in self.layout.linears.items()
        }
        kept_out = {JOURNAL, MANIFEST}
        return Manifest(
            source=source.origin, method="random" if source.dummy else options.method, dummy=source.dummy,
            bits=options.bits_by_part,
            group_size=options.group_size, zero_point=options.zero_point, layers=layers, linears=linears,
            rtn_fallbacks=[fall_back for entry in self.finished.values() for fall_back in entry.get("rtn_fallbacks", ())],
            files={
                path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
                for path in sorted(self.folder.iterdir()) if path.is_file() and path.name not in kept_out
            },
            edgexpert=version("edgexpert"),
        )

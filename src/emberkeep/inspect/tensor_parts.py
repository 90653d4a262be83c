"""Tensors whose row counts are known only at the end: each grows in a file of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep._types import Array
from emberkeep.checkpoint.contents import SAFETENSORS_TYPES
from emberkeep.repository import Repository
from emberkeep.rows.snapshot import Chunk

_COPY_NBYTES = 8 * 2**20
_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


class TensorParts:
    """The ids and planes of tables, appended chunk by chunk.

    Formats want a tensor after the other, but rows come with all their planes. So every tensor
    grows in a file of its own below `scratch`; at the end they are joined, or handed out as arrays
    that are mapped, not read.
    """

    def __init__(
        self, scratch: Path, repository: Repository, names: Mapping[str, Callable[[str], str]]
    ) -> None:
        """`names` gives for each table the name of the tensor that a plane becomes."""
        self._parts: dict[tuple[str, str], Path] = {}
        self._tensors: dict[tuple[str, str], tuple[str, int | None, np.dtype[Any]]] = {}
        self.rows = dict.fromkeys(names, 0)
        scratch.mkdir(exist_ok=True)
        for table, name_of in names.items():
            planes = repository.tables[table]["planes"]
            tensors: dict[str, tuple[int | None, np.dtype[Any]]] = {"id": (None, np.dtype("i8"))}
            tensors |= {name: (width, np.dtype(kind)) for name, (width, kind) in planes.items()}
            for name, (width, kind) in tensors.items():
                self._tensors[table, name] = (name_of(name), width, kind)
                self._parts[table, name] = scratch / f"tensor-{len(self._parts)}"

    def append(self, chunk: Chunk) -> None:
        self.rows[chunk.table] += chunk.ids.size
        assert chunk.planes is not None
        for name, values in {"id": chunk.ids, **chunk.planes}.items():
            # Opened each time: there may be more tensors than a process may have open files.
            with open(self._parts[chunk.table, name], "ab") as part:
                part.write(np.ascontiguousarray(values).data)

    def arrays(self) -> dict[str, Array]:
        """Every tensor by its name; writable only in memory, since torch warns of others."""
        found: dict[str, Array] = {}
        for (table, plane), (name, width, kind) in self._tensors.items():
            rows = self.rows[table]
            shape = (rows,) if width is None else (rows, width)
            found[name] = (
                np.memmap(self._parts[table, plane], kind, "c", shape=shape)
                if rows
                else np.empty(shape, kind)
            )
        return found

    def write_safetensors(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Joins them to a safetensors file, each removed as soon as it was copied."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for (table, _), (name, width, kind) in self._tensors.items():
            rows = self.rows[table]
            start, end = end, end + rows * (width or 1) * kind.itemsize
            header[name] = {
                "dtype": _NAMES[kind],
                "shape": [rows] if width is None else [rows, width],
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for (table, _), part in self._parts.items():
                if self.rows[table]:
                    with open(part, "rb") as source:
                        shutil.copyfileobj(source, file, _COPY_NBYTES)
                    part.unlink()

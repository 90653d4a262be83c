"""One version as plain files that need no emberkeep to be read.

Rows are streamed: memory holds a chunk of them and the ids of increments, whatever the table. What
is written appears under its name complete or not at all.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from emberkeep._types import Json
from emberkeep.checkpoint.contents import (
    SAFETENSORS_TYPES,
    Hold,
    check_tables,
    dense_bytes,
    dense_tensors,
    merged_rows,
)
from emberkeep.errors import ConfigError, StorageError
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import Pool

_COPY_NBYTES = 8 * 2**20
_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space or choose another place",
    errno.EDQUOT: "the quota is used up: free space or choose another place",
    errno.EACCES: "check the owner and permissions of the directory",
    errno.EROFS: "the file system is mounted read-only: choose another place",
    errno.ENOENT: "create the directory first",
    errno.ENOTDIR: "a file stands where a directory is needed: choose another place",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: the files, and how many rows of each table."""

    manifest: Manifest
    files: tuple[Path, ...]
    rows: Mapping[str, int]
    nbytes: int


def to_safetensors(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    tables: Sequence[str] | None = None, force: bool = False,
) -> Exported:  # fmt: skip
    """One file with the tensors `<table>/id` [rows] and `<table>/<plane>` [rows, width]."""
    names = check_tables(repository, tables)
    with _output(path, force=force) as scratch, Hold(repository, version) as hold:
        chain = repository.chain(version)
        staged = scratch / "export.safetensors"
        writer = _Safetensors(staged, scratch, {name: f"{name}/" for name in names}, repository)
        for chunk in _rows(repository, chain, pool, names, hold):
            writer.append(chunk)
        writer.finish(_about(chain[-1]))
        return _exported(chain[-1], writer.rows, {path: staged})


def to_parquet(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *,
    tables: Sequence[str] | None = None, force: bool = False,
) -> Exported:  # fmt: skip
    """A directory with one file per table: `id`, `weight` as a list, and the other planes.

    Planes of one number a row are plain columns, wider ones are lists.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = check_tables(repository, tables)
    with (
        _output(path, force=force, holds=["*.parquet"]) as scratch,
        Hold(repository, version) as hold,
    ):
        chain = repository.chain(version)
        folder = scratch / "tables"
        folder.mkdir()
        writers = {}
        try:
            for name in names:
                planes = repository.tables[name]["planes"]
                schema = pa.schema(
                    [("id", pa.int64()), *((p, _arrow_type(*spec)) for p, spec in planes.items())],
                    metadata={"emberkeep": json.dumps(_about(chain[-1]))},
                )
                writers[name] = pq.ParquetWriter(folder / f"{file_name(name)}.parquet", schema)
            rows = dict.fromkeys(names, 0)
            for chunk in _rows(repository, chain, pool, names, hold):
                writer = writers[chunk.table]
                writer.write_table(
                    pa.Table.from_arrays(_columns(chunk, writer.schema), schema=writer.schema)
                )
                rows[chunk.table] += chunk.ids.size
        finally:
            for writer in writers.values():
                writer.close()
        staged = {path / file.name: file for file in sorted(folder.iterdir())}
        return _exported(chain[-1], rows, staged, whole=(folder, path))


def to_directory(
    repository: Repository, version: VersionId, path: Path, pool: Pool, *, force: bool = False
) -> Exported:
    """All of a version as a directory.

    `version.json` holds the step, the reader's position, the user's own state, counters and what
    tables know beside their rows; `dense.safetensors` the dense state as it was saved;
    `tables/<table>.safetensors` the tensors `id` and one per plane.
    """
    names = check_tables(repository, None)
    holds = ["version.json", "dense.safetensors", "tables"]
    with (
        _output(path, force=force, holds=holds) as scratch,
        Hold(repository, version) as hold,
    ):
        chain = repository.chain(version)
        newest = chain[-1]
        folder = scratch / "version"
        (folder / "tables").mkdir(parents=True)
        writers = {
            name: _Safetensors(
                folder / "tables" / f"{file_name(name)}.safetensors",
                scratch / f"table-{position}",
                {name: ""},
                repository,
            )
            for position, name in enumerate(names)
        }
        for chunk in _rows(repository, chain, pool, names, hold):
            writers[chunk.table].append(chunk)
        for writer in writers.values():
            writer.finish(_about(newest))
        dense = dense_bytes(repository, newest)
        if dense is not None:
            dense_tensors(newest.name, dense)
            (folder / "dense.safetensors").write_bytes(dense)
        state = json.dumps(state_of(repository, newest), indent=2, ensure_ascii=False)
        (folder / "version.json").write_text(state + "\n", encoding="utf-8")
        rows = {name: writer.rows[name] for name, writer in writers.items()}
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        staged = {path / file.relative_to(folder): file for file in files}
        return _exported(newest, rows, staged, whole=(folder, path))


def state_of(repository: Repository, manifest: Manifest) -> Json:
    """A version without its rows and dense tensors, as plain data."""
    return {
        "repository": repository.id,
        "version": manifest.version.number,
        "step": manifest.step,
        "created": manifest.created.isoformat(),
        "layout": manifest.layout,
        "reader": manifest.reader,
        "user": manifest.user,
        "counters": manifest.counters,
        "schema": repository.schema,
    }


def file_name(table: str) -> str:
    """The name of a table as a file name: what cannot stand in one is percent-encoded."""
    return quote(table, safe=" ")


def _rows(
    repository: Repository, chain: Sequence[Manifest], pool: Pool, tables: Sequence[str], hold: Hold
) -> Iterator[Chunk]:
    for _, chunk in merged_rows(repository, chain, pool, tables=tables):
        hold.renew()
        if chunk.planes is not None:
            yield chunk


def _about(manifest: Manifest) -> dict[str, str]:
    return {
        "format": "emberkeep",
        "version": str(manifest.version.number),
        "step": str(manifest.step),
    }


# -- files ---------------------------------------------------------------------------------------


class _Safetensors:
    """A safetensors file whose row counts are known only at the end.

    The format wants tensors one after the other behind a header with their shapes, but rows come
    with all their planes. So every tensor grows in a file of its own; at the end they are joined,
    each one removed as soon as it was copied.
    """

    def __init__(
        self, path: Path, scratch: Path, prefixes: Mapping[str, str], repository: Repository
    ) -> None:
        """`prefixes` says for each table what its tensors' names begin with."""
        self._path = path
        self._parts: dict[tuple[str, str], Path] = {}
        self._tensors: dict[tuple[str, str], tuple[str, int | None, np.dtype[Any]]] = {}
        self.rows = dict.fromkeys(prefixes, 0)
        scratch.mkdir(exist_ok=True)
        for table, prefix in prefixes.items():
            planes = repository.tables[table]["planes"]
            tensors = {"id": (None, np.dtype(np.int64))}
            tensors |= {name: (width, np.dtype(kind)) for name, (width, kind) in planes.items()}
            for name, (width, kind) in tensors.items():
                self._tensors[table, name] = (prefix + name, width, kind)
                self._parts[table, name] = scratch / f"tensor-{len(self._parts)}"

    def append(self, chunk: Chunk) -> None:
        self.rows[chunk.table] += chunk.ids.size
        assert chunk.planes is not None
        for name, values in {"id": chunk.ids, **chunk.planes}.items():
            # Opened each time: there may be more tensors than a process may have open files.
            with open(self._parts[chunk.table, name], "ab") as part:
                part.write(np.ascontiguousarray(values).data)

    def finish(self, metadata: Mapping[str, str]) -> None:
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
        with open(self._path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for (table, _), part in self._parts.items():
                if self.rows[table]:
                    with open(part, "rb") as source:
                        shutil.copyfileobj(source, file, _COPY_NBYTES)
                    part.unlink()


def _arrow_type(width: int, kind: str) -> Any:
    import pyarrow as pa

    number = pa.from_numpy_dtype(np.dtype(kind))
    return number if width == 1 else pa.list_(number)


def _columns(chunk: Chunk, schema: Any) -> list[Any]:
    import pyarrow as pa

    assert chunk.planes is not None
    columns = [pa.array(chunk.ids)]
    for plane in schema.names[1:]:
        values = chunk.planes[plane]
        rows, width = values.shape
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        if width > 1:
            offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
            flat = pa.ListArray.from_arrays(offsets, flat)
        columns.append(flat)
    return columns


@contextmanager
def _output(path: Path, *, force: bool, holds: Sequence[str] = ()) -> Iterator[Path]:
    """A scratch directory beside what is to be written, removed in the end whatever happens.

    `holds` are the patterns of what a directory of this kind holds. `force` replaces such a
    directory, and none that holds anything else.
    """
    if path.parts and path.parts[0].endswith(":"):  # a path has only one slash left of "s3://"
        raise ConfigError(f"{path} is not a local path: export to a directory, then copy it there")
    scratch = path.parent / f".{path.name}.{secrets.token_hex(4)}.incomplete"
    try:
        found = _status(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            others = [entry.name for entry in path.iterdir() if not any(map(entry.match, holds))]
            if others or not holds:
                what = f"holds {min(others)}" if others else "is a directory"
                raise ConfigError(f"{path} {what}, so it is not replaced: choose another place")
            force = force or not any(path.iterdir())
        if found is not None and not force:
            raise ConfigError(f"{path} exists: choose another place, or --force to replace it")
        scratch.mkdir()
        yield scratch
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check the disk and the directory")
        raise StorageError(f"{path} was not written: {reason}; {remedy}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _status(path: Path) -> os.stat_result | None:
    """What a path leads to; None only where there is nothing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _exported(
    manifest: Manifest, rows: Mapping[str, int], staged: Mapping[Path, Path],
    whole: tuple[Path, Path] | None = None,
) -> Exported:  # fmt: skip
    """Moves what was staged to its place: the one file, or the directory that holds all."""
    nbytes = sum(file.stat().st_size for file in staged.values())
    for file in staged.values():
        _sync(file)
    if whole is not None:
        source, target = whole
    else:
        [(target, source)] = staged.items()
    # Put aside first, since a directory cannot be replaced; not into what is removed in the end,
    # whatever happens.
    aside = source.parent.with_suffix(".replaced") if _status(target) is not None else None
    if aside is not None:
        os.rename(target, aside)
    try:
        os.rename(source, target)
    except BaseException:
        if aside is not None:
            os.rename(aside, target)
        raise
    _sync(target.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # it was a file, or it is gone
            aside.unlink()
    return Exported(manifest=manifest, files=tuple(staged), rows=dict(rows), nbytes=nbytes)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

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
from urllib.parse import quote

from emberkeep._types import Json
from emberkeep.checkpoint.contents import (
    Hold,
    check_tables,
    dense_bytes,
    dense_tensors,
    merged_rows,
)
from emberkeep.errors import ConfigError, StorageError
from emberkeep.inspect.tensor_parts import TensorParts
from emberkeep.repository import Manifest, Repository, VersionId
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import Pool
from emberkeep.runtime.system_calls import sync_path

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
        output(path, force=force, holds=holds) as scratch,
        Hold(repository, version) as hold,
    ):
        chain = repository.chain(version)
        newest = chain[-1]
        folder = scratch / "version"
        (folder / "tables").mkdir(parents=True)
        writers = {
            name: TensorParts(scratch / f"table-{position}", repository, {name: str})
            for position, name in enumerate(names)
        }
        for chunk in exported_rows(repository, chain, pool, names, hold):
            writers[chunk.table].append(chunk)
        for name, writer in writers.items():
            file = folder / "tables" / f"{file_name(name)}.safetensors"
            writer.write_safetensors(file, about(newest))
        dense = dense_bytes(repository, newest)
        if dense is not None:
            dense_tensors(newest.name, dense)
            (folder / "dense.safetensors").write_bytes(dense)
        state = json.dumps(state_of(repository, newest), indent=2, ensure_ascii=False)
        (folder / "version.json").write_text(state + "\n", encoding="utf-8")
        rows = {name: writer.rows[name] for name, writer in writers.items()}
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        staged = {path / file.relative_to(folder): file for file in files}
        return published(newest, rows, staged, whole=(folder, path))


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


def exported_rows(
    repository: Repository, chain: Sequence[Manifest], pool: Pool, tables: Sequence[str], hold: Hold
) -> Iterator[Chunk]:
    for _, chunk in merged_rows(repository, chain, pool, tables=tables):
        hold.renew()
        if chunk.planes is not None:
            yield chunk


def about(manifest: Manifest) -> dict[str, str]:
    return {
        "format": "emberkeep",
        "version": str(manifest.version.number),
        "step": str(manifest.step),
    }


# -- files ---------------------------------------------------------------------------------------


@contextmanager
def output(path: Path, *, force: bool, holds: Sequence[str] = ()) -> Iterator[Path]:
    """A scratch directory beside what is to be written, removed in the end whatever happens.

    `holds` are the patterns of what a directory of this kind holds. `force` replaces such a
    directory, and none that holds anything else.
    """
    check_local(path)
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


def check_local(path: Path) -> None:
    """Refuses a URL before a directory is made of it."""
    if path.parts and path.parts[0].endswith(":"):  # a path has only one slash left of "s3://"
        raise ConfigError(f"{path} is not a local path: export to a directory, then copy it there")


def _status(path: Path) -> os.stat_result | None:
    """What a path leads to; None only where there is nothing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def published(
    manifest: Manifest, rows: Mapping[str, int], staged: Mapping[Path, Path],
    whole: tuple[Path, Path] | None = None,
) -> Exported:  # fmt: skip
    """Moves what was staged to its place: the one file, or the directory that holds all."""
    nbytes = sum(file.stat().st_size for file in staged.values())
    for file in staged.values():
        sync_path(file)
    if whole is not None:
        source, target = whole
        for directory in {file.parent for file in staged.values()} | {source}:
            sync_path(directory)
    else:
        [(target, source)] = staged.items()
    # Put aside first, since a directory cannot be replaced as a file can; not into what is removed
    # in the end, whatever happens.
    aside = source.parent.with_suffix(".replaced")
    try:
        if whole is not None and _status(target) is not None:
            os.rename(target, aside)
        os.rename(source, target)
    except BaseException:
        if _status(aside) is not None and _status(target) is None:
            os.rename(aside, target)
        raise
    sync_path(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(OSError):  # a link to a directory, or nothing
        aside.unlink()
    return Exported(manifest=manifest, files=tuple(staged), rows=dict(rows), nbytes=nbytes)

"""What versions hold, row by row, read from storage alone.

An increment holds the rows that changed, so a version's rows stand in several files, and in some
of them more than once. Reading the newest file first and passing over ids that were met already
gives every row once, in a single pass, with nothing in memory but the ids of the increments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Array, Json
from emberkeep.blobs import Buffer
from emberkeep.checkpoint.targets import DENSE
from emberkeep.errors import ConfigError, DamageError, NoVersionError, StateError, StorageError
from emberkeep.repository import FileRef, Manifest, Pin, Repository, VersionId
from emberkeep.repository.grid.bundles import Bundle
from emberkeep.repository.grid.catalog import plan
from emberkeep.repository.grid.version_rows import rows_of_bundle, rows_of_plan
from emberkeep.repository.pieces import KIND, counts_of, read_chunks
from emberkeep.repository.repository import block_count
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.pool import Pool

_PIN_LIFETIME = timedelta(hours=1)

# The names of numpy's types in safetensors files.
SAFETENSORS_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}


class Hold:
    """A pin where the store lets us write one; nothing where it does not.

    Without one a file may be gone before it is read, which is noticed, not served. `renew` is to be
    called now and then while the work goes on. A prioritised version is refused: nobody but a lost
    shard has a use for it.
    """

    def __init__(self, repository: Repository, version: VersionId) -> None:
        if not repository.manifest(version).whole:
            raise StateError(
                f"version {version} is a prioritised one: it holds no instant and serves to bring "
                "single shards back; choose a whole version"
            )
        self._clock = repository.clock
        self._pin: Pin | None = None
        with suppress(StorageError):
            self._pin = Pin(repository, version, lifetime=_PIN_LIFETIME)
        self._since = self._clock.now()

    def renew(self) -> None:
        if self._pin is not None and self._clock.now() - self._since > _PIN_LIFETIME / 4:
            with suppress(StorageError, NoVersionError):
                self._pin.renew()
            self._since = self._clock.now()

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pin is not None:
            with suppress(StorageError):
                self._pin.release()


class IdSet:
    """Ids as sorted runs, each at least twice as long as the next.

    Adding costs an amortised logarithm, and asking one binary search per run; an id takes 8 bytes.
    """

    def __init__(self) -> None:
        self._runs: list[I64] = []

    def add(self, ids: I64) -> None:
        run = np.unique(ids)
        while self._runs and self._runs[-1].size < 2 * run.size:
            run = np.union1d(self._runs.pop(), run)
        if run.size:
            self._runs.append(run)

    def has(self, ids: I64) -> npt.NDArray[np.bool_]:
        """Which of the ids are in the set."""
        found = np.zeros(ids.size, np.bool_)
        for run in self._runs:
            found |= among(run, ids)
        return found

    def all(self) -> I64:
        """Every id, ascending."""
        return np.unique(np.concatenate(self._runs)) if self._runs else np.empty(0, np.int64)


def among(ascending: I64, ids: I64) -> npt.NDArray[np.bool_]:
    """Which of the ids are in an ascending array that is not empty: it is searched, where `np.isin`
    would sort both together."""
    at = np.minimum(np.searchsorted(ascending, ids), ascending.size - 1)
    found: npt.NDArray[np.bool_] = ascending[at] == ids
    return found


def merged_rows(
    repository: Repository,
    manifests: Sequence[Manifest],
    pool: Pool,
    *,
    tables: Collection[str] | None = None,
    after: int | None = None,
) -> Iterator[tuple[Manifest, Chunk]]:
    """What a run of versions, oldest first, leaves behind: each row once, with who wrote it.

    A version of a grid stands for all that it needs; with `after`, for what was written since that
    earlier version of its grid. Else the newest version comes first. Of a row that was deleted, the
    tombstone is handed out, once too: a reader that starts from nothing skips it, one that adds
    to earlier rows removes the row.
    """
    planned = plan(repository, manifests[-1]) if manifests else None
    if planned is not None:
        for chunk in rows_of_plan(repository, planned, pool, tables=tables, after=after):
            yield manifests[-1], chunk
        return
    met: dict[str, IdSet] = defaultdict(IdSet)
    for manifest in reversed(manifests):
        gone: dict[str, list[I64]] = defaultdict(list)
        files = manifest.of_kind(KIND)
        with_tombstones = {name for file in files for name in counts_of(file, "tombstones")}
        written: dict[str, list[I64]] = defaultdict(list)
        for _, chunks in rows_of_files(repository, files, pool):
            for chunk in chunks:
                if tables is not None and chunk.table not in tables:
                    continue
                new = ~met[chunk.table].has(chunk.ids)
                if chunk.planes is None:
                    gone[chunk.table].append(chunk.ids[new])
                    continue
                # Nothing comes after the oldest version, whose ids are the most.
                if manifest is not manifests[0] or chunk.table in with_tombstones:
                    written[chunk.table].append(chunk.ids)
                if new.all():
                    yield manifest, chunk
                elif new.any():
                    planes = {name: values[new] for name, values in chunk.planes.items()}
                    yield manifest, Chunk(chunk.table, chunk.ids[new], planes)
        # Rows before tombstones: an id that left and came back is listed as both.
        for table, parts in written.items():
            met[table].add(np.concatenate(parts))
        for table, parts in gone.items():
            ids = np.unique(np.concatenate(parts))
            ids = ids[~met[table].has(ids)]
            met[table].add(ids)
            if ids.size:
                yield manifest, Chunk(table, ids, None)


def rows_of_files(
    repository: Repository, files: Sequence[FileRef], pool: Pool
) -> Generator[tuple[FileRef, Iterator[Chunk]], None, None]:
    """`checked_rows` of files one after the other: each is to be looked at to its end before the
    next. What comes later is read meanwhile."""
    streamed = {file.name: file for file in files if Bundle.of(file) is None}
    with closing(repository.blocks(streamed.values())) as blocks:
        for file in files:
            own = islice(blocks, block_count(file)) if file.name in streamed else None
            yield file, checked_rows(repository, file, pool, own)
            for _ in own or ():  # what follows the last record is the file's all the same
                pass


def checked_rows(
    repository: Repository, file: FileRef, pool: Pool, blocks: Iterator[Buffer] | None = None
) -> Iterator[Chunk]:
    """The rows of one file, held against the schema and, where all of its pieces are read, against
    the counts in the manifest. Its blocks may be on their way.

    A file whose bytes are as they were written can still hold what does not belong there, if it
    was written wrong; that is `DamageError` too.
    """
    counted: dict[str, dict[str, int]] = {"rows": {}, "tombstones": {}}
    bundle = Bundle.of(file)
    chunks = (
        read_chunks(file.name, repository.stream(file) if blocks is None else blocks, pool)
        if bundle is None
        else rows_of_bundle(repository, bundle, pool)
    )
    for chunk in chunks:
        problem = _problem(repository.tables, chunk)
        if problem:
            raise DamageError(
                f"{file.name} does not hold what belongs there: table {chunk.table!r}: {problem}; "
                "restore another version",
                name=file.name,
            )
        counts = counted["tombstones" if chunk.planes is None else "rows"]
        counts[chunk.table] = counts.get(chunk.table, 0) + chunk.ids.size
        yield chunk
    stated = {what: counts_of(file, what) for what in counted if what in file.metadata}
    if bundle is not None and sum(piece.rows for piece in bundle.pieces) != sum(
        sum(counts.values()) for counts in stated.values()
    ):
        return  # the counts are those of the whole file, and some of its pieces are not needed
    for what, counts in stated.items():
        if counts != counted[what]:
            raise DamageError(
                f"{file.name} holds {what} {counted[what]}, its manifest says {counts}; "
                "restore another version",
                name=file.name,
            )


def _problem(tables: Mapping[str, Json], chunk: Chunk) -> str | None:
    """Why a chunk cannot be part of the repository."""
    table = tables.get(chunk.table)
    if table is None:
        return "not in the schema"
    if chunk.ids.size and (np.diff(chunk.ids) <= 0).any():
        return "ids are not ascending"
    limit = table.get("rows")
    if limit is not None and chunk.ids.size and not 0 <= chunk.ids[0] <= chunk.ids[-1] < limit:
        return f"ids {chunk.ids[0]}..{chunk.ids[-1]} are outside its {limit} rows"
    if chunk.planes is None:
        return None
    found = {name: [values.shape[1], values.dtype.name] for name, values in chunk.planes.items()}
    return None if found == table["planes"] else f"planes {found} instead of {table['planes']}"


def check_tables(repository: Repository, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The tables asked for, all by default; unknown names are refused."""
    have = tuple(repository.tables)
    unknown = [name for name in wanted or () if name not in have]
    if unknown:
        raise ConfigError(
            f"{repository.store.url} has no table {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(have)}"
        )
    return have if wanted is None else tuple(name for name in have if name in wanted)


def dense_bytes(repository: Repository, manifest: Manifest) -> bytes | None:
    """The dense state of a version as a safetensors file, checked; None if it has none."""
    files = manifest.of_kind(DENSE)
    return repository.read(files[0]) if files else None


def dense_tensors(name: str, content: bytes) -> Mapping[str, Mapping[str, Any]]:
    """The tensors of a safetensors file as its format names them: `dtype`, `shape`, `data`."""
    import safetensors

    try:
        return dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise DamageError(f"{name} is not a safetensors file: {error}", name=name) from error


def dense_arrays(name: str, content: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file, read-only. bfloat16, which numpy lacks, becomes float32.

    That conversion is exact. Other types that numpy lacks are refused by name.
    """
    arrays: dict[str, Array] = {}
    for key, tensor in dense_tensors(name, content).items():
        kind, data = tensor["dtype"], tensor["data"]
        if kind == "BF16":
            halves = np.frombuffer(data, np.uint16).astype(np.uint32)
            flat: Array = (halves << np.uint32(16)).view(np.float32)
        elif kind in SAFETENSORS_TYPES:
            flat = np.frombuffer(data, SAFETENSORS_TYPES[kind])
        else:
            raise ConfigError(f"{name}: numpy has no type for the {kind} of tensor {key!r}")
        array = flat.reshape(tensor["shape"])
        array.flags.writeable = False
        arrays[key] = array
    return arrays

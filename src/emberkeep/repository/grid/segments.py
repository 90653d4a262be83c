"""The catalog of a shard on storage: a log of segments, each a file of Arrow columns.

A *segment* lists pieces that came and pieces of earlier segments that went. A round appends one.
Segments that are not much larger than what is appended are merged with it, so there are few of
them, about a logarithm of the pieces, and over the life of a grid each entry is written about that
often: what a round writes follows from what it changed, not from how many versions there are.

Within a segment pieces stand in blocks, those together that died and were born at about the same
time. A reader of one version first
reads the segment's index, which says of each block when its pieces were born and died, and then
the blocks that can hold pieces of that version. Everything has a digest; columns are validated
before they are used.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from emberkeep._types import I64, Json
from emberkeep.blobs import BlobStore, caller_of, together
from emberkeep.errors import DamageError, MissingObjectError
from emberkeep.repository import names
from emberkeep.repository.arrow_frames import is_compressed
from emberkeep.repository.digests import BLOCK_NBYTES
from emberkeep.repository.grid.bundles import Family, families_json, families_of
from emberkeep.repository.grid.piece_table import (
    COLUMNS,
    DIGESTS,
    Gone,
    GridFile,
    PieceTable,
)
from emberkeep.repository.manifest import FileRef
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.runtime.fields import Fields, damaged, parse

CATALOG = "catalog"
"""The kind of a segment, as a file."""
_BLOCK_PIECES = 1024
# A segment that is longer than so many times what is appended stays as it is.
_GROWTH = 2
# A segment that is not longer is read in one go from a store whose calls wait for a network.
_SHORT_NBYTES = 2**22
# A segment of any length counts as if it had so many entries more: each costs a read.
_LEAST_ENTRIES = 32

_I64, _U64, _TEXT = "int64", "uint64", "string"
_PIECES = {name: _U64 if name in DIGESTS else _I64 for name in COLUMNS}
_FILES = {
    "number": _I64, "name": _TEXT, "size": _I64, "digest": _TEXT, "block_nbytes": _I64,
    "blocks": _TEXT, "metadata": _TEXT, "families": _TEXT, "pieces": _I64,
}  # fmt: skip
_GONE = {"file": _I64, "head": _I64}
_BLOCKS = {
    "nbytes": _I64, "digest": _U64, "pieces": _I64, "first_birth": _I64, "last_death": _I64
}  # fmt: skip

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRef:
    """A segment as a catalog names it: how long its index is, and how many entries it has."""

    name: str
    size: int
    digest: str
    index_nbytes: int
    index_digest: str
    pieces: int
    gone: int

    def to_json(self) -> list[Any]:
        return [
            self.name, self.size, self.digest, self.index_nbytes, self.index_digest, self.pieces,
            self.gone,
        ]  # fmt: skip

    @classmethod
    def of(cls, where: Fields, values: Sequence[Any], grid: VersionId) -> SegmentRef:
        if list(map(type, values)) != [str, int, str, int, str, int, int]:
            raise where.wrong("segments", "lists of a name, sizes, digests and counts")
        name, size, digest, index_nbytes, index_digest, pieces, gone = values
        parsed = names.parse_segment(name)
        if parsed is None or parsed[0] != grid:
            raise where.wrong("segments", "files of the grid")
        if not 0 < index_nbytes <= size < 2**62 or not 0 <= pieces < 2**48 or not 0 <= gone < 2**48:
            raise where.wrong("segments", "numbers that fit each other")
        return cls(
            name=name, size=size, digest=digest, index_nbytes=index_nbytes,
            index_digest=index_digest, pieces=pieces, gone=gone,
        )  # fmt: skip

    @property
    def entries(self) -> int:
        return self.pieces + self.gone + _LEAST_ENTRIES

    def file(self) -> FileRef:
        """The segment as any other file."""
        return FileRef(
            name=self.name, size=self.size, digest=self.digest, kind=CATALOG,
            block_nbytes=max(BLOCK_NBYTES, self.size),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Block:
    """Where some pieces of a segment stand, and when they were born and died."""

    start: int
    nbytes: int
    digest: int
    pieces: int
    first_birth: int
    last_death: int


class Segment:
    """A segment that can be read: its index is, blocks are read when they are asked for."""

    def __init__(
        self, ref: SegmentRef, files: Mapping[int, GridFile], counts: Mapping[int, int],
        gone: Gone, blocks: Sequence[_Block], store: BlobStore, content: memoryview,
    ) -> None:  # fmt: skip
        self.ref = ref
        self.files = files
        self.counts = counts
        """How many pieces of each file came with this segment."""
        self.gone = gone
        self._blocks = blocks
        self._store = store
        self._content = content
        self._everything: PieceTable | None = None

    @classmethod
    def open(cls, store: BlobStore, ref: SegmentRef) -> Segment:
        # Where a second read would take another round trip, blocks come with the index.
        short = ref.size <= _SHORT_NBYTES and caller_of(store) is not None
        whole = memoryview(_read(store, ref.name, 0, ref.size if short else ref.index_nbytes))
        content = whole[: ref.index_nbytes]
        if xxhash.xxh3_64_hexdigest(content) != ref.index_digest:
            raise damaged(ref.name, "its index does not match its digest")
        with _arrow_damage(ref.name):
            source = _source(content)
            files = _unpack(ref.name, source, _FILES)
            gone = _unpack(ref.name, source, _GONE)
            blocks = _unpack(ref.name, source, _BLOCKS)
        found = _Files(ref.name, files)
        keys = np.stack([gone["file"], gone["head"]], axis=1)
        at, listed = ref.index_nbytes, []
        for nbytes, digest, pieces, birth, death in zip(
            *(blocks[name].tolist() for name in _BLOCKS), strict=True
        ):
            # A piece takes its columns: more than there are bytes for are none of ours.
            if not 0 < nbytes <= ref.size - at or not 0 < pieces * 8 * len(COLUMNS) <= nbytes:
                raise damaged(ref.name, "a block lies beyond it")
            listed.append(_Block(at, nbytes, digest, pieces, birth, death))
            at += nbytes
        if at != ref.size or (sum(b.pieces for b in listed), len(keys)) != (ref.pieces, ref.gone):
            raise damaged(ref.name, "it has other entries than the catalog says")
        counts = dict(zip(found, files["pieces"].tolist(), strict=True))
        return cls(ref, found, counts, Gone(keys), listed, store, whole)

    def read_by(self, version: int) -> PieceTable:
        """The pieces that a restore of a version may read; more than those, and not all others."""
        if self._everything is not None:
            return self._everything
        wanted = [b for b in self._blocks if b.first_birth <= version < b.last_death]
        return self._table(wanted, version)

    @property
    def everything(self) -> PieceTable:
        """All pieces, read once. Two threads may both read them: a lock held meanwhile, as that of
        a cached property before Python 3.12, would have all wait for the slowest store."""
        if self._everything is None:
            self._everything = self._table(self._blocks)
        return self._everything

    def _stored(self, blocks: Sequence[_Block]) -> memoryview:
        """The bytes of blocks that follow each other."""
        start, end = blocks[0].start, blocks[-1].start + blocks[-1].nbytes
        content = self._content[start:end]
        if len(content) < end - start:
            content = memoryview(_read(self._store, self.ref.name, start, end - start))
        return content

    def _table(self, blocks: Sequence[_Block], version: int | None = None) -> PieceTable:
        """The pieces of blocks, or those that a restore of a version reads."""
        ref = self.ref
        parts = []
        runs = list(_neighbours(blocks))
        contents = together(
            self._store, [partial(self._stored, blocks[first:last]) for first, last in runs]
        )
        for (first, last), content in zip(runs, contents, strict=True):
            for block in blocks[first:last]:
                at = block.start - blocks[first].start
                part = content[at : at + block.nbytes]
                if xxhash.xxh3_64_intdigest(part) != block.digest:
                    raise damaged(ref.name, "a block does not match its digest")
                with _arrow_damage(ref.name):
                    columns = _unpack(ref.name, _source(part), _PIECES)
                table = PieceTable(self.files, columns)
                if len(table) != block.pieces:
                    raise damaged(ref.name, "a block has other pieces than its index says")
                parts.append(table if version is None else table.only(table.read_by(version)))
        found = PieceTable.joined(parts)
        why = found.problem()
        if why is not None:
            raise damaged(ref.name, why)
        return found


def encoded_segment(name: str, table: PieceTable, gone: Gone) -> tuple[bytes, SegmentRef]:
    """The bytes of a segment, and how a catalog will name it."""
    order = _tiled(table)
    blocks: list[bytes] = []
    about: list[tuple[int, ...]] = []
    for start in range(0, len(table), _BLOCK_PIECES):
        some = order[start : start + _BLOCK_PIECES]
        block = _pack(_PIECES, {column: table[column][some] for column in COLUMNS})
        blocks.append(block)
        about.append(
            (
                len(block), xxhash.xxh3_64_intdigest(block), some.size,
                int(table["birth"][some].min()), int(table["death"][some].max()),
            )
        )  # fmt: skip
    numbers, counted = np.unique(table["file"], return_counts=True)
    files = {number: table.files[number] for number in numbers.tolist()}
    index = b"".join(
        [
            _pack(_FILES, {**_files_columns(files), "pieces": counted}),
            _pack(_GONE, {"file": gone.keys[:, 0], "head": gone.keys[:, 1]}),
            _pack(_BLOCKS, {key: [each[at] for each in about] for at, key in enumerate(_BLOCKS)}),
        ]
    )
    content = b"".join([index, *blocks])
    ref = SegmentRef(
        name=name, size=len(content), digest=xxhash.xxh3_128_hexdigest(content),
        index_nbytes=len(index), index_digest=xxhash.xxh3_64_hexdigest(index), pieces=len(table),
        gone=len(gone),
    )  # fmt: skip
    return content, ref


def _tiled(table: PieceTable) -> I64:
    """Pieces in an order in which a version reads few blocks: first those that died first, and
    among as many of them as fill a row of blocks, those that were born first."""
    rows = max(1, math.isqrt(len(table) // _BLOCK_PIECES))
    ranks = np.empty(len(table), np.int64)
    ranks[np.lexsort((table["birth"], table["death"]))] = np.arange(len(table))
    row = ranks * rows // max(1, len(table))
    return np.lexsort((table["offset"], table["file"], table["death"], table["birth"], row))


def written(store: BlobStore, name: str, table: PieceTable, gone: Gone) -> SegmentRef:
    """Puts a segment under a name that was never used."""
    content, ref = encoded_segment(name, table, gone)
    store.put(name, content)
    return ref


def live_files(segments: Iterable[Segment]) -> dict[int, GridFile]:
    """The files that have pieces left, by what indexes say: of what came, some went."""
    files: dict[int, GridFile] = {}
    counts: Counter[int] = Counter()
    for segment in segments:
        files.update(segment.files)
        counts.update(segment.counts)
        counts.subtract(segment.gone.keys[:, 0].tolist())
    return {number: file for number, file in files.items() if counts[number] > 0}


def to_be_merged(segments: Sequence[SegmentRef], entries: int) -> int:
    """How many of the first segments stay as they are when so many entries are appended."""
    kept, total = len(segments), entries + _LEAST_ENTRIES
    while kept and segments[kept - 1].entries <= _GROWTH * total:
        kept -= 1
        total += segments[kept].entries
    return kept


def without_gone(segments: Iterable[tuple[PieceTable, Gone]]) -> tuple[PieceTable, Gone]:
    """Segments one after the other as one: what came and stayed, and what of others went.

    A piece that a segment lists as gone came in an earlier one.
    """
    parts, gone = [], Gone()
    for table, own_gone in reversed(list(segments)):
        kept, gone = table.without(gone)
        parts.append(kept)
        gone = Gone.joined([gone, own_gone])
    return PieceTable.joined(parts[::-1]), gone


# -- columns -------------------------------------------------------------------------------------


def _schema(fields: Mapping[str, str]) -> Any:
    import pyarrow as pa

    return pa.schema([pa.field(name, getattr(pa, kind)(), False) for name, kind in fields.items()])


def _pack(fields: Mapping[str, str], columns: Values) -> bytes:
    import pyarrow as pa

    schema = _schema(fields)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _source(content: Any) -> Any:
    import pyarrow as pa

    return pa.BufferReader(pa.py_buffer(content))


def _unpack(name: str, source: Any, fields: Mapping[str, str]) -> dict[str, npt.NDArray[Any]]:
    """The columns of the next stream of a source; memory is taken in proportion to its bytes."""
    import pyarrow as pa

    messages = pa.ipc.MessageReader.open_stream(source)
    schema = pa.ipc.read_schema(messages.read_next_message())
    if not schema.equals(_schema(fields)):
        raise damaged(name, "it has other columns")
    message = messages.read_next_message()
    # Before a body is looked at: a few bytes can stand for gigabytes of another.
    if message.type != "record batch" or is_compressed(message.metadata):
        raise damaged(name, f"it holds a {message.type} that is compressed, or does not belong")
    batch = pa.ipc.read_record_batch(message, schema)
    # Offsets that lead out of their buffers end the process where they are followed.
    batch.validate(full=True)
    if any(column.null_count for column in batch.columns):
        raise damaged(name, "it lacks a value")
    try:
        messages.read_next_message()
    except StopIteration:
        pass
    else:
        raise damaged(name, "it holds more than belongs there")
    return {field: _values(batch.column(field)) for field in fields}


def _values(column: Any) -> npt.NDArray[Any]:
    import pyarrow as pa

    if pa.types.is_string(column.type):
        found = np.empty(len(column), object)
        found[:] = column.to_pylist()
        return found
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values


class _arrow_damage:
    """What Arrow finds wrong in a segment is damage of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        import pyarrow as pa

        wrong = (pa.ArrowException, StopIteration, struct.error, OSError, ValueError, TypeError)
        if isinstance(error, wrong):
            raise damaged(self._name, f"it is no segment: {error}") from error


def _files_columns(files: Mapping[int, GridFile]) -> dict[str, list[Any]]:
    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    return {
        "number": list(files),
        "name": [each.name for each in files.values()],
        "size": [each.size for each in files.values()],
        "digest": [each.file.digest for each in files.values()],
        "block_nbytes": [each.file.block_nbytes for each in files.values()],
        "blocks": [" ".join(each.file.blocks) for each in files.values()],
        "metadata": [text(each.file.metadata) for each in files.values()],
        "families": [text(families_json(each.families)) for each in files.values()],
    }


class _Files(Mapping[int, GridFile]):
    """The files that a segment names, each looked at when it is asked for: a version has pieces in
    some of them."""

    def __init__(self, segment: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        rows = list(zip(*(columns[field].tolist() for field in _FILES), strict=True))
        self._segment = segment
        self._grid = (names.parse_segment(segment) or (None,))[0]
        self._rows = {row[0]: row for row in rows}
        self._known: dict[int, GridFile] = {}
        self._families: dict[str, tuple[Family, ...]] = {}
        if len(self._rows) < len(rows) or len({row[1] for row in rows}) < len(rows):
            raise damaged(segment, "it names a file twice")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, number: object) -> bool:
        return number in self._rows

    def __getitem__(self, number: int) -> GridFile:
        if number not in self._known:
            self._known[number] = self._described(number)
        return self._known[number]

    def _described(self, number: int) -> GridFile:
        name = self._segment
        _, file, size, _, _, _, _, forms, _ = self._rows[number]
        bundle = names.parse_bundle(file)
        own = names.parse_data(file) is not None if bundle is None else bundle[0] == self._grid
        if number < 0 or size < 0 or not own:
            raise damaged(name, "it names a file that is not of the grid")
        if forms not in self._families:
            described = parse(name, forms.encode())
            if not isinstance(described, list) or not all(isinstance(f, list) for f in described):
                raise damaged(name, "a file has no families")
            self._families[forms] = families_of(file, described)
        return GridFile(file, size, self._families[forms], partial(self._file, number))

    def _file(self, number: int) -> FileRef:
        name = self._segment
        _, file, size, digest, block_nbytes, blocks, metadata, _, _ = self._rows[number]
        about: Json = {
            "name": file, "size": size, "digest": digest, "kind": KIND,
            "metadata": parse(name, metadata.encode()), "block_nbytes": block_nbytes,
            "blocks": blocks.split(),
        }  # fmt: skip
        return FileRef.of(Fields(name, about))


def _read(store: BlobStore, name: str, start: int, length: int) -> bytes:
    try:
        if length > BLOCK_NBYTES and store.size(name) < start + length:
            raise damaged(name, "it is shorter than it should be")
        content = bytes(store.get_range(name, start, length))
    except MissingObjectError:
        raise DamageError(
            f"{name} is missing: it was deleted, or removed by gc while its version was not "
            "pinned; restore another version",
            name=name,
        ) from None
    if len(content) != length:
        raise damaged(name, "it is shorter than it should be")
    return content


def _neighbours(blocks: Sequence[_Block]) -> Iterator[tuple[int, int]]:
    """Blocks that follow each other in the file, as ranges of the list."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at].start != blocks[at - 1].start + blocks[at - 1].nbytes:
            yield first, at
            first = at

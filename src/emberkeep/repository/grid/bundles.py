"""Rows of a grid as files: many pieces in one bundle, each read alone or with its neighbours.

A *piece* holds rows with equal birth and death and the same form. Pieces are many and small, so a
stream of records for each would cost more than its rows: here a piece is its columns, one after
the other, and where they begin follows from the number of rows. What names the rows, the *head*,
is separate, all heads together at the end of the file: a reader that wants to know which rows there
are reads little. `docs/format.md` accounts for every byte.

Rows are stored as codecs encoded them and move from file to file without being decoded.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from emberkeep._types import I32, I64, U8, U64, Array, Json
from emberkeep.codecs import Codec, Raw, codec_from_dict, is_plane
from emberkeep.codecs.table_codecs import codec_of
from emberkeep.errors import ConfigError, DamageError
from emberkeep.repository.manifest import FileRef
from emberkeep.repository.pieces import Codecs
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.fields import Fields, parse
from emberkeep.runtime.memory import lazy_zeros
from emberkeep.runtime.pool import Pool

SUFFIX = "grid"
PIECE_NBYTES = 32 * 2**20


_RAW = Raw()


@dataclass(frozen=True, slots=True)
class Form:
    """How one plane of a row is stored: as it is, or as codes and parameters of a codec.

    Of a lossy plane some rows are stored raw; they are rows of another form.
    """

    plane: str
    width: int
    dtype: str
    codec: str
    coded: bool

    def columns(self) -> tuple[int, ...]:
        """Bytes of a row in each of its columns."""
        if not self.coded:
            return (self.width * np.dtype(self.dtype).itemsize,)
        return tuple(self._codec().columns(self.width, self.dtype).values())

    def decode(self, columns: Sequence[U8], pool: Pool) -> Array:
        rows = columns[0].shape[0]
        if not self.coded:
            return columns[0].view(self.dtype).reshape(rows, self.width)
        codec = self._codec()
        buffers: dict[str, Array] = {
            **dict(zip(codec.columns(self.width, self.dtype), columns, strict=True)),
            "raw_rows": np.empty(0, np.uint32),
            "raw_values": np.empty((0, self.width), np.float32),
        }
        return codec.decode(buffers, rows=rows, width=self.width, dtype=self.dtype, pool=pool)

    def _codec(self) -> Codec:
        return codec_from_dict(json.loads(self.codec))


Family = tuple[Form, ...]
"""The forms of all planes of a row; that of a tombstone is empty."""


class Piece(NamedTuple):
    """Where rows of one birth, death and family stand in a file.

    `sum` is the order-free hash sum of its rows: sums of disjoint sets of rows add up. A tuple,
    because catalogs list thousands of pieces, and of one that is read each becomes one.
    """

    birth: int
    death: int | None
    family: int
    rows: int
    offset: int
    nbytes: int
    digest: str
    head: int
    head_nbytes: int
    head_digest: str
    sum: int

    def to_json(self) -> list[Any]:
        return [*self[:-1], f"{self.sum:016x}"]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Piece:
        piece = cls._make((*value[:-1], int(value[-1], 16)))
        if max(int(piece.digest, 16), int(piece.head_digest, 16), piece.sum) >= 2**64:
            raise ValueError("a digest is too long")
        return piece


class Bundle:
    """A file of pieces as a manifest or a catalog names it."""

    def __init__(
        self, file: FileRef, families: Sequence[Family], listed: Sequence[Sequence[Any]]
    ) -> None:
        self.file = file
        self.families = tuple(families)
        # Pieces, or what JSON has for them: of thousands in a catalog few are looked at singly.
        self.listed = listed

    @classmethod
    def of(cls, file: FileRef) -> Bundle | None:
        """The pieces of a file; None if it is a file of another kind."""
        metadata = Fields(file.name, file.metadata, "metadata.")
        return cls.described(file, metadata.object("grid")) if "grid" in metadata else None

    @classmethod
    def described(cls, file: FileRef, about: Fields) -> Bundle:
        """A file whose pieces are described elsewhere: all of them lie in it, none over another."""
        families = families_of(file.name, about.list_of("families", list))
        listed = about.list_of("pieces", list)
        why = _problem_of(file.size, families, listed)
        if why is not None:
            raise _not_described(file.name, why)
        return cls(file, families, listed)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        try:
            return tuple(
                each if isinstance(each, Piece) else Piece.from_json(each) for each in self.listed
            )
        except (TypeError, ValueError) as error:
            raise _not_described(self.name, str(error)) from error

    @property
    def name(self) -> str:
        return self.file.name

    @cached_property
    def used_nbytes(self) -> int:
        return sum(piece.nbytes + piece.head_nbytes for piece in self.pieces)

    def with_pieces(self, pieces: Iterable[Piece]) -> Bundle:
        """The same file with fewer pieces, or others' deaths; the file itself stays."""
        return Bundle(self.file, self.families, tuple(pieces))

    def read_by(self, version: int) -> Bundle | None:
        """The same file with the pieces that a restore of a version reads; None if there is
        none."""
        listed = [
            each
            for each in self.listed
            if each[0] <= version and (each[1] is None or version < each[1])
        ]
        return Bundle(self.file, self.families, listed) if listed else None

    @cached_property
    def about(self) -> Json:
        return {
            "families": families_json(self.families),
            "pieces": [piece.to_json() for piece in self.pieces],
        }

    def to_json(self) -> Json:
        metadata = {**self.file.metadata, "grid": self.about}
        return {**self.file.to_json(), "metadata": metadata}

    def reference(self) -> FileRef:
        """The file with these pieces as its description."""
        return replace(self.file, metadata={**self.file.metadata, "grid": self.about})


def _not_described(file: str, why: str) -> DamageError:
    return DamageError(f"{file} is not described well: {why}", name=file)


def families_of(file: str, families: Sequence[Any]) -> tuple[Family, ...]:
    """The families of a file's pieces, as a document or a catalog has them."""
    return tuple(_family(file, family) for family in families)


def _family(file: str, forms: Sequence[Any]) -> Family:
    found = []
    for form in forms:
        if not isinstance(form, list) or list(map(type, form)) != [str, int, str, str, bool]:
            raise _not_described(file, "a plane has no form")
        plane, width, dtype, codec, coded = form
        if not is_plane(width, dtype):
            raise _not_described(file, f"plane {plane!r} has no form that is written")
        found.append(Form(plane, width, dtype, codec, coded))
        try:
            parse(file, codec.encode())
            found[-1].columns()
        except (ConfigError, DamageError) as error:
            raise _not_described(file, f"plane {plane!r}: {error}") from error
    return tuple(found)


# The types that the fields of a piece may have.
_N: set[type] = {int}
_S: set[type] = {str}
_TYPES: list[set[type]] = [_N, {int, type(None)}, _N, _N, _N, _N, _S, _N, _N, _S, _S]


def _problem_of(size: int, families: Sequence[Family], listed: Sequence[Any]) -> str | None:
    """Why pieces cannot stand in a file of that size. Catalogs list thousands of pieces, so they
    are looked at column by column."""
    if not listed:
        return None
    if {len(each) for each in listed} != {len(Piece._fields)}:
        return "a piece has too many fields or too few"
    columns = list(zip(*listed, strict=True))
    if any(not set(map(type, c)) <= kinds for c, kinds in zip(columns, _TYPES, strict=True)):
        return "a piece has a field of another type"
    birth, death, family, rows, offset, nbytes, _, head, head_nbytes, _, _ = columns
    numbers = [birth, family, rows, offset, nbytes, head, head_nbytes]
    if min(map(min, numbers)) < 0 or max(map(max, numbers)) >= 2**62:
        return _STRANGE
    if not families or max(family) >= len(families):
        return "a piece is of no family"
    ends = [start if end is None else end for start, end in zip(birth, death, strict=True)]
    if min(ends) < 0 or max(ends) >= 2**62:
        return _STRANGE
    names = ("birth", "family", "rows", "offset", "nbytes", "head", "head_nbytes")
    arrays = dict(zip(names, np.array(numbers, np.int64), strict=True))
    arrays["death"] = np.array(ends, np.int64)
    widths = np.array([sum(widths_of(each)) for each in families], np.int64)
    everywhere = np.zeros(len(listed), np.int64)
    return misplaced(arrays, everywhere + size, widths[arrays["family"]], everywhere)


_STRANGE = "a piece has a number that is never written"


def misplaced(
    columns: Mapping[str, Array], sizes_P: I64, widths_P: I64, files_P: I64
) -> str | None:
    """Why pieces cannot stand where they are said to: in files of these sizes, with rows of these
    widths; `files_P` says which pieces are in one file."""
    rows_P, offset_P, nbytes_P = columns["rows"], columns["offset"], columns["nbytes"]
    head_P, head_nbytes_P = columns["head"], columns["head_nbytes"]
    numbers = (columns["birth"], rows_P, offset_P, nbytes_P, head_P, head_nbytes_P)
    if min(int(each.min()) for each in numbers) < 0 or max(int(e.max()) for e in numbers) >= 2**62:
        return _STRANGE
    if (columns["death"] < columns["birth"]).any():
        return "a piece died before it was born"
    whole, rest = np.divmod(nbytes_P, np.maximum(widths_P, 1))
    if (rest != 0).any() or (whole != np.where(widths_P > 0, rows_P, 0)).any():
        return "a piece has more bytes than its rows, or less"
    if (rows_P > head_nbytes_P).any():  # an id takes a byte or more
        return "a piece has more rows than its head names"
    starts = np.concatenate([offset_P, head_P])
    lengths = np.concatenate([nbytes_P, head_nbytes_P])
    present = lengths > 0
    starts, lengths = starts[present], lengths[present]
    files = np.concatenate([files_P, files_P])[present]
    ends = np.concatenate([sizes_P, sizes_P])[present]
    order = np.lexsort((starts, files))
    starts, lengths, files, ends = starts[order], lengths[order], files[order], ends[order]
    ends[:-1] = np.where(files[1:] == files[:-1], starts[1:], ends[:-1])
    return (
        "pieces lie over each other or beyond the file" if (starts + lengths > ends).any() else None
    )


def families_json(families: Iterable[Family]) -> list[Any]:
    return [
        [[form.plane, form.width, form.dtype, form.codec, form.coded] for form in family]
        for family in families
    ]


# -- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedRows:
    """Encoded rows on their way into a file; `tables` are numbers, equal ones side by side."""

    birth: int
    death: int | None
    family: Family
    tables: I32
    ids: I64
    columns: tuple[U8, ...]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def take(self, rows: I64, death: int | None) -> EncodedRows:
        """Some of the rows, with the death that they were found to have."""
        columns = tuple(np.take(column, rows, axis=0) for column in self.columns)
        return EncodedRows(
            self.birth, death, self.family, self.tables[rows], self.ids[rows], columns
        )

    @cached_property
    def sum(self) -> int:
        """The order-free hash sum of its rows."""
        from emberkeep.kernels import grid_arrays

        sums = np.zeros(self.ids.size, np.uint64)
        for number, column in enumerate(self.columns):
            grid_arrays.hash_column(column, np.uint64(number + 1), sums)
        return int(grid_arrays.sum_of_rows(self.tables, self.ids, sums))


def encoded(
    chunk: Chunk, table: int, codecs: Codecs, pool: Pool, *, birth: int
) -> Iterator[EncodedRows]:
    """A chunk as parts, one for each family that its rows belong to."""
    rows = chunk.ids.size
    tables = np.full(rows, table, np.int32)
    if chunk.planes is None:
        yield EncodedRows(birth, None, (), tables, chunk.ids, ())
        return
    stored: list[tuple[str, Codec, Array, dict[str, Array]]] = []
    kinds = np.zeros(rows, np.int64)
    for number, (plane, values) in enumerate(chunk.planes.items()):
        codec = codec_of(codecs, chunk.table, plane)
        buffers = codec.encode(values, pool)
        stored.append((plane, codec, values, buffers))
        if "raw_rows" in buffers:
            kinds[buffers["raw_rows"]] |= 1 << number
    found = (0,) if not kinds.any() else np.unique(kinds).tolist()
    for kind in found:
        kind_rows = None if len(found) == 1 else np.flatnonzero(kinds == kind)
        family: list[Form] = []
        columns: list[U8] = []
        for number, (plane, codec, values, buffers) in enumerate(stored):
            coded = "codes" in buffers and not kind >> number & 1
            spec = json.dumps((codec if coded else _RAW).to_dict(), separators=(",", ":"))
            family.append(Form(plane, values.shape[1], values.dtype.name, spec, coded))
            names = codec.columns(values.shape[1], values.dtype)
            kept = [buffers[name] for name in names] if coded else [values]
            columns.extend(_bytes_of_rows(column, kind_rows) for column in kept)
        some = slice(None) if kind_rows is None else kind_rows
        yield EncodedRows(birth, None, tuple(family), tables[some], chunk.ids[some], tuple(columns))


def _bytes_of_rows(values: Array, rows: I64 | None) -> U8:
    values = np.ascontiguousarray(values if rows is None else values[rows])
    return values.reshape(values.shape[0], -1).view(np.uint8)


class BundleStream:
    """One file to be, from parts: stream it to its end, then look at `metadata`.

    Parts that follow each other and differ in nothing but their rows become one piece.
    """

    def __init__(
        self, parts: Iterator[EncodedRows], tables: Sequence[str], *, nbytes: int, metadata: Json
    ) -> None:
        self._parts = parts
        self._tables = tables
        self._most_nbytes = nbytes
        self.metadata = dict(metadata)
        self.next = next(parts, None)
        self.families: list[Family] = []
        self.pieces: list[Piece] = []
        self._rows: Counter[str] = Counter()
        self._tombstones: Counter[str] = Counter()

    def left(self) -> tuple[EncodedRows, ...]:
        """The part that was taken from the parts and is not in the file."""
        return () if self.next is None else (self.next,)

    def stream(self) -> Iterator[memoryview]:
        """The bytes of the file; ends when it is large enough or there are no more parts."""
        heads: list[tuple[Piece, U8]] = []
        offset = 0
        while self.next is not None and offset < self._most_nbytes:
            parts = [self.next]
            waiting = self.next.nbytes
            self.next = next(self._parts, None)
            while (
                self.next is not None
                and waiting + self.next.nbytes <= PIECE_NBYTES
                and _alike(self.next, parts[0])
            ):
                parts.append(self.next)
                waiting += self.next.nbytes
                self.next = next(self._parts, None)
            piece, head = self._piece(parts, offset)
            heads.append((piece, head))
            offset += piece.nbytes
            for column in range(len(parts[0].columns)):
                for part in parts:
                    yield _view(part.columns[column])
        for piece, head in heads:
            self.pieces.append(piece._replace(head=offset))
            offset += head.nbytes
            yield _view(head)
        self.metadata.update(
            rows=dict(self._rows),
            tombstones=dict(self._tombstones),
            grid={
                "families": families_json(self.families),
                "pieces": [piece.to_json() for piece in self.pieces],
            },
        )

    def _piece(self, parts: Sequence[EncodedRows], offset: int) -> tuple[Piece, U8]:
        first = parts[0]
        if first.family not in self.families:
            self.families.append(first.family)
        digest = xxhash.xxh3_64()
        for column in range(len(first.columns)):
            for part in parts:
                digest.update(_view(part.columns[column]))
        tables = np.concatenate([part.tables for part in parts])
        ids = np.concatenate([part.ids for part in parts])
        head = pack_head(tables, ids)
        counted = self._rows if first.family else self._tombstones
        for table, count in zip(*np.unique(tables, return_counts=True), strict=True):
            counted[self._tables[int(table)]] += int(count)
        piece = Piece(
            birth=first.birth,
            death=first.death,
            family=self.families.index(first.family),
            rows=ids.size,
            offset=offset,
            nbytes=sum(part.nbytes for part in parts),
            digest=digest.hexdigest(),
            head=0,
            head_nbytes=head.nbytes,
            head_digest=xxhash.xxh3_64_hexdigest(_view(head)),
            sum=sum(part.sum for part in parts) % 2**64,
        )
        return piece, head


def _alike(one: EncodedRows, other: EncodedRows) -> bool:
    return (one.birth, one.death, one.family) == (other.birth, other.death, other.family)


def _view(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def streams(
    chunks: Iterable[Chunk], codecs: Codecs, pool: Pool, *, birth: int, tables: Sequence[str],
    file_nbytes: int, metadata: Json,
) -> Iterator[BundleStream]:  # fmt: skip
    """Cuts the chunks of a version into files; each must be streamed before the next.

    A chunk without rows says nothing and is left out: no piece is empty.
    """
    numbers = {name: number for number, name in enumerate(tables)}

    def parts() -> Iterator[EncodedRows]:
        for chunk in (chunk for chunk in chunks if chunk.ids.size):
            yield from encoded(chunk, numbers[chunk.table], codecs, pool, birth=birth)

    rest = parts()
    while True:
        bundle = BundleStream(rest, tables, nbytes=file_nbytes, metadata=metadata)
        if bundle.next is None:
            return
        yield bundle
        rest = itertools.chain(bundle.left(), rest)


# -- heads ---------------------------------------------------------------------------------------


def pack_head(tables: I32, ids: I64) -> U8:
    """Groups of one table with ascending ids: (table, count) of each, then the packed ids."""
    from emberkeep.kernels import grid_arrays

    breaks = np.flatnonzero((np.diff(tables) != 0) | (np.diff(ids) <= 0)) + 1
    starts = np.concatenate([[0], breaks]) if ids.size else np.empty(0, np.int64)
    counts = np.diff(np.append(starts, ids.size)).astype(np.int64)
    packed = np.empty(ids.size * grid_arrays.MOST_BYTES_OF_ID, np.uint8)
    used = grid_arrays.pack_ids(np.ascontiguousarray(ids), counts, packed)
    groups = np.stack([tables[starts.astype(np.int64)].astype(np.int64), counts], axis=1)
    head = np.concatenate([[counts.size], groups.reshape(-1)]).astype("<u4")
    return np.concatenate([head.view(np.uint8), packed[:used]])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a piece by name: groups of (table, count), and all ids."""

    tables_G: I32
    counts_G: I64
    ids: I64

    def tables(self) -> I32:
        return np.repeat(self.tables_G, self.counts_G)


class Unpacked(NamedTuple):
    """The rows that heads name, one head after the other: how many groups each has, the groups,
    and the ids of all."""

    groups_P: I64
    tables_G: I32
    counts_G: I64
    ids: I64


def unpack_heads(
    data: U8, starts_P: I64, nbytes_P: I64, rows_P: I64, name_of: Callable[[int], str]
) -> Unpacked:
    """The rows of heads that stand at given places of the data and match their digests: one look
    at all of them takes little longer than one at a single head. `name_of` says which file a head
    is from, should it not hold what it should."""
    from emberkeep.kernels import heads

    groups_P = np.zeros(starts_P.size, np.int64)
    wrong = heads.count_groups(data, starts_P, nbytes_P, groups_P)
    if wrong >= 0:
        raise damaged(name_of(wrong))
    groups = int(groups_P.sum())
    found = Unpacked(
        groups_P, np.empty(groups, np.int32), np.empty(groups, np.int64),
        lazy_zeros((int(rows_P.sum()),), np.int64),
    )  # fmt: skip
    wrong = heads.unpack_heads(data, starts_P, nbytes_P, rows_P, *found)
    if wrong >= 0:
        raise damaged(name_of(wrong))
    return found


def columns_of(bundle: Bundle, piece: Piece, body: memoryview) -> tuple[U8, ...]:
    """The columns of a piece from its bytes, checked."""
    if len(body) != piece.nbytes:
        raise damaged(bundle.name)
    check(bundle.name, body, piece.digest)
    data = np.frombuffer(body, np.uint8)
    columns, at = [], 0
    for width in widths_of(bundle.families[piece.family]):
        columns.append(data[at : at + piece.rows * width].reshape(piece.rows, width))
        at += piece.rows * width
    return tuple(columns)


@lru_cache(maxsize=256)
def widths_of(family: Family) -> tuple[int, ...]:
    """Bytes of a row in each column."""
    return tuple(width for form in family for width in form.columns())


def check(name: str, data: memoryview, digest: str) -> None:
    """Whether part of a file, a head or a body, is what was written."""
    if xxhash.xxh3_64_hexdigest(data) != digest:
        raise damaged(name)


def check_pieces(
    data: memoryview, starts_P: I64, nbytes_P: I64, digests_P: U64, name_of: Callable[[int], str]
) -> None:
    """`check` of many heads or bodies, which begin there in the data; `name_of` says which file one
    is from, should it not be what was written."""
    digest_of = xxhash.xxh3_64_intdigest
    about = zip(
        starts_P.tolist(), (starts_P + nbytes_P).tolist(), digests_P.tolist(), strict=True
    )  # fmt: skip
    for number, (start, end, digest) in enumerate(about):
        if digest_of(data[start:end]) != digest:
            raise damaged(name_of(number))


def damaged(name: str) -> DamageError:
    return DamageError(
        f"{name} is damaged: its content does not match the digest of a piece; restore another "
        "version, or copy the file back from a backup",
        name=name,
    )


# -- decoding ------------------------------------------------------------------------------------


def decoded(family: Family, columns: Sequence[U8], pool: Pool) -> dict[str, Array]:
    """The planes of rows from their columns."""
    planes, at = {}, 0
    for form in family:
        count = len(form.columns())
        planes[form.plane] = form.decode(columns[at : at + count], pool)
        at += count
    return planes

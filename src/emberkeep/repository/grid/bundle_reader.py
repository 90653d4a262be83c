"""Bytes of bundles: neighbouring pieces are read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from emberkeep._types import I64
from emberkeep.blobs import BlobStore, Buffer, Part, caller_of, read_parts
from emberkeep.errors import DamageError, MissingObjectError
from emberkeep.repository.grid.bundles import Bundle, Piece, Rows, check, damaged, unpack_heads
from emberkeep.repository.repository import Repository
from emberkeep.runtime.readahead import in_order

# What lies between two wanted ranges is read with them if it is shorter than this: a read of its
# own would take as long. A disk is asked again sooner than a network.
_GAP_NBYTES = 128 * 1024
_DISK_GAP_NBYTES = 32 * 1024
# Long reads take less of the processor, above all from a disk.
_READ_NBYTES = 32 * 2**20
# What one thread reads of a disk without a pause, and what a read counts for beside its bytes.
_TOGETHER_NBYTES = 2 * 2**20
_READ_COST_NBYTES = 2**17


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file, and the pieces that lie there; each with its place in the range."""

    bundle: Bundle
    start: int
    length: int
    pieces: tuple[tuple[Piece, int], ...]


class Run(NamedTuple):
    """One read of a file: the first and the end of what it reads, where it begins and how long it
    is."""

    first: int
    last: int
    start: int
    length: int


def gap_of(store: BlobStore) -> int:
    """How many bytes that nobody wants are read rather than left out."""
    return _DISK_GAP_NBYTES if caller_of(store) is None else _GAP_NBYTES


def runs(
    starts: Sequence[int] | I64, nbytes: Sequence[int] | I64, gap: int = _GAP_NBYTES,
    files: I64 | None = None,
) -> list[Run]:  # fmt: skip
    """What stands in one file, ascending, as few long reads; or in several, file after file, of
    which `files` has the numbers."""
    starts_P, nbytes_P = np.asarray(starts, np.int64), np.asarray(nbytes, np.int64)
    if not starts_P.size:
        return []
    ends_P = starts_P + nbytes_P
    separate = starts_P[1:] - ends_P[:-1] > gap
    if files is not None:
        separate |= files[1:] != files[:-1]
    breaks = np.flatnonzero(separate) + 1
    found = []
    for first, last in pairwise([0, *breaks.tolist(), starts_P.size]):
        while first < last:
            begin = int(starts_P[first])
            until = last
            if int(ends_P[last - 1]) - begin > _READ_NBYTES:
                most = np.searchsorted(ends_P[first + 1 : last], begin + _READ_NBYTES, "right")
                until = first + 1 + int(most)
            # Not the end of the last: one without a body may stand before its neighbour or after.
            found.append(Run(first, until, begin, int(ends_P[first:until].max()) - begin))
            first = until
    return found


def calls_at_once(
    repository: Repository, nbytes: Sequence[int], *, blocks: bool = False
) -> list[tuple[int, int]]:
    """What one thread reads, first and end, of reads of so many bytes: each by itself where it
    waits for a network, all of a store that reads them together, which it does with whole `blocks`.
    To have a thread begin takes longer than a short read from a disk: there some are made one after
    the other if there are more than pay off at once."""
    if blocks and getattr(repository.store, "reads_together", False):
        return [(0, len(nbytes))] if nbytes else []
    sizes = [each + _READ_COST_NBYTES for each in nbytes]
    most = min(_TOGETHER_NBYTES, sum(sizes) // repository.reading.depth)
    alone = caller_of(repository.store) is not None
    found: list[tuple[int, int]] = []
    total = 0
    for at, size in enumerate(sizes):
        if not found or alone or total + size > most:
            found.append((at, at))
            total = 0
        found[-1] = (found[-1][0], at + 1)
        total += size
    return found


def ranges(bundle: Bundle) -> list[Range]:
    """The bodies of the pieces of a file."""
    pieces = sorted(bundle.pieces, key=lambda piece: piece.offset)
    return [
        Range(bundle, start, length, tuple((p, p.offset - start) for p in pieces[first:last]))
        for first, last, start, length in runs(
            [piece.offset for piece in pieces], [piece.nbytes for piece in pieces]
        )
    ]


def ensure_there(repository: Repository, name: str, end: int, nbytes: int) -> None:
    """Looks whether a file is that long, before much memory is taken to read it."""
    if nbytes > _READ_NBYTES:
        with missing_is_damage(name):
            if repository.store.size(name) < end:
                raise damaged(name)


def read_range(repository: Repository, wanted: Range) -> Buffer:
    ensure_there(repository, wanted.bundle.name, wanted.start + wanted.length, wanted.length)
    with missing_is_damage(wanted.bundle.name):
        return repository.store.get_range(wanted.bundle.name, wanted.start, wanted.length)


def read_each(repository: Repository, parts: Sequence[tuple[Part, int]]) -> None:
    """Fills memory with parts of files, each with how many bytes must be there."""
    every = [part for part, _ in parts]
    try:
        found = read_parts(repository.store, every)
    except MissingObjectError:
        for name in {part.name for part in every}:
            with missing_is_damage(name):
                repository.store.size(name)
        raise
    for (part, least), there in zip(parts, found, strict=True):
        if there < least:
            raise damaged(part.name)


@contextmanager
def missing_is_damage(name: str) -> Iterator[None]:
    try:
        yield
    except MissingObjectError:
        raise DamageError(
            f"{name} is missing: it was deleted, or removed by gc while its version was not "
            "pinned; restore another version",
            name=name,
        ) from None


@dataclass(frozen=True, slots=True)
class Heads:
    """The bytes of heads of one file, and where each of them begins, in the order asked for."""

    data: bytes
    starts: I64


def read_heads(
    repository: Repository, name: str, starts: Sequence[int] | I64, nbytes: Sequence[int] | I64
) -> Heads:
    """The heads of a file that begin at `starts`; each still has to be checked."""
    starts_P, nbytes_P = np.asarray(starts, np.int64), np.asarray(nbytes, np.int64)
    order = np.argsort(starts_P, kind="stable")
    found = np.empty_like(starts_P)
    parts, done = [], 0
    for first, last, start, length in runs(starts_P[order], nbytes_P[order]):
        ensure_there(repository, name, start + length, length)
        with missing_is_damage(name):
            part = repository.store.get_range(name, start, length)
        if len(part) != length:
            raise damaged(name)
        some = order[first:last]
        found[some] = starts_P[some] - start + done
        parts.append(part)
        done += length
    return Heads(b"".join(parts), found)


def rows_of_pieces(
    repository: Repository, bundles: Sequence[Bundle]
) -> list[tuple[Bundle, Piece, Rows]]:
    """The rows that the pieces of bundles hold, by name, in the order of the pieces."""

    def read(bundle: Bundle) -> Heads:
        starts = [piece.head for piece in bundle.pieces]
        return read_heads(repository, bundle.name, starts, [p.head_nbytes for p in bundle.pieces])

    every = in_order(
        ((sum(p.head_nbytes for p in b.pieces), partial(read, b)) for b in bundles),
        depth=repository.reading.depth, nbytes=repository.reading.nbytes, name="emberkeep-heads",
        clock=repository.clock,
    )  # fmt: skip
    found = []
    for bundle, heads in zip(bundles, every, strict=True):
        data = memoryview(heads.data)
        for piece, at in zip(bundle.pieces, heads.starts.tolist(), strict=True):
            check(bundle.name, data[at : at + piece.head_nbytes], piece.head_digest)
        found += [
            (bundle, piece, rows)
            for piece, rows in zip(bundle.pieces, _split(bundle, heads), strict=True)
        ]
    return found


def _split(bundle: Bundle, heads: Heads) -> Iterator[Rows]:
    # Writable, as kernels were compiled for.
    data = np.array(np.frombuffer(heads.data, np.uint8))
    nbytes = np.array([piece.head_nbytes for piece in bundle.pieces], np.int64)
    rows_P = np.array([piece.rows for piece in bundle.pieces], np.int64)
    unpacked = unpack_heads(data, heads.starts, nbytes, rows_P, lambda _: bundle.name)
    group = row = 0
    for groups, rows in zip(unpacked.groups_P.tolist(), rows_P.tolist(), strict=True):
        some = slice(group, group + groups)
        yield Rows(unpacked.tables_G[some], unpacked.counts_G[some], unpacked.ids[row : row + rows])
        group, row = group + groups, row + rows

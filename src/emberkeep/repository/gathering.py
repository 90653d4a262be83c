"""The rows of one version of a grid, from wherever its pieces stand: each row once.

First all heads are read, and of each row the newest birth is chosen; then bodies are read in the
order in which they stand in their files, neighbours together. So nothing depends on the order in
which pieces are met, and no row is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from emberkeep.blobs import Buffer
from emberkeep.errors import ChangedError, DamageError, MissingObjectError
from emberkeep.memory import Spread, Values, recycled
from emberkeep.pool import Pool
from emberkeep.repository.ahead import Ahead
from emberkeep.repository.bundles import (
    Bundle,
    Family,
    Form,
    Piece,
    Rows,
    check_body,
    columns_of,
    decoded,
    unpack_heads,
)
from emberkeep.repository.choosing import Chosen
from emberkeep.repository.grid import GridPlan, newest_catalog
from emberkeep.repository.repository import Repository
from emberkeep.snapshot import Chunk

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

# What lies between two wanted ranges is read with them if it is shorter than this.
_GAP_NBYTES = 128 * 1024
_READ_NBYTES = 16 * 2**20
# Ranges are looked at together up to this: the more rows, the nearer stand those of one table.
_BATCH_NBYTES = 16 * 2**20
_READERS = 4
_BODY_READERS = 2


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file, and the pieces that lie there; each with its place in the range."""

    bundle: Bundle
    start: int
    length: int
    pieces: tuple[tuple[Piece, int], ...]


def ranges(bundle: Bundle, *, heads: bool, most_nbytes: int = _READ_NBYTES) -> list[Range]:
    """The wanted pieces of a file as few long reads."""
    wanted = sorted(
        ((p.head, p.head_nbytes, p) if heads else (p.offset, p.nbytes, p) for p in bundle.pieces),
        key=lambda item: item[:2],
    )
    found: list[Range] = []
    run: list[tuple[int, int, Piece]] = []

    def close() -> None:
        if run:
            start, end = run[0][0], max(at + nbytes for at, nbytes, _ in run)
            pieces = tuple((piece, at - start) for at, _, piece in run)
            found.append(Range(bundle, start, end - start, pieces))
            run.clear()

    for at, nbytes, piece in wanted:
        if run:
            start, end = run[0][0], run[-1][0] + run[-1][1]
            if at - end > _GAP_NBYTES or at + nbytes - start > most_nbytes:
                close()
        run.append((at, nbytes, piece))
    close()
    return found


def read_range(repository: Repository, wanted: Range) -> Buffer:
    try:
        return repository.store.get_range(wanted.bundle.name, wanted.start, wanted.length)
    except MissingObjectError:
        name = wanted.bundle.name
        raise DamageError(
            f"{name} is missing: it was deleted, or removed by gc while its version was not "
            "pinned; restore another version",
            name=name,
        ) from None


def read_heads(
    repository: Repository, bundles: Sequence[Bundle]
) -> list[tuple[Bundle, Piece, Rows]]:
    """The rows that the pieces of bundles hold, by name, in the order of the pieces."""

    def read(bundle: Bundle) -> list[tuple[Range, Buffer]]:
        return [(wanted, read_range(repository, wanted)) for wanted in ranges(bundle, heads=True)]

    def heads_of(bundle: Bundle, data: list[tuple[Range, Buffer]]) -> Iterator[Rows]:
        found: dict[int, Rows] = {}
        for wanted, content in data:
            rows = unpack_heads(bundle.name, wanted.pieces, memoryview(content))
            found.update(
                (piece.head, each) for (piece, _), each in zip(wanted.pieces, rows, strict=True)
            )
        return (found[piece.head] for piece in bundle.pieces)

    def heads(every: Iterable[list[tuple[Range, Buffer]]]) -> list[tuple[Bundle, Piece, Rows]]:
        return [
            (bundle, piece, rows)
            for bundle, data in zip(bundles, every, strict=True)
            for piece, rows in zip(bundle.pieces, heads_of(bundle, data), strict=True)
        ]

    if len(bundles) <= _READERS:
        return heads(map(read, bundles))
    with ThreadPoolExecutor(_READERS) as readers:
        return heads(readers.map(read, bundles))


def rows_of_plan(
    repository: Repository,
    planned: GridPlan,
    pool: Pool,
    *,
    tables: Collection[str] | None = None,
    after: int | None = None,
) -> Iterator[Chunk]:
    """Every row of a version once, tombstones as chunks without planes.

    With `after`, only what was written since that earlier version of the grid. `ChangedError` if
    files went while they were read because the grid was rearranged: plan again.
    """
    bundles = planned.bundles if after is None else planned.since(after)
    try:
        for rows in _rows(repository, bundles, pool, tables, apart=False):
            for table, start, stop in rows.by_table():
                planes = rows.planes and {name: v[start:stop] for name, v in rows.planes.items()}
                yield Chunk(
                    table, rows.ids[start:stop], cast("dict[str, npt.NDArray[Any]]", planes)
                )
    except DamageError as error:
        check_unchanged(repository, planned, error)
        raise


def rows_apart(repository: Repository, planned: GridPlan, pool: Pool) -> Iterator[Apart]:
    """`rows_of_plan` for whoever can write rows from where they stand: those that are stored as
    they are need not be copied together first. Tombstones are left out."""
    try:
        for rows in _rows(repository, planned.bundles, pool, None, apart=True):
            if rows.planes is not None:
                yield rows
    except DamageError as error:
        check_unchanged(repository, planned, error)
        raise


def check_unchanged(repository: Repository, planned: GridPlan, error: DamageError) -> None:
    """A file that is missing under an unchanged catalog is damage; else it was rearranged."""
    if newest_catalog(repository, planned.catalog.grid).generation != planned.catalog.generation:
        raise ChangedError(
            f"the grid of {repository.store.url} was rearranged while it was read ({error.name} "
            "is not needed any more): read again, or pin the version before"
        ) from error


@dataclass(frozen=True, slots=True)
class Apart:
    """Rows of some tables: those of `tables[i]` at offsets[i]:offsets[i + 1], ids unique.

    Without planes they are tombstones.
    """

    tables: Sequence[str]
    offsets: Sequence[int]
    ids: I64
    planes: Mapping[str, Values] | None

    def by_table(self) -> Iterator[tuple[str, int, int]]:
        return zip(self.tables, self.offsets, self.offsets[1:], strict=False)


def _rows(
    repository: Repository, bundles: Sequence[Bundle], pool: Pool,
    tables: Collection[str] | None, *, apart: bool,
) -> Iterator[Apart]:  # fmt: skip
    schema = repository.schema["tables"]
    names, limits = list(schema), [table.get("rows") for table in schema.values()]
    wanted = None if tables is None else {names.index(table) for table in tables}
    every = [each for bundle in bundles for each in ranges(bundle, heads=False)]
    batches = _batches([each for each in every if any(p.nbytes for p, _ in each.pieces)])
    # The first bodies are on their way while heads are looked at.
    with Ahead(_read_ahead(repository, batches), depth=1) as reads:
        chosen = Chosen(read_heads(repository, bundles), limits, wanted, pool)
        for table, ids in chosen.tombstones():
            yield Apart([names[table]], [0, ids.size], ids, None)
        for batch in reads:
            for taken in _taken(batch, chosen):
                tables_K, offsets = taken.tables()
                ids, planes = taken.rows_of(offsets, pool, apart=apart)
                yield Apart([names[table] for table in tables_K], offsets, ids, planes)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Bytes of several ranges one after the other, each with the place where it begins."""

    ranges: Sequence[tuple[Range, int]]
    flat: npt.NDArray[np.uint8]


def _batches(every: Sequence[Range]) -> list[list[Range]]:
    """Ranges that are looked at together, in their order; the shortest batch comes first, because
    nothing can be written until one is there."""
    found: list[list[Range]] = []
    nbytes = 0
    for each in every:
        if not found or nbytes + each.length > _BATCH_NBYTES:
            found.append([])
            nbytes = 0
        found[-1].append(each)
        nbytes += each.length
    if found:
        shortest = min(found, key=lambda batch: sum(each.length for each in batch))
        found.remove(shortest)
        found.insert(0, shortest)
    return found


def _read_ahead(repository: Repository, batches: Sequence[Sequence[Range]]) -> Iterator[_Batch]:
    """The batches in order, some of them read at once."""
    with ThreadPoolExecutor(_BODY_READERS) as readers:
        reading: deque[Future[_Batch]] = deque()
        try:
            for batch in batches:
                reading.append(readers.submit(_checked, repository, batch))
                if len(reading) > _BODY_READERS:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            for data in reading:
                data.cancel()


def _checked(repository: Repository, batch: Sequence[Range]) -> _Batch:
    """The bytes of ranges; the pieces in them match their digests."""
    found, starts, end = [], [], 0
    for each in batch:
        data = read_range(repository, each)
        view = memoryview(data)
        for piece, at in each.pieces:
            check_body(each.bundle.name, piece, view[at : at + piece.nbytes])
        starts.append(end)
        # Ranges begin at multiples of four, so that rows in them can be read where they are.
        padding = -len(data) % 4
        found += [np.frombuffer(data, np.uint8), np.zeros(padding, np.uint8)]
        end += len(data) + padding
    flat = found[0]
    if len(batch) > 1:
        flat = np.concatenate(found, out=np.asarray(recycled(end)))
    return _Batch(list(zip(batch, starts, strict=True)), flat)


def _taken(batch: _Batch, chosen: Chosen) -> Iterator[_Taken]:
    """The chosen rows of the pieces in a batch, family by family."""
    by_family: dict[Family, list[tuple[str, Piece, int]]] = {}
    for each, start in batch.ranges:
        for piece, at in each.pieces:
            family = each.bundle.families[piece.family]
            if family:  # tombstones were told before
                by_family.setdefault(family, []).append((each.bundle.name, piece, start + at))
    for family, pieces in by_family.items():
        table_S, segments, rows = chosen.segments(pieces)
        if rows:
            yield _Taken(family, batch.flat, chosen, table_S, segments, rows)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The chosen rows of one family in a batch, as segments that stand table by table."""

    family: Family
    flat: npt.NDArray[np.uint8]
    chosen: Chosen
    table_S: I32
    segments_S6: I64
    rows: int

    def tables(self) -> tuple[list[int], list[int]]:
        """The tables, and where the rows of each begin; at last how many there are."""
        firsts = [0, *(np.flatnonzero(np.diff(self.table_S)) + 1).tolist()]
        return self.table_S[firsts].tolist(), [*self.segments_S6[firsts, 5].tolist(), self.rows]

    def rows_of(
        self, offsets: Sequence[int], pool: Pool, *, apart: bool
    ) -> tuple[I64, dict[str, Values]]:
        """The ids and planes of all rows.

        Where no row has to be moved for it, ids of a table ascend, so that memory is written in
        its order.
        """
        from emberkeep.kernels import gather, ordering

        ids = np.empty(self.rows, np.int64)
        gather.gather_ids(self.segments_S6, self.chosen.kept, self.chosen.ids, ids)
        planes: dict[str, Values] = {}
        for form, values in self._columns(pool, apart):
            planes[form.plane] = values if isinstance(values, Spread) else form.decode(values, pool)
        if all(isinstance(values, Spread) for values in planes.values()):
            order = np.empty(self.rows, np.int64)
            ordering.ascending(ids, np.array(offsets), order, np.empty(self.rows, np.int64))
            ids, planes = ids[order], {name: v[order] for name, v in planes.items()}
        return ids, planes

    def _columns(
        self, pool: Pool, apart: bool
    ) -> list[tuple[Form, Spread | list[npt.NDArray[np.uint8]]]]:
        """Each plane: where its rows begin, or its columns, copied together."""
        from emberkeep.kernels import gather

        segments, kept = self.segments_S6, self.chosen.kept
        parts = _parts(segments[:, 5], self.rows, pool.threads)
        found: list[tuple[Form, Spread | list[npt.NDArray[np.uint8]]]] = []
        tasks: list[Callable[[], None]] = []
        before = 0
        for form in self.family:
            columns = []
            for width in form.columns():
                aligned = not (((segments[:, 2] + before * segments[:, 3]) | width) & 3).any()
                unit = 4 if aligned else 1
                units = self.flat[: self.flat.size // unit * unit].view(f"u{unit}")
                if apart and aligned and not form.coded and np.dtype(form.dtype).itemsize == 4:
                    starts = np.empty(self.rows, np.int64)
                    gather.starts(segments, kept, before, width // 4, starts)
                    found.append((form, Spread(units.view(form.dtype), starts, form.width)))
                else:
                    out = np.empty((self.rows, width), np.uint8)
                    into = out.reshape(-1).view(units.dtype)
                    tasks += [
                        partial(
                            gather.gather, a, b, segments, kept, units, unit, before,
                            width // unit, into,
                        )
                        for a, b in parts
                    ]  # fmt: skip
                    columns.append(out)
                before += width
            if columns:
                found.append((form, columns))
        pool.run(tasks)
        return found


def _parts(firsts_S: I64, rows: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of segments with about as many rows each."""
    wanted = [rows * i // parts for i in range(1, parts)]
    bounds = [0, *np.searchsorted(firsts_S, wanted).tolist(), firsts_S.size]
    return [(a, b) for a, b in pairwise(bounds) if b > a]


def rows_of_bundle(repository: Repository, bundle: Bundle, pool: Pool) -> Iterator[Chunk]:
    """All rows of a file as they stand there, piece by piece, ids ascending."""
    names = list(repository.schema["tables"])
    heads = {piece.head: rows for _, piece, rows in read_heads(repository, [bundle])}
    for wanted in ranges(bundle, heads=False):
        data = memoryview(read_range(repository, wanted))
        for piece, at in wanted.pieces:
            rows = heads[piece.head]
            tables = rows.tables()
            family = bundle.families[piece.family]
            columns = columns_of(bundle, piece, data[at : at + piece.nbytes])
            for table in np.unique(tables).tolist():
                mine = np.flatnonzero(tables == table)
                mine = mine[np.argsort(rows.ids[mine], kind="stable")]
                planes = decoded(family, [column[mine] for column in columns], pool)
                yield Chunk(names[table], rows.ids[mine], planes if family else None)

"""The rows of one version of a grid, from wherever its pieces stand: each row once.

First all heads are read, and of each row the newest birth is chosen; then bodies are read in the
order in which they stand in their files, neighbours together. So nothing depends on the order in
which pieces are met, and no row is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from emberkeep.blobs import Buffer
from emberkeep.errors import ChangedError, DamageError, MissingObjectError
from emberkeep.memory import Spread, Values
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
    unpack_head,
)
from emberkeep.repository.grid import GridPlan, newest_catalog
from emberkeep.repository.repository import Repository
from emberkeep.snapshot import Chunk

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

# What lies between two wanted ranges is read with them if it is shorter than this.
_GAP_NBYTES = 128 * 1024
_READ_NBYTES = 16 * 2**20
# Ranges are looked at together up to this: each costs every table in it an installation.
_BATCH_NBYTES = 32 * 2**20
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

    def heads_of(bundle: Bundle) -> list[tuple[Bundle, Piece, Rows]]:
        found = {}
        for wanted in ranges(bundle, heads=True):
            data = memoryview(read_range(repository, wanted))
            for piece, at in wanted.pieces:
                rows = unpack_head(bundle.name, piece, data[at : at + piece.head_nbytes])
                found[piece.head] = rows
        return [(bundle, piece, found[piece.head]) for piece in bundle.pieces]

    if len(bundles) <= _READERS:
        return [found for bundle in bundles for found in heads_of(bundle)]
    with ThreadPoolExecutor(_READERS) as readers:
        return [found for heads in readers.map(heads_of, bundles) for found in heads]


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
            yield Chunk(rows.table, rows.ids, cast("dict[str, npt.NDArray[Any]]", rows.planes))
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
    """Rows of one table, ids unique; without planes they are tombstones."""

    table: str
    ids: I64
    planes: Mapping[str, Values] | None


def _rows(
    repository: Repository, bundles: Sequence[Bundle], pool: Pool,
    tables: Collection[str] | None, *, apart: bool,
) -> Iterator[Apart]:  # fmt: skip
    names = list(repository.schema["tables"])
    wanted = None if tables is None else {names.index(table) for table in tables}
    every = [each for bundle in bundles for each in ranges(bundle, heads=False)]
    batches = _batches([each for each in every if any(p.nbytes for p, _ in each.pieces)])
    # The first bodies are on their way while heads are looked at.
    with Ahead(_read_ahead(repository, batches), depth=1) as reads:
        chosen = _Chosen(repository, read_heads(repository, bundles), wanted, pool)
        for table, ids in chosen.tombstones():
            yield Apart(names[table], ids, None)
        for batch in reads:
            for taken in _taken(batch, chosen):
                for table, ids, planes in taken.by_table(pool, apart=apart):
                    yield Apart(names[table], ids, planes)


class _Chosen:
    """Which rows of each piece are the newest of their id."""

    def __init__(
        self, repository: Repository, heads: Sequence[tuple[Bundle, Piece, Rows]],
        wanted: Collection[int] | None, pool: Pool,
    ) -> None:  # fmt: skip
        # Newest first; of one birth rows before tombstones: an id that left and came back is both.
        order = sorted(
            range(len(heads)),
            key=lambda i: (-heads[i][1].birth, not heads[i][0].families[heads[i][1].family]),
        )
        sizes = [heads[i][2].ids.size for i in order]
        self.firsts = dict(
            zip(
                ((heads[i][0].name, heads[i][1].head) for i in order),
                np.cumsum([0, *sizes[:-1]]).tolist() if sizes else [],
                strict=True,
            )
        )
        empty = np.empty(0, np.int64)
        self.ids: I64 = np.concatenate([empty, *(heads[i][2].ids for i in order)])
        self.tables_G: I32 = np.concatenate(
            [empty.astype(np.int32), *(heads[i][2].tables_G for i in order)]
        )
        self.counts_G: I64 = np.concatenate([empty, *(heads[i][2].counts_G for i in order)])
        self.starts_G: I64 = np.cumsum(self.counts_G) - self.counts_G
        self.groups = {
            (heads[i][0].name, heads[i][1].head): heads[i][2].counts_G.size for i in order
        }
        ends = np.cumsum([0, *self.groups.values()]).tolist()
        self.first_group = dict(zip(self.groups, ends, strict=False))
        self.kept: Bools = np.zeros(self.ids.size, np.bool_)
        self._no_planes = [
            (heads[i][0].name, heads[i][1])
            for i in order
            if not heads[i][0].families[heads[i][1].family]
        ]
        self._choose(repository, wanted, pool)
        self.kept_before: I64 = np.zeros(self.ids.size + 1, np.int64)
        np.cumsum(self.kept, out=self.kept_before[1:])

    def _choose(self, repository: Repository, wanted: Collection[int] | None, pool: Pool) -> None:
        from emberkeep.kernels import grid

        if not self.tables_G.size:
            return
        by_table = np.argsort(self.tables_G, kind="stable")
        present, firsts = np.unique(self.tables_G[by_table], return_index=True)
        specs = list(repository.schema["tables"].values())

        def choose(table: int, groups: I64) -> None:
            starts, counts = self.starts_G[groups], self.counts_G[groups]
            limit = specs[table].get("rows")
            if limit is not None:
                self._check_limit(table, starts, counts, limit)
                bits = np.zeros((limit + 63) // 64, np.uint64)
                grid.claim_bits(starts, counts, self.ids, bits, self.kept)
            else:
                size = 1 << int(2 * counts.sum()).bit_length()
                grid.claim_ids(starts, counts, self.ids, np.full(size, -1), self.kept)

        tasks = []
        for table, groups in zip(present, np.split(by_table, firsts[1:]), strict=True):
            if table >= len(specs) or table < 0:
                raise DamageError(f"rows of table {table}, which the schema lacks", name="grid")
            if wanted is None or int(table) in wanted:
                tasks.append(partial(choose, int(table), groups))
        pool.run(tasks)

    def _check_limit(self, table: int, starts: I64, counts: I64, limit: int) -> None:
        # Ids ascend within a group: its ends bound it. Kernels do not look.
        held = counts > 0
        low, high = self.ids[starts[held]], self.ids[starts[held] + counts[held] - 1]
        if low.size and (low.min() < 0 or high.max() >= limit):
            raise DamageError(f"ids of table {table} lie outside its {limit} rows", name="grid")

    def of(self, name: str, piece: Piece) -> tuple[int, I32, I64]:
        """Where the rows of a piece begin here, and its groups."""
        group = self.first_group[name, piece.head]
        some = slice(group, group + self.groups[name, piece.head])
        return self.firsts[name, piece.head], self.tables_G[some], self.counts_G[some]

    def segments(self, pieces: Sequence[tuple[str, Piece, int]]) -> tuple[I32, I64]:
        """The groups of pieces that have kept rows, table by table, as `kernels.gather` takes
        them: the table of each, and where its rows stand and go."""
        tables, found = [np.empty(0, np.int32)], [np.empty((0, 6), np.int64)]
        for name, piece, body in pieces:
            first, tables_G, counts_G = self.of(name, piece)
            local = np.cumsum(counts_G) - counts_G
            rows = first + local
            kept = self.kept_before[rows + counts_G] - self.kept_before[rows]
            same = np.ones_like(rows)
            found.append(
                np.stack([rows, counts_G, body * same, piece.rows * same, local, kept], axis=1)
            )
            tables.append(tables_G)
        table, segments = np.concatenate(tables), np.concatenate(found)
        order = np.argsort(table, kind="stable")
        order = order[segments[order, 5] > 0]
        table, segments = table[order], segments[order]
        segments[:, 5] = np.cumsum(segments[:, 5]) - segments[:, 5]
        return table, segments

    def tombstones(self) -> Iterator[tuple[int, I64]]:
        found: dict[int, list[I64]] = {}
        for name, piece in self._no_planes:
            first, tables, counts = self.of(name, piece)
            for table, start, count in zip(
                tables.tolist(), (np.cumsum(counts) - counts).tolist(), counts.tolist(), strict=True
            ):
                some = slice(first + start, first + start + count)
                found.setdefault(table, []).append(self.ids[some][self.kept[some]])
        for table, parts in found.items():
            ids = np.unique(np.concatenate(parts))
            if ids.size:
                yield table, ids


@dataclass(frozen=True, slots=True)
class _Batch:
    """Bytes of several ranges one after the other, each with the place where it begins."""

    ranges: Sequence[tuple[Range, int]]
    flat: npt.NDArray[np.uint8]


def _batches(every: Sequence[Range]) -> list[list[Range]]:
    """Ranges that are looked at together, in their order."""
    found: list[list[Range]] = []
    nbytes = 0
    for each in every:
        if not found or nbytes + each.length > _BATCH_NBYTES:
            found.append([])
            nbytes = 0
        found[-1].append(each)
        nbytes += each.length
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
    flat = found[0] if len(batch) == 1 else np.concatenate(found)
    return _Batch(list(zip(batch, starts, strict=True)), flat)


def _taken(batch: _Batch, chosen: _Chosen) -> Iterator[_Taken]:
    """The chosen rows of the pieces in a batch, family by family."""
    by_family: dict[Family, list[tuple[str, Piece, int]]] = {}
    for each, start in batch.ranges:
        for piece, at in each.pieces:
            family = each.bundle.families[piece.family]
            if family:  # tombstones were told before
                by_family.setdefault(family, []).append((each.bundle.name, piece, start + at))
    for family, pieces in by_family.items():
        table_S, segments = chosen.segments(pieces)
        if table_S.size:
            yield _Taken(family, batch.flat, chosen, table_S, segments)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The chosen rows of one family in a batch, as segments that stand table by table."""

    family: Family
    flat: npt.NDArray[np.uint8]
    chosen: _Chosen
    table_S: I32
    segments_S6: I64

    def by_table(
        self, pool: Pool, *, apart: bool
    ) -> Iterator[tuple[int, I64, Mapping[str, Values]]]:
        """Tables with their rows; those `apart` with ids ascending, so that memory is written in
        its order."""
        from emberkeep.kernels import gather

        firsts = self.segments_S6[:, 5]
        last, before = self.segments_S6[-1], self.chosen.kept_before
        rows = int(last[5] + before[last[0] + last[1]] - before[last[0]])
        ids = np.empty(rows, np.int64)
        gather.gather_ids(self.segments_S6, self.chosen.kept, self.chosen.ids, ids)
        found = self._columns(rows, pool, apart)
        cuts = [0, *(np.flatnonzero(np.diff(self.table_S)) + 1).tolist()]
        starts = firsts[cuts].tolist()
        for cut, start, stop in zip(cuts, starts, [*starts[1:], rows], strict=True):
            some: slice | I64 = slice(start, stop)
            if apart and (np.diff(ids[start:stop]) < 0).any():
                some = start + np.argsort(ids[start:stop], kind="stable")
            planes: dict[str, Values] = {}
            for form, values in found:
                planes[form.plane] = (
                    values[some]
                    if isinstance(values, Spread)
                    else form.decode([column[some] for column in values], pool)
                )
            yield int(self.table_S[cut]), ids[some], planes

    def _columns(
        self, rows: int, pool: Pool, apart: bool
    ) -> list[tuple[Form, Spread | list[npt.NDArray[np.uint8]]]]:
        """Each plane: where its rows begin, or its columns, copied together."""
        from emberkeep.kernels import gather

        segments, kept = self.segments_S6, self.chosen.kept
        parts = _parts(segments[:, 5], rows, pool.threads)
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
                    starts = np.empty(rows, np.int64)
                    gather.starts(segments, kept, before, width // 4, starts)
                    found.append((form, Spread(units.view(form.dtype), starts, form.width)))
                else:
                    out = np.empty((rows, width), np.uint8)
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

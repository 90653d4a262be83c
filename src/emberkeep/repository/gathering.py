"""The rows of one version of a grid, from wherever its pieces stand: each row once.

First all heads are read, and of each row the newest birth is chosen; then bodies are read in the
order in which they stand in their files, neighbours together. So nothing depends on the order in
which pieces are met, and no row is written twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from emberkeep.errors import ChangedError, DamageError, MissingObjectError
from emberkeep.pool import Pool
from emberkeep.repository.ahead import Ahead
from emberkeep.repository.bundles import (
    Bundle,
    Family,
    Piece,
    Rows,
    check_body,
    columns_of,
    decoded,
    unpack_head,
    widths_of,
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
_READERS = 4


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


def read_range(repository: Repository, wanted: Range) -> bytes:
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
        yield from _rows(repository, bundles, pool, tables)
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


def _rows(
    repository: Repository, bundles: Sequence[Bundle], pool: Pool, tables: Collection[str] | None
) -> Iterator[Chunk]:
    names = list(repository.schema["tables"])
    wanted = None if tables is None else {names.index(table) for table in tables}
    heads = read_heads(repository, bundles)
    chosen = _Chosen(repository, heads, wanted, pool)
    yield from chosen.tombstones(names)
    every = [each for bundle in bundles for each in ranges(bundle, heads=False)]
    batches = [each for each in every if any(p.nbytes for p, _ in each.pieces)]
    with Ahead(((each, read_range(repository, each)) for each in batches), depth=2) as reads:
        for each, data in reads:
            yield from _batch(each, data, chosen, names, pool)


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

    def tombstones(self, names: Sequence[str]) -> Iterator[Chunk]:
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
                yield Chunk(names[table], ids, None)


def _batch(
    each: Range, data: bytes, chosen: _Chosen, names: Sequence[str], pool: Pool
) -> Iterator[Chunk]:
    """The chosen rows of the pieces in one range, table by table."""
    view = memoryview(data)
    pool.run(
        [
            partial(_check, each.bundle.name, part, view)
            for part in _split([item for item in each.pieces if item[0].nbytes], pool.threads)
        ]
    )
    by_family: dict[int, list[tuple[Piece, int]]] = {}
    for piece, at in each.pieces:
        if piece.nbytes:
            by_family.setdefault(piece.family, []).append((piece, at))
    flat = np.frombuffer(data, np.uint8)
    for number, pieces in by_family.items():
        family = each.bundle.families[number]
        yield from _family(each.bundle, family, pieces, flat, chosen, names, pool)


def _split(items: Sequence[tuple[Piece, int]], parts: int) -> list[list[tuple[Piece, int]]]:
    return [list(items[i::parts]) for i in range(parts) if items[i::parts]]


def _check(name: str, pieces: Sequence[tuple[Piece, int]], view: memoryview) -> None:
    for piece, at in pieces:
        check_body(name, piece, view[at : at + piece.nbytes])


def _family(
    bundle: Bundle, family: Family, pieces: Sequence[tuple[Piece, int]],
    flat: npt.NDArray[np.uint8], chosen: _Chosen, names: Sequence[str], pool: Pool,
) -> Iterator[Chunk]:  # fmt: skip
    widths = widths_of(family)
    tables, rows, local, bodies, sizes = [], [], [], [], []
    for piece, at in pieces:
        first, tables_G, counts_G = chosen.of(bundle.name, piece)
        kept = np.flatnonzero(chosen.kept[first : first + piece.rows])
        if kept.size:
            tables.append(np.repeat(tables_G, counts_G)[kept])
            rows.append(first + kept)
            local.append(kept)
            bodies.append(np.full(kept.size, at))
            sizes.append(np.full(kept.size, piece.rows))
    if not rows:
        return
    table, row = np.concatenate(tables), np.concatenate(rows)
    here, body, size = np.concatenate(local), np.concatenate(bodies), np.concatenate(sizes)
    # By table alone, and stably: numpy sorts 16-bit numbers by counting.
    if (np.diff(table) < 0).any():
        small = np.int16 if len(names) < 2**15 else np.int32
        order = np.argsort(table.astype(small), kind="stable")
        table, row, here = table[order], row[order], here[order]
        body, size = body[order], size[order]
    ids = chosen.ids[row]
    starts, passed = [], 0
    for width in widths:
        starts.append(body + passed * size + here * width)
        passed += width
    cuts = np.flatnonzero(np.diff(table)) + 1
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), table.size], strict=True):
        some = slice(first, last)
        begins = [np.ascontiguousarray(start[some]) for start in starts]
        yield decoded(family, names[int(table[first])], ids[some], flat, begins, pool)


def rows_of_bundle(repository: Repository, bundle: Bundle, pool: Pool) -> Iterator[Chunk]:
    """All rows of a file as they stand there, piece by piece, ids ascending."""
    names = list(repository.schema["tables"])
    heads = {piece.head: rows for _, piece, rows in read_heads(repository, [bundle])}
    for wanted in ranges(bundle, heads=False):
        data = read_range(repository, wanted)
        for piece, at in wanted.pieces:
            rows = heads[piece.head]
            tables = rows.tables()
            family = bundle.families[piece.family]
            columns_of(bundle, piece, memoryview(data)[at : at + piece.nbytes])
            for table in np.unique(tables).tolist():
                mine = np.flatnonzero(tables == table)
                mine = mine[np.argsort(rows.ids[mine], kind="stable")]
                if not family:
                    yield Chunk(names[table], rows.ids[mine], None)
                    continue
                starts, passed = [], at
                for width in widths_of(family):
                    starts.append(passed + mine * width)
                    passed += piece.rows * width
                flat = np.frombuffer(data, np.uint8)
                yield decoded(family, names[table], rows.ids[mine], flat, starts, pool)

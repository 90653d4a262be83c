"""The rows of one version of a grid, from wherever its pieces stand: each row once.

First all heads are read, and of each row the newest birth is chosen; then bodies are read in the
order in which they stand in their files, neighbours together. So nothing depends on the order in
which pieces are met, and no row is written twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, U8
from emberkeep.blobs import Part
from emberkeep.blobs.system_disk import BLOCK_NBYTES
from emberkeep.errors import ChangedError, DamageError
from emberkeep.repository.grid.bundle_reader import (
    calls_at_once,
    ensure_there,
    gap_of,
    ranges,
    read_each,
    read_range,
    rows_of_pieces,
    runs,
)
from emberkeep.repository.grid.bundles import (
    Bundle,
    Form,
    check_pieces,
    columns_of,
    decoded,
    widths_of,
)
from emberkeep.repository.grid.catalog import GridPlan, newest_catalog
from emberkeep.repository.grid.piece_table import PieceTable
from emberkeep.repository.grid.selection import Chosen, Listed
from emberkeep.repository.repository import Repository
from emberkeep.rows.snapshot import Chunk
from emberkeep.runtime.crew import Crew
from emberkeep.runtime.memory import ScatteredRows, Values, recycled
from emberkeep.runtime.pool import Pool, spans

# Bodies are looked at together up to this: the more rows, the nearer stand those of one table.
_BATCH_NBYTES = 32 * 2**20
_AREA_NBYTES = _BATCH_NBYTES + 2 * BLOCK_NBYTES
# Batches that are looked at at once.
_TAKERS = 2
_LEAST_ROWS = 1024


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
    pieces = planned.tables if after is None else planned.since(after)
    try:
        for rows, _ in _rows(repository, pieces, pool, tables, scattered=False):
            for table, start, stop in rows.by_table():
                planes = rows.planes and {name: v[start:stop] for name, v in rows.planes.items()}
                yield Chunk(
                    table, rows.ids[start:stop], cast("dict[str, npt.NDArray[Any]]", planes)
                )
    except DamageError as error:
        check_unchanged(repository, planned, error)
        raise


def scattered_rows(
    repository: Repository, planned: GridPlan, pool: Pool
) -> Iterator[tuple[ScatteredTables, int]]:
    """`rows_of_plan` for a caller that can write rows from where they stand: those stored as
    they are need not be copied together first. Tombstones are left out. With each, how many
    threads are busy with what comes next."""
    try:
        for rows, busy in _rows(repository, planned.tables, pool, None, scattered=True):
            if rows.planes is not None:
                yield rows, busy
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
class ScatteredTables:
    """Rows of some tables: those of `tables[i]` at offsets[i]:offsets[i + 1], ids unique.

    Without planes they are tombstones.
    """

    tables: Sequence[str]
    offsets: Sequence[int]
    ids: I64
    planes: Mapping[str, Values] | None

    def by_table(self) -> Iterator[tuple[str, int, int]]:
        return zip(self.tables, self.offsets, self.offsets[1:], strict=False)


@dataclass(frozen=True, slots=True)
class _Run:
    """Heads or bodies of `pieces`, which stand side by side; `lead` bytes before them and some
    after them are read too, so that whole blocks of a disk are."""

    name: str
    pieces: I64
    start: int
    length: int
    lead: int

    @property
    def room(self) -> int:
        return -(-(self.lead + self.length) // BLOCK_NBYTES) * BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class _Batch:
    """Runs whose bytes are on their way: each into the memory from `begins` on."""

    runs: Sequence[_Run]
    begins: Sequence[int]
    area: memoryview
    reads: Sequence[Future[None]]

    def arrived(self, starts_P: I64) -> tuple[I64, I64]:
        """Its pieces, and where in the memory stands what begins at `starts_P` of the files."""
        for read in self.reads:
            read.result()
        pieces = np.concatenate([run.pieces for run in self.runs])
        moved = [begin - run.start for run, begin in zip(self.runs, self.begins, strict=True)]
        return pieces, starts_P[pieces] + np.repeat(moved, [run.pieces.size for run in self.runs])


def _rows(
    repository: Repository, planned: Sequence[PieceTable], pool: Pool,
    tables: Collection[str] | None, *, scattered: bool,
) -> Iterator[tuple[ScatteredTables, int]]:  # fmt: skip
    schema = repository.tables
    names, limits = list(schema), [table.get("rows") for table in schema.values()]
    wanted = None if tables is None else {names.index(table) for table in tables}
    listed = Listed.of(planned)
    if not listed.rows_P.size:
        return
    choice: Future[Chosen] = Future()
    reading = repository.reading

    def take(batch: _Batch) -> list[ScatteredTables]:
        pieces, bodies = batch.arrived(listed.offset_P)
        check_pieces(
            batch.area, bodies, listed.nbytes_P[pieces], listed.digest_P[pieces],
            lambda number: listed.name(pieces[number]),
        )  # fmt: skip
        chosen, data = choice.result(), np.asarray(batch.area)
        return [
            found
            for family in np.unique(listed.family_P[pieces]).tolist()
            if (found := _taken(chosen, names, pieces, bodies, data, family, pool, scattered))
        ]

    with (
        Crew(reading.depth, "emberkeep-reads", clock=repository.clock) as readers,
        Crew(_TAKERS, "emberkeep-bodies", clock=repository.clock) as takers,
    ):
        taking: deque[tuple[int, Future[list[ScatteredTables]]]] = deque()
        try:
            head_runs = _head_runs(listed)
            batches = deque(_batches(_body_runs(listed, gap_of(repository.store))))
            ends = _long([head_runs, *batches])
            for there in [readers.submit(ensure_there, repository, *end) for end in ends]:
                there.result()
            heads = _start(repository, head_runs, readers)
            held = 0

            def read_on() -> int:
                """Has as many batches read as there may be; what they take."""
                asked = 0
                while batches:
                    nbytes = _nbytes(batches[0])
                    if taking and held + asked + nbytes > reading.nbytes:
                        break
                    batch = _start(repository, batches.popleft(), readers, _AREA_NBYTES)
                    taking.append((nbytes, takers.submit(take, batch)))
                    asked += nbytes
                return asked

            # The first bodies are on their way while heads are looked at.
            held += read_on()
            try:
                pieces, starts = heads.arrived(listed.head_P)
                starts_P = np.empty_like(starts)
                starts_P[pieces] = starts
                chosen = Chosen(listed, heads.area, starts_P, limits, wanted)
                del heads
                choice.set_result(chosen)
            except BaseException as error:
                choice.set_exception(error)
                raise
            for table, ids in chosen.tombstones():
                yield ScatteredTables([names[table]], [0, ids.size], ids, None), 0
            while taking:
                nbytes, taken = taking.popleft()
                found = taken.result()
                held += read_on()
                for rows in found:
                    # What is done needs no thread; what is not will keep at most the takers busy.
                    yield rows, min(_TAKERS, sum(not later.done() for _, later in taking))
                del found, taken
                held -= nbytes
        finally:
            choice.cancel()  # nobody chooses any more where this ends early
            for _, each in taking:
                each.cancel()


def _long(batches: Iterable[Sequence[_Run]]) -> set[tuple[str, int, int]]:
    """Of each file with a run that does not fit into a batch: where the last one ends, and its
    length."""
    longest: dict[str, tuple[int, int]] = {}
    for run in (run for batch in batches for run in batch if run.length > _BATCH_NBYTES):
        longest[run.name] = max(longest.get(run.name, (0, 0)), (run.start + run.length, run.length))
    return {(name, *end) for name, end in longest.items()}


def _nbytes(batch: Sequence[_Run]) -> int:
    return sum(run.room for run in batch)


def _head_runs(listed: Listed) -> list[_Run]:
    order = np.lexsort((listed.head_P, listed.file_P))
    files_P, starts_P = listed.file_P[order], listed.head_P[order]
    return [
        _Run(listed.files[files_P[first]], order[first:last], start, length, start % BLOCK_NBYTES)
        for first, last, start, length in runs(
            starts_P, listed.head_nbytes_P[order], files=files_P
        )
    ]  # fmt: skip


def _body_runs(listed: Listed, gap: int) -> list[_Run]:
    order = np.flatnonzero(listed.nbytes_P)  # tombstones have no bodies
    files_P = listed.file_P[order]
    return [
        # What follows begins at a multiple of four, so that rows can be read where they are.
        _Run(
            listed.files[files_P[first]], order[first:last], start, length,
            0 if start % 4 else start % BLOCK_NBYTES,
        )
        for first, last, start, length in runs(
            listed.offset_P[order], listed.nbytes_P[order], gap, files_P
        )
    ]  # fmt: skip


def _batches(every: Iterable[_Run]) -> list[list[_Run]]:
    """Bodies that are looked at together, in their order; the shortest batch comes first, because
    nothing can be written until one is there."""
    found: list[list[_Run]] = []
    nbytes = 0
    for run in every:
        if not found or nbytes + run.room > _BATCH_NBYTES:
            found.append([])
            nbytes = 0
        found[-1].append(run)
        nbytes += run.room
    if found:
        lengths = [sum(run.length for run in batch) for batch in found]
        found.insert(0, found.pop(lengths.index(min(lengths))))
    return found


def _start(
    repository: Repository, batch: Sequence[_Run], readers: Crew, least_nbytes: int = 0
) -> _Batch:
    """Has the bytes of a batch read, all parts of it at once."""
    # All of one size, so that they are used again: only what is written costs memory.
    area = recycled(max(_nbytes(batch), least_nbytes, 1))
    step = repository.reading.part_nbytes
    begins: list[int] = []
    blocks: list[tuple[Part, int]] = []
    others: list[tuple[Part, int]] = []
    begin = 0
    for run in batch:
        # Without a lead nothing but the run itself is read: blocks would begin elsewhere.
        whole = bool(run.lead) or not run.start % BLOCK_NBYTES
        parts, end = (blocks, run.room) if whole else (others, run.length)
        for at in range(0, end, step):
            into = area[begin + at : begin + min(at + step, end)]
            least = min(len(into), run.lead + run.length - at)
            parts.append((Part(run.name, run.start - run.lead + at, into), least))
        begins.append(begin + run.lead)
        begin += run.room
    reads = [
        readers.submit(read_each, repository, parts[first:last])
        for parts in (blocks, others)
        for first, last in calls_at_once(
            repository, [len(part.into) for part, _ in parts], blocks=parts is blocks
        )
    ]
    return _Batch(batch, begins, area[:begin], reads)


def _taken(
    chosen: Chosen, names: Sequence[str], pieces: I64, bodies: I64, data: U8, family: int,
    pool: Pool, scattered: bool,
) -> ScatteredTables | None:  # fmt: skip
    """The chosen rows of the pieces of one family in a batch; None if there are none."""
    from emberkeep.kernels import gather

    listed = chosen.listed
    forms = listed.families[family]
    chosen_rows = listed.family_P[pieces] == family
    pieces, bodies = pieces[chosen_rows], bodies[chosen_rows]
    counts_T = np.zeros(len(names), np.int64)
    gather.count_kept(
        pieces, chosen.groups_P, chosen.firsts_P, chosen.tables_G, chosen.kept_G, counts_T
    )
    ends_T = np.cumsum(counts_T)
    rows = int(ends_T[-1])
    if not forms or not rows:  # tombstones were handed out before
        return None
    widths_C = np.array(widths_of(forms))
    # Memory that is used again, all of one size as that of the bytes.
    columns = 1 + widths_C.size
    most = max(rows, _BATCH_NBYTES // int(widths_C.sum()))
    words = np.frombuffer(recycled(8 * columns * most), np.int64)
    words_WU = words[: columns * rows].reshape(columns, rows)
    ids_U, starts_CU = words_WU[0], words_WU[1:]
    gather.locate(
        pieces, bodies, listed.rows_P, chosen.starts_P, chosen.groups_P, chosen.firsts_P,
        chosen.tables_G, chosen.counts_G, chosen.kept_G, chosen.ids, chosen.kept,
        np.cumsum(widths_C) - widths_C, widths_C, ends_T - counts_T, ids_U, starts_CU,
    )  # fmt: skip
    planes: dict[str, Values] = {}
    column = 0
    for form in forms:
        count = len(form.columns())
        some = slice(column, column + count)
        planes[form.plane] = _plane(form, data, starts_CU[some], widths_C[some], pool, scattered)
        column += count
    present = np.flatnonzero(counts_T)
    offsets = [*(ends_T - counts_T)[present].tolist(), rows]
    return ScatteredTables([names[table] for table in present.tolist()], offsets, ids_U, planes)


def _plane(
    form: Form, data: U8, starts_CU: I64, widths_C: I64, pool: Pool, scattered: bool
) -> Values:
    """One plane of rows: where they begin, or its columns, copied together and decoded."""
    from emberkeep.kernels import gather

    if scattered and not form.coded and np.dtype(form.dtype).itemsize == 4:
        (starts_U,) = starts_CU
        if not np.bitwise_or.reduce(starts_U) & 3:
            return ScatteredRows(
                data.view(form.dtype), np.right_shift(starts_U, 2, starts_U), form.width
            )
    columns = [np.empty((starts_CU.shape[1], width), np.uint8) for width in widths_C.tolist()]
    pool.run(
        [
            partial(gather.copy_rows, start, stop, data, starts_U, out)
            for starts_U, out in zip(starts_CU, columns, strict=True)
            for start, stop in spans(starts_U.size, pool.threads, _LEAST_ROWS)
        ]
    )
    return form.decode(columns, pool)


def rows_of_bundle(repository: Repository, bundle: Bundle, pool: Pool) -> Iterator[Chunk]:
    """All rows of a file as they stand there, piece by piece, ids ascending."""
    names = list(repository.tables)
    heads = {piece.head: rows for _, piece, rows in rows_of_pieces(repository, [bundle])}
    for wanted in ranges(bundle):
        data = memoryview(read_range(repository, wanted))
        for piece, at in wanted.pieces:
            rows = heads[piece.head]
            tables = rows.tables()
            family = bundle.families[piece.family]
            columns = columns_of(bundle, piece, data[at : at + piece.nbytes])
            for table in np.unique(tables).tolist():
                chosen_rows = np.flatnonzero(tables == table)
                chosen_rows = chosen_rows[np.argsort(rows.ids[chosen_rows], kind="stable")]
                planes = decoded(family, [column[chosen_rows] for column in columns], pool)
                yield Chunk(names[table], rows.ids[chosen_rows], planes if family else None)

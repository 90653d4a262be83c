"""The rows of one slab as they were at one instant, copied out while training goes on.

Freezing takes constant time. Afterwards a background thread copies the selected rows out, while
writers go on: one that is about to change a row which was not copied yet saves its old planes first
(copy on write), with its own threads, and a copy that it may have torn is dropped. Neither waits
for the other. Each selected row is handed out once, with all its planes from the instant of the
freeze.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from emberkeep._types import I64, U64, Bools, Planes
from emberkeep.errors import CancelledError, SaveError, ShardLostError
from emberkeep.kernels import row_copies, scatter
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.priority import Ranking
from emberkeep.rows.row_source import LEAST_ROWS, Arrays, RowSource
from emberkeep.rows.saved_rows import Claimed, SavedRows, SavesWithUpdate, room_for
from emberkeep.rows.tracker import SINCE_VERSION, Frozen, Tracker
from emberkeep.runtime.memory import lazy_zeros
from emberkeep.runtime.pool import ForkLock, Job, Pool, shares

# Rows copied, and words of bitmaps looked at, under one holding of the lock, where one is needed.
_SLICE_ROWS = 4096
_SLICE_WORDS = 65536
# Rows of a chunk take at most so much: some are on their way to the store at once.
_CHUNK_NBYTES = 16 * 2**20
# What a push has saved goes out as it is from so much on: to join it would be one more copy.
_READY_NBYTES = 8 * 2**20
# How long the lock may be held for more slices, beside the time that was waited for it.
_SHARE_OF_WAIT = 0.25
_NONE: U64 = np.empty(0, np.uint64)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TableRange:
    """A table as a range of rows: row `base + l` is id `l * stride + offset`, or `ids[l]`."""

    name: str
    base: int
    rows: int
    planes: tuple[str, ...]
    stride: int = 1
    offset: int = 0
    ids: I64 | None = None

    def ids_of(self, rows: I64) -> I64:
        ids = rows - self.base
        if self.ids is not None:
            return self.ids[ids]
        if self.stride != 1:
            ids *= self.stride
        if self.offset:
            ids += self.offset
        return ids


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one table, ids ascending; without planes they are tombstones."""

    table: str
    ids: I64
    planes: Planes | None


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of one table as they were copied; absent ones were deleted before the freeze."""

    present: Bools
    ids: I64
    planes: Planes


class FrozenRows(Protocol):
    """What a checkpointer asks of frozen rows, wherever they are."""

    held_seconds: float
    """How long it has held writers up: they copied rows, or waited for room. Final once closed."""

    @property
    def pressed(self) -> bool:
        """Whether writers wait for rows to be taken."""
        ...

    def rename(self, names: Mapping[str, str]) -> None:
        """Hands tables out under other names; for the one that froze them, before anybody reads."""
        ...

    def chunks(self, rows: int, cancelled: threading.Event | None = None) -> Iterator[Chunk]:
        """The selected rows, at most about `rows` at a time; once, by one thread."""
        ...

    def close(self, advanced: Collection[str]) -> None:
        """Ends it: the cursors that advanced forget the rows, the others keep them."""
        ...


class Cut(list[_T]):
    """What was frozen, with what its tables knew beside their rows at the same instant.

    Read before or after, the step of a table could be another than that of its rows: pushes of
    other threads and workers do not wait in between.
    """

    def __init__(self, frozen: Iterable[_T], tables: dict[str, Any]) -> None:
        super().__init__(frozen)
        self.tables = tables
        """Of each table its step and ticks, by name."""


class RowHolder(Protocol):
    """Rows that can be frozen: their planes, their bitmaps, and the lock that writers hold."""

    lock: ForkLock
    planes: Planes
    touched: U64
    dirty: U64
    tracker: Tracker | None
    ranking: Ranking | None
    snapshot: Snapshot | None
    lost: ShardLostError | None
    pool: Pool
    """With whose threads writers work."""
    ids: I64
    """Who owns the slots of dynamic tables, by row; empty where there are none."""

    def ranges(self) -> Sequence[TableRange]: ...

    def source(self) -> RowSource: ...


class Snapshot:
    """One frozen selection of one slab. Make it with `freeze`, under no lock.

    `chunks` may be iterated once, by one thread. `room` bounds the old planes that writers have
    saved and nobody has taken yet: beyond it writers wait, which `waits` counts.
    `chosen` replaces the rows that changed by others; the ids that left are those of `since`.
    """

    def __init__(
        self, holder: RowHolder, since: str | None, room: CopyRoom, chosen: U64 | None = None
    ) -> None:
        assert holder.tracker is not None
        self.holder = holder
        self.waits = 0
        self.held_seconds = 0.0
        self._since = since
        self._room = room
        self._frozen: dict[str, Frozen] = holder.tracker.freeze(holder.dirty)
        holder.dirty = lazy_zeros(holder.dirty.shape, np.uint64)
        self._copied: U64 = lazy_zeros(holder.touched.shape, np.uint64)
        selected = self._frozen[since] if since is not None else None
        self._first = _NONE if selected is None else selected.earlier
        self._second = _NONE if selected is None else selected.dirty
        self._ranked: Any = None
        if chosen is not None:
            self._first = self._second = chosen
        elif holder.ranking is not None:
            self._ranked = holder.ranking.take_all()
        self._ranges = tuple(holder.ranges())
        self._bases = np.array([table.base for table in self._ranges])
        # Of this life of the rows: a shard that is lost has others.
        self._touched, self._ids = holder.touched, holder.ids
        # What writers had to save, in the order of their rows.
        self._saved: list[SavedRows] = []
        self._handing = threading.Lock()
        # What the reader lists: rows, which of them are present, and which it may keep.
        self._listed: I64 = np.empty(0, np.int64)
        self._flags: Bools = np.empty((2, 0), np.bool_)
        self._saved_nbytes = 0
        self._source: RowSource = holder.source()
        self._shapes = {name: (p.shape[1], p.dtype) for name, p in holder.planes.items()}
        self._done = False
        self._lost: ShardLostError | None = None
        # Whether a writer has claimed rows that it has not handed over; and has ended so.
        self._claimed = self._failed = False

    def rename(self, names: Mapping[str, str]) -> None:
        """Hands tables out under other names; for the one that froze it, before anybody reads."""
        self._ranges = tuple(
            replace(table, name=names.get(table.name, table.name)) for table in self._ranges
        )

    @property
    def pressed(self) -> bool:
        return self._room.full

    # -- writers ---------------------------------------------------------------------------------

    def before_write(self, written: I64) -> None:
        """Called by a writer that is about to change rows and holds the lock."""
        start = self._room.clock.monotonic()
        with self:
            claimed = self._claim(written, LEAST_ROWS)
            if claimed is not None:
                saved = claimed.saved
                later = self._source.take(saved.rows, saved.planes, self.holder.pool)
                if later is not None:
                    later()
                self._hand_over(saved)
        self.held_seconds += self._room.clock.monotonic() - start

    def before_update(self, written: I64, least: int) -> SavesWithUpdate | None:
        """`before_write` for a writer with an optimizer's kernel, where it `can_save`; `least` rows
        are worth a thread. What is returned is to be run in place of that kernel, and saves the
        rows as well. Ids that are new have no row yet: -1."""
        start = self._room.clock.monotonic()
        claimed = self._claim(written, least)
        self.held_seconds += self._room.clock.monotonic() - start
        if claimed is None:
            return None
        done = partial(self._updated, written.size)
        return SavesWithUpdate(claimed, self.holder.planes, done, self._room.clock)

    def before_insert(self, rows: I64) -> None:
        """Called by a writer that holds the lock: these rows are given to new ids."""
        row_copies.claim(rows, self._copied, np.empty(rows.size, np.bool_))

    def _claim(self, written: I64, least: int) -> Claimed | None:
        """Which of the rows nobody has taken care of, and room for them: from now on it is up to
        the writer, who hands them over. If it ends before, the save fails."""
        if self._failed or not written.size:
            return None
        self._claimed = True
        rows = np.empty(written.size, np.int64)
        present = np.empty(written.size, np.bool_)
        parts = shares(written.size, self.holder.pool.threads, least)
        found = self.holder.pool.together(
            Job(
                row_copies.write_take_before_write,
                parts,
                (self._first, self._second, self._touched, self._copied, written, rows, present),
            )
        )[0]
        firsts_P = np.cumsum([0, *found])
        taken = int(firsts_P[-1])
        if not taken:
            self._claimed = False
            return None
        if len(parts) > 1:
            places = [slice(start, start + n) for (start, _), n in zip(parts, found, strict=True)]
            rows = np.concatenate([rows[place] for place in places])
            present = np.concatenate([present[place] for place in places])
        rows, present = rows[:taken], present[:taken]
        planes = {name: room_for(taken, *shape) for name, shape in self._shapes.items()}
        ids = self._ids[rows] if self._ids.size else None
        return Claimed(parts, firsts_P, SavedRows(rows, ids, present, planes))

    def __enter__(self) -> None:
        """Entered by a writer that holds the lock, until it has ended."""

    def __exit__(self, *_: object) -> None:
        """If rows are in the writer's hands still, it has ended with an error: the save fails, and
        nothing is copied for it any more."""
        if self._claimed and not self._failed:
            self._failed = self._done = True
            self._room.change()

    def _updated(self, written: int, saved: SavedRows, seconds: float) -> None:
        """Rows were saved by the kernel that updated them and others, which took so long. Writers
        were held up, by estimate, for as much of it as the copies are of the bytes that it moved:
        it reads and writes all planes, and reads a gradient."""
        self._hand_over(saved)
        gradient = saved.planes["weight"].nbytes
        updated = (2 * saved.nbytes + gradient) * written / saved.rows.size
        self.held_seconds += seconds * saved.nbytes / (saved.nbytes + updated)

    def _hand_over(self, saved: SavedRows) -> None:
        with self._handing:
            self._saved.append(saved)
            self._saved_nbytes += saved.nbytes
        self._claimed = False
        self._room.change(saved.nbytes)

    def abandon(self, lost: ShardLostError) -> None:
        """Called with the lock held when the rows are gone: later reads get the error.

        What was copied before is whole: a reader that had everything does not notice.
        """
        self._lost = lost
        self._source = Arrays({})
        self._done = True
        self._room.change()

    def wait_for_room(self) -> None:
        """Called by writers before they take the lock: holds them while the buffer is full.

        `DeadlineError`, with no row changed, if nobody takes anything from it.
        """
        if self._room.full and not self._done:
            self.waits += 1
            start = self._room.clock.monotonic()
            self._room.wait(lambda: self._done)
            self.held_seconds += self._room.clock.monotonic() - start

    # -- the reader ------------------------------------------------------------------------------

    def chunks(self, rows: int, cancelled: threading.Event | None = None) -> Iterator[Chunk]:
        """The selected rows, at most about `rows` or `_CHUNK_NBYTES` at a time; ids that left come
        first."""
        if self._since is not None:
            for t, table in enumerate(self._ranges):
                removed = self._frozen[self._since].removed.get(t)
                if removed:
                    yield Chunk(table.name, np.unique(np.concatenate(removed)), None)
        for table in self._ranges:
            word, last = table.base >> 6, (table.base + table.rows + 63) >> 6
            while word < last:
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError("the snapshot was cancelled for a newer one")
                part, word = self._copy(table, word, last, self._fitting(table, rows))
                yield from _as_chunks(table, part)
                if self._saved_nbytes >= _CHUNK_NBYTES or self._room.full:
                    yield from self._take_saved(rows)
        with self.holder.lock:  # all rows are taken care of, and no writer is at work
            if self._failed:
                self._check_readable()
        yield from self._take_saved(rows)

    def _fitting(self, table: TableRange, most: int) -> int:
        """How many rows of a table a chunk has."""
        shapes = (self._shapes[name] for name in table.planes)
        row_nbytes = sum(int(width) * int(np.dtype(kind).itemsize) for width, kind in shapes)
        return max(1, min(most, _CHUNK_NBYTES // max(1, row_nbytes)))

    def _check_readable(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._failed:
            raise SaveError(
                "a push ended, interrupted or without memory, before it had copied rows for this "
                "save; all rows are part of the next one: save again"
            )

    def _copy(self, table: TableRange, word: int, last: int, limit: int) -> tuple[CopiedRows, int]:
        """Copies rows until there is no room for more."""
        source = self._source
        self._check_readable()
        if not source.beside_writers:
            return self._copy_locked(table, word, last, limit)
        limit = max(limit, 64)
        if self._listed.size < limit:  # used again: fresh pages cost more than what is in them
            self._listed, self._flags = np.empty(limit, np.int64), np.empty((2, limit), np.bool_)
        rows, (present, claimed) = self._listed, self._flags
        count, word = row_copies.list_slice(
            self._first, self._second, self._touched, self._copied, word, last, limit, rows, present
        )
        rows, present, claimed = rows[:count], present[:count], claimed[:count]
        ids, planes = table.ids_of(rows), self._empty(table, count)
        source.take(rows, planes)
        if row_copies.claim(rows, self._copied, claimed) < count:
            present, ids = present[claimed], ids[claimed]
            planes = {name: values[claimed] for name, values in planes.items()}
        return CopiedRows(present, ids, planes), word

    def _copy_locked(
        self, table: TableRange, word: int, last: int, limit: int
    ) -> tuple[CopiedRows, int]:
        """Copies slices, each under the lock, until there is no room for another."""
        limit = max(limit, _SLICE_ROWS)
        rows, present = np.empty(limit, np.int64), np.empty(limit, np.bool_)
        ids = None if table.ids is None else np.empty(limit, np.int64)
        claimed = np.empty(_SLICE_ROWS, np.bool_)
        planes = self._empty(table, limit)
        count = 0
        while word < last and count + _SLICE_ROWS <= limit:
            asked = self._room.clock.monotonic()
            with ExitStack() as taken_rows:  # an error leaves none of them waiting to be read
                with self.holder.lock:
                    began = self._room.clock.monotonic()
                    # After a long wait for training the copy may delay it a little longer: else the
                    # snapshot would last for as many steps as it has slices.
                    until = began + (began - asked) * _SHARE_OF_WAIT
                    later = []
                    while True:
                        self._check_readable()
                        taken, word = row_copies.list_slice(
                            self._first, self._second, self._touched, self._copied, word,
                            min(last, word + _SLICE_WORDS), _SLICE_ROWS, rows[count:],
                            present[count:],
                        )  # fmt: skip
                        part = slice(count, count + taken)
                        row_copies.claim(rows[part], self._copied, claimed)
                        some = {name: values[part] for name, values in planes.items()}
                        copy = self._source.take(rows[part], some)
                        if copy is not None:
                            taken_rows.callback(copy.end)
                            later.append(copy)
                        if ids is not None:  # of the owners that slots have now
                            ids[part] = table.ids_of(rows[part])
                        count += taken
                        if (
                            word >= last
                            or count + _SLICE_ROWS > limit
                            or self._room.clock.monotonic() >= until
                        ):
                            break
                for copy in later:
                    copy()
        copied = table.ids_of(rows[:count]) if ids is None else ids[:count]
        some = {name: values[:count] for name, values in planes.items()}
        return CopiedRows(present[:count], copied, some), word

    def _empty(self, table: TableRange, rows: int) -> Planes:
        return {name: room_for(rows, *self._shapes[name]) for name in table.planes}

    def _take_saved(self, most: int) -> Iterator[Chunk]:
        """What writers had to save so far; it counts against the room until it was used."""
        while self._saved:
            parts: list[SavedRows] = []
            nbytes = 0
            with self._handing:
                while self._saved and nbytes < _CHUNK_NBYTES:
                    parts.append(self._saved.pop())
                    nbytes += parts[-1].nbytes
                self._saved_nbytes -= nbytes
            few: list[SavedRows] = []
            while parts:  # one that was used is let go
                if _ready(parts[-1]):
                    yield from self._by_table(parts[-1].rows, most, partial(_cut_out, parts[-1]))
                else:
                    few.append(parts[-1])
                parts.pop()
            if few:
                rows = np.concatenate([part.rows for part in few])
                order = np.argsort(rows)
                yield from self._by_table(rows[order], most, partial(self._joined, few, order))
            del few
            self._room.change(-nbytes)

    def _by_table(
        self, rows: I64, most: int, copied: Callable[[TableRange, slice], CopiedRows]
    ) -> Iterator[Chunk]:
        """Rows of any tables, which ascend, as chunks."""
        cuts = [*np.searchsorted(rows, self._bases).tolist(), rows.size]
        for table, (first, last) in zip(self._ranges, pairwise(cuts), strict=True):
            fitting = self._fitting(table, most)
            for start in range(first, last, fitting):
                yield from _as_chunks(
                    table, copied(table, slice(start, min(start + fitting, last)))
                )

    def _joined(
        self, parts: Sequence[SavedRows], order: I64, table: TableRange, some: slice
    ) -> CopiedRows:
        """Some rows of all parts, one after the other, in this order."""
        places = order[some]
        present = np.empty(places.size, np.bool_)
        ids = np.empty(places.size, np.int64)
        planes = self._empty(table, places.size)
        start = 0
        for part in parts:
            stop = start + part.rows.size
            chosen = np.flatnonzero((places >= start) & (places < stop))
            own = places[chosen] - start
            present[chosen] = part.present[own]
            ids[chosen] = _ids_of(part, table, own)
            for name, values in planes.items():
                saved = part.planes[name]
                if saved.itemsize % 4:
                    values[chosen] = saved[own]
                    continue
                scatter.scatter_rows(
                    0, own.size, saved.view(np.float32), own, chosen, values.view(np.float32)
                )
            start = stop
        return CopiedRows(present, ids, planes)

    def close(self, advanced: Collection[str]) -> None:
        """Ends the snapshot: the cursors that advanced forget the rows, the others keep them."""
        with self.holder.lock:
            if self.holder.snapshot is self:
                self.holder.snapshot = None
            with self._handing:
                self._saved = []
                given_back, self._saved_nbytes = self._saved_nbytes, 0
            self._done = True
        self._room.change(-given_back)
        if self._lost is not None:
            return
        assert self.holder.tracker is not None
        self.holder.tracker.settle(self._frozen, advanced)
        if self._ranked is not None and SINCE_VERSION not in advanced:
            with self.holder.lock:
                if self.holder.ranking is not None:
                    self.holder.ranking.put_back(self._ranked)


def _ready(part: SavedRows) -> bool:
    """Whether chunks can be cut out of it as it is: few rows are joined with others first."""
    return part.nbytes >= _READY_NBYTES and bool((part.rows[1:] > part.rows[:-1]).all())


def _ids_of(part: SavedRows, table: TableRange, some: I64 | slice) -> I64:
    """The ids of some rows of a part, which are of that table."""
    if table.ids is None or part.ids is None:
        return table.ids_of(part.rows[some])
    return part.ids[some]


def _cut_out(part: SavedRows, table: TableRange, some: slice) -> CopiedRows:
    """Some rows of a part, which are of that table, where they are."""
    planes = {name: part.planes[name][some] for name in table.planes}
    return CopiedRows(part.present[some], _ids_of(part, table, some), planes)


def _as_chunks(table: TableRange, part: CopiedRows) -> Iterator[Chunk]:
    """Copied rows, which ascend, with their ids ascending; absent rows of fixed tables become
    tombstones."""
    present, ids, planes = part.present, part.ids, part.planes
    if not present.all():
        # The ids that left a dynamic table have a list of their own: a slot may have a new owner.
        if table.ids is None:
            yield Chunk(table.name, ids[~present], None)
        ids, planes = ids[present], {name: values[present] for name, values in planes.items()}
    if ids.size:
        if table.ids is not None and (np.diff(ids) <= 0).any():
            order = np.argsort(ids)
            ids, planes = ids[order], {name: values[order] for name, values in planes.items()}
        yield Chunk(table.name, ids, planes)


@contextmanager
def closed_if_raised() -> Iterator[list[Any]]:
    """A list for frozen rows. What raises while more are frozen, or before somebody has taken
    them over, ends those in it as if nothing had been frozen: an open snapshot that nobody reads
    refuses the next one, and delays writers of its rows."""
    taken: list[Any] = []
    try:
        yield taken
    except BaseException:
        for frozen in taken:
            frozen.close(())
        raise


def freeze(
    holders: Sequence[RowHolder], *, since: str | None, room: CopyRoom | None = None
) -> list[Snapshot]:
    """Freezes several slabs at one instant: the caller keeps pushes out between them.

    `since=None` selects every touched row, a cursor's name the rows that changed for it. If one
    cannot be frozen, none is.
    """
    room = room or CopyRoom(256 * 2**20)
    with closed_if_raised() as taken:
        for holder in holders:
            with holder.lock:
                if holder.snapshot is not None:
                    raise AssertionError("a slab has one snapshot at a time")
                holder.snapshot = Snapshot(holder, since, room)
                taken.append(holder.snapshot)
    return taken

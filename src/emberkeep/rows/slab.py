"""All tables of one shard that share a dim and an optimizer, stacked: one array per plane.

A table is a range of slab rows; nobody outside the shard sees slab rows. Two bitmaps have one bit
per row: *touched* (the row was trained: its planes hold its state; otherwise it has its procedural
initial value and its memory is not looked at) and *dirty* (the row changed since readers of that
fact last looked).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from emberkeep._types import F32, I64, U64, Planes, RowIds
from emberkeep.errors import IdError, ShardLostError, StateError, TableFullError
from emberkeep.kernels import batch_rows, initial_values, scatter
from emberkeep.rows.copy_room import CopyRoom
from emberkeep.rows.prioritised_rows import PrioritisedRows
from emberkeep.rows.priority import Priority, Ranking, Span, ranking
from emberkeep.rows.push import (
    Push,
    Recording,
    Writer,
    WriteWatcher,
    apply_update,
    not_finite,
    outside,
    update_call,
)
from emberkeep.rows.row_source import Arrays, RowSource
from emberkeep.rows.saved_rows import SavesWithUpdate, can_save
from emberkeep.rows.slots import Slots
from emberkeep.rows.snapshot import Snapshot, TableRange
from emberkeep.rows.tracker import Tracker
from emberkeep.runtime.memory import ScatteredRows, Values, lazy_zeros
from emberkeep.runtime.pool import ForkLock, Job, Pool, shares
from emberkeep.tables import Normal, Optimizer, Table

Places = tuple[I64, I64, I64, F32, I64]

# Tables start at a multiple of this many rows, so that no two share a word of a bitmap.
_ALIGNMENT = 64
# Ranges of fewer rows than this are not worth a thread.
_LEAST_ROWS = 256
# Whole rows come from threads that read and decode beside: they have better use for the cores.
_LEAST_NBYTES = 4 * 2**20
_LEAST_SCATTERED_NBYTES = 2**20


def slab_rows(tables: Sequence[Table], shard: int, shards: int) -> int:
    """How many rows the slab of these tables has on a shard."""
    return sum(_padded(table.slots_on(shard, shards)) for table in tables)


def _padded(slots: int) -> int:
    return -(-slots // _ALIGNMENT) * _ALIGNMENT


class Slab:
    """The rows of some tables on one shard.

    Not thread-safe by itself: the shard serialises calls with `lock`. Each call spreads its work
    over the pool, and no result depends on the number of threads. Whatever changes rows tells the
    snapshot and the recorder first, if there are any.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        *,
        shard: int = 0,
        shards: int = 1,
        seed: int = 0,
        pool: Pool,
        lock: ForkLock | None = None,
    ) -> None:
        self.lock = lock or ForkLock()
        self.tracker: Tracker | None = None
        self.ranking: Ranking | None = None
        self.snapshot: Snapshot | None = None
        self.lost: ShardLostError | None = None
        self.recorder: WriteWatcher | None = None
        self.tables = tuple(tables)
        self.optimizer = optimizer
        self.dim = self.tables[0].dim
        self.shard = shard
        self.shards = shards
        self.pool = pool
        slots = [table.slots_on(shard, shards) for table in self.tables]
        padded = [_padded(count) for count in slots]
        self.slots_T = slots
        self.bases_T: I64 = np.concatenate([[0], np.cumsum(padded)[:-1]]).astype(np.int64)
        self.rows = int(sum(padded))
        self.limits_T: I64 = np.array([table.rows or -1 for table in self.tables], np.int64)
        self.keys_T: U64 = np.array([table.key(seed) for table in self.tables], np.uint64)
        self.kinds_T: I64 = np.array(
            [
                initial_values.NORMAL if isinstance(table.init, Normal) else initial_values.UNIFORM
                for table in self.tables
            ],
            np.int64,
        )
        self.shapes_T2: F32 = np.array(
            [
                (table.init.mean, table.init.std)
                if isinstance(table.init, Normal)
                else (table.init.low, table.init.high)
                for table in self.tables
            ],
            np.float32,
        )
        self.touched = self._no_rows()
        self.dirty = self._no_rows()
        places = self._place_count()
        self.planes: Planes = {"weight": lazy_zeros((places, self.dim), np.float32)}
        for plane, width in optimizer.planes(self.dim).items():
            kind = np.int32 if plane == "step" else np.float32
            self.planes[plane] = lazy_zeros((places, width), kind)
        self.steps_T: I64 = np.zeros(len(self.tables), np.int64)
        self.edits_T: I64 = np.zeros(len(self.tables), np.int64)
        self.slots: dict[int, Slots] = {}
        self.ids: I64 = np.empty(0, np.int64)
        if any(table.dynamic for table in self.tables):
            self.ids = lazy_zeros((self.rows,), np.int64)
        if any(table.on_full == "evict_oldest" for table in self.tables):
            self.planes["used"] = lazy_zeros((self.rows, 1), np.int64)
        self.saves_with_update = can_save(self.planes)
        self._empty_slots()

    # -- reading ---------------------------------------------------------------------------------

    def resolve(self, wanted: RowIds) -> tuple[I64, list[int]]:
        """Slab rows of the ids, -1 for unknown dynamic ids; how many are unknown, by table.

        An id outside its fixed table raises `IdError`.
        """
        found = np.empty(wanted.ids.size, np.int64)
        bad = batch_rows.fixed_rows(
            wanted.ids, wanted.offsets, self.limits_T, self.bases_T, self.shards, found
        )
        if bad >= 0:
            raise self._outside(wanted.table_of(bad), int(wanted.ids[bad]))
        unknown = [0] * len(self.tables)
        for t, slots in self.slots.items():
            part = slice(wanted.offsets[t], wanted.offsets[t + 1])
            unknown[t] = slots.find(wanted.ids[part], int(self.bases_T[t]), found[part])
        return found, unknown

    def pull(self, wanted: RowIds, out_UD: F32) -> None:
        """Writes the weights of the ids to `out_UD`. Changes nothing; inserts nothing."""
        found, _ = self.resolve(wanted)
        self._pull(wanted, found, out_UD)

    def _pull(self, wanted: RowIds, places: I64, out_UD: F32) -> None:
        self._over(
            wanted.ids.size, initial_values.write_pull, self.keys_T, self.kinds_T, self.shapes_T2,
            wanted.offsets, wanted.ids, places, self._filled, self.planes["weight"], out_UD,
        )  # fmt: skip

    @property
    def direct(self) -> bool:
        """Whether rows are found by their ids alone, so that bags need no unique ids first."""
        return not self.slots and self.shards == 1

    def pull_bags(
        self, over_samples: Callable[..., list[int]], ids_N: I64, tables_F: I64, places: Places,
        out_BFD: F32,
    ) -> None:  # fmt: skip
        """Bags straight from the rows, where the slab is `direct`; `over_samples` runs a kernel.

        `places` says where each bag's ids stand: firsts, lengths, ends, scales and columns, as
        `batch_rows.pool` takes them.
        """
        results = over_samples(
            initial_values.write_pull_bags, self.keys_T, self.kinds_T, self.shapes_T2,
            self.limits_T, self.bases_T, self.touched, self.planes["weight"], ids_N, tables_F,
            *places, out_BFD,
        )  # fmt: skip
        bad = [position for position in results if position >= 0]
        if bad:
            feature = int(np.searchsorted(places[0], bad[0], side="right")) - 1
            raise self._outside(int(tables_F[feature]), int(ids_N[bad[0]]))

    def _outside(self, table: int, identity: int) -> IdError:
        return outside(self.tables[table], identity)

    def read(self, table: int, ids: I64) -> Planes:
        """All planes of rows of one table, cut at one instant; untouched rows as they begin."""
        wanted = self.one_table(table, ids)
        found, _ = self.resolve(wanted)
        weight = np.empty((ids.size, self.dim), np.float32)
        self.pull(wanted, weight)
        known = np.zeros(ids.size, np.bool_)
        present = found >= 0
        touched = np.empty(int(present.sum()), np.bool_)
        batch_rows.test_bits(self.touched, found[present], touched)
        known[present] = touched
        planes: Planes = {"weight": weight}
        held = self._held_by(found[known])
        for name, plane in self.planes.items():
            if name != "weight" and self.has_plane(table, name):
                planes[name] = np.full(
                    (ids.size, plane.shape[1]), self.optimizer.initial(name), plane.dtype
                )
                planes[name][known] = held[name]
        return planes

    def touched_ids(self, table: int) -> I64:
        """The ids of the rows of a table that were ever trained and not deleted, ascending."""
        found = self._touched_rows(table)
        if table in self.slots:
            return np.sort(self.ids[found])
        return (found - int(self.bases_T[table])) * self.shards + self.shard

    def _touched_rows(self, table: int) -> I64:
        base = int(self.bases_T[table])
        words = (base >> 6, (base + self.slots_T[table] + 63) >> 6)
        found = np.empty(batch_rows.count_bits(self.touched, *words), np.int64)
        batch_rows.list_bits(self.touched, *words, found)
        return found

    def has_plane(self, table: int, name: str) -> bool:
        """Whether rows of a table have a plane: only tables that evict know when rows were used."""
        return name != "used" or self.tables[table].on_full == "evict_oldest"

    def ranges(self) -> list[TableRange]:
        """The tables as ranges of rows, for snapshots."""
        return [
            TableRange(
                name=table.name,
                base=int(self.bases_T[t]),
                rows=self.slots_T[t],
                planes=tuple(name for name in self.planes if self.has_plane(t, name)),
                stride=self.shards,
                offset=self.shard,
                ids=self.slots[t].ids if table.dynamic else None,
            )
            for t, table in enumerate(self.tables)
        ]

    def track(self, priority: Priority | None = None, large: Collection[str] = ()) -> None:
        """Starts to follow changes for snapshots; every touched row counts as changed.

        With `priority` also which rows of the `large` tables matter most.
        """
        if self.tracker is None:
            self.tracker = Tracker(self.touched.size)
            np.bitwise_or(self.dirty, self.touched, out=self.dirty)
        if priority is not None and self.ranking is None:
            tables = [
                Span(t, int(self.bases_T[t]), self.slots_T[t])
                for t, table in enumerate(self.tables)
                if table.name in large
            ]
            self.ranking = ranking(
                priority,
                tables,
                rows=self.rows,
                bases_T=self.bases_T,
                weight_RD=self.planes["weight"],
                pool=self.pool,
            )

    def prioritised(self, room: CopyRoom) -> PrioritisedRows:
        """The rows that matter most, of small tables all, to be frozen when they are read."""
        assert self.ranking is not None
        whole = self._no_rows()
        large = {span.index for span in self.ranking.tables}
        for t in range(len(self.tables)):
            if t not in large:
                first = int(self.bases_T[t]) >> 6
                whole[first : first + ((self.slots_T[t] + 63) >> 6)] = np.uint64(2**64 - 1)
        return PrioritisedRows(self, whole, room)

    def dirty_rows(self) -> int:
        """How many rows changed since the dirty bits were last taken."""
        return int(batch_rows.count_bits(self.dirty, 0, self.dirty.size))

    # -- writing ---------------------------------------------------------------------------------

    def check_push(self, wanted: RowIds, grads_UD: F32, *, finite: bool = False) -> Push:
        """Everything that can refuse a push, before any row changes.

        `finite` says that the gradients are known to be finite and need not be looked at.
        """
        found, unknown = self.resolve(wanted)
        if not finite:
            self._check_finite(wanted, grads_UD)
        for t, slots in self.slots.items():
            self.check_room(t, slots, wanted, found, unknown[t])
        return Push(wanted, found, grads_UD, unknown)

    def _check_finite(self, wanted: RowIds, grads_UD: F32) -> None:
        found = self._over(wanted.ids.size, batch_rows.write_first_nonfinite, grads_UD)
        worst = [position for position in found if position >= 0]
        if worst:
            bad = min(worst)
            raise not_finite(self.tables[wanted.table_of(bad)], int(wanted.ids[bad]))

    def check_room(self, t: int, slots: Slots, wanted: RowIds, found: I64, unknown: int) -> None:
        table = self.tables[t]
        start, stop = int(wanted.offsets[t]), int(wanted.offsets[t + 1])
        held = stop - start if table.on_full == "evict_oldest" else slots.count + unknown
        if held <= slots.capacity:
            return
        new = wanted.ids[start:stop][found[start:stop] < 0]
        first = new[max(0, slots.capacity - slots.count)] if slots.count < held else new[0]
        remedy = (
            "one batch brings more ids than the table can hold: raise capacity="
            if table.on_full == "evict_oldest"
            else "raise capacity=, delete rows, or use on_full='evict_oldest'"
        )
        raise TableFullError(
            f"table {table.name!r} holds {slots.count} of {slots.capacity} rows and has no room "
            f"for id {first}; no row was changed; {remedy}"
        )

    def push(self, push: Push, lr: float) -> None:
        """Applies a checked push: each row once, with its aggregated gradient."""
        with self.snapshot or nullcontext():
            self._push(push, lr)

    def _push(self, push: Push, lr: float) -> None:
        wanted, found, grads_UD = push.wanted, push.rows, push.grads_UD
        watched = self._admit_all(wanted, found, push.unknown_T, updating=True)
        self.steps_T += 1
        places = self._places(found)
        if not isinstance(watched, Recording) or watched.fresh:
            self._prepare(wanted, places)
        ranked = self.ranking
        if ranked is not None:
            ranked.updating(found, 0, found.size)
        optimizer, planes = self.optimizer, self.planes
        call = update_call(optimizer, planes, self.steps_T, wanted.offsets, places, grads_UD, lr)
        apply_update(call, watched, optimizer.max_norm, planes["weight"], self._over, self.pool)
        self._after_write(found, places)
        if ranked is not None:
            ranked.updated(found, wanted.offsets)

    def install(self, wanted: RowIds, planes: Mapping[str, Values], *, busy: int = 0) -> None:
        """Writes whole rows, all planes together; they become touched and dirty.

        No id may be given twice: rows are written by several threads, fewer if so many are `busy`
        beside.
        """
        found, unknown = self._check_install(wanted, planes)
        self._admit_all(wanted, found, unknown)
        places = self._places(found)
        scattered = any(isinstance(values, ScatteredRows) for values in planes.values())
        least = (_LEAST_SCATTERED_NBYTES if scattered else _LEAST_NBYTES) // (4 * self.dim)
        if busy:
            threads = max(1, self.pool.threads - busy)
            least = max(least, -(-places.size // threads))
        for name, values in planes.items():
            into = self.planes[name]
            if name == "used":
                ticks = np.asarray(values)
                aged = ticks[:, 0] > 0  # one without an age is the newest, as it was admitted
                into[found[aged]] = ticks[aged]
                continue
            into = into.view(np.float32)
            job: tuple[Any, ...]
            if isinstance(values, ScatteredRows):
                job = scatter.write_scatter_rows, values.rows().view(np.float32), values.starts
            else:
                job = scatter.write_scatter, np.ascontiguousarray(values).view(np.float32)
            self._over(places.size, *job, places, into, least=least)
        marked = places, self._filled, self._changed
        self._over(places.size, scatter.write_mark, *marked, least=least)
        if "used" in planes:
            for t, slots in self.slots.items():
                used = planes["used"][wanted.offsets[t] : wanted.offsets[t + 1]]
                slots.installed(np.asarray(used))
        self._after_write(found, places)

    def newest_of(
        self, wanted: RowIds, planes: Mapping[str, Values]
    ) -> tuple[RowIds, Mapping[str, Values]]:
        """What to install of rows: without those that a table that evicts would give up at once,
        being older than all that it holds then."""
        taken = np.ones(wanted.ids.size, np.bool_)
        for t, slots in self.slots.items():
            part = slice(wanted.offsets[t], wanted.offsets[t + 1])
            found = np.empty(part.stop - part.start, np.int64)
            surplus = slots.find(wanted.ids[part], 0, found) + slots.count - slots.capacity
            if surplus > 0 and slots.ticks is not None and "used" in planes:
                used = np.asarray(planes["used"])[part, 0]
                taken[part] = slots.newest_of(found, used, surplus)
        if taken.all():
            return wanted, planes
        rows = np.flatnonzero(taken)
        some = RowIds(wanted.ids[rows], np.searchsorted(rows, wanted.offsets))
        return some, {name: values[rows] for name, values in planes.items()}

    def _check_install(self, wanted: RowIds, planes: Mapping[str, Values]) -> tuple[I64, list[int]]:
        """Everything that can refuse whole rows, before any changes; the rows of the ids, and how
        many are unknown, by table."""
        for t in np.flatnonzero(np.diff(wanted.offsets)).tolist():
            expected = {name for name in self.planes if self.has_plane(t, name)}
            if set(planes) != expected:
                raise StateError(
                    f"table {self.tables[t].name!r} has planes {sorted(expected)}, the rows bring "
                    f"{sorted(planes)}; load rows that were saved with the same optimizer"
                )
            for name, values in planes.items():
                shape = (wanted.ids.size, self.planes[name].shape[1])
                if values.shape != shape or values.dtype != self.planes[name].dtype:
                    raise StateError(
                        f"table {self.tables[t].name!r}, plane {name!r}: {values.dtype} "
                        f"{values.shape} does not fit {self.planes[name].dtype} {shape}"
                    )
        found, unknown = self.resolve(wanted)
        for t, slots in self.slots.items():
            self.check_room(t, slots, wanted, found, unknown[t])
        return found, unknown

    def clear(self) -> None:
        """Takes every row back to its initial state; no change is left to report."""
        assert self.snapshot is None, "rows are cleared when no snapshot is under way"
        self.touched = self._no_rows()
        self.dirty = self._no_rows()
        if "used" in self.planes:
            self.planes["used"][:] = 0
        self.steps_T[:] = self.edits_T[:] = 0
        self._empty_slots()
        if self.tracker is not None:
            self.tracker.reset()
        if self.ranking is not None:
            self.ranking.take_all()

    def drop(self, lost: ShardLostError) -> None:
        """Lets go of all memory; a snapshot under way ends with the error."""
        if self.snapshot is not None:
            self.snapshot.abandon(lost)
        self.lost = lost
        self.snapshot = self.tracker = self.ranking = self.recorder = None
        self.planes, self.slots = {}, {}
        self.touched = self.dirty = np.empty(0, np.uint64)
        self.ids = np.empty(0, np.int64)

    def forget_changes(self, *, keep_since_baseline: bool) -> None:
        """Nothing has changed since the version just loaded.

        With `keep_since_baseline`, what was written since the last call did change since the
        baseline.
        """
        self.track()
        assert self.tracker is not None
        self.tracker.reset(self.dirty if keep_since_baseline else None)
        self.dirty = self._no_rows()
        if self.ranking is not None:
            self.ranking.take_all()

    def delete(self, table: int, ids: I64) -> int:
        """Takes rows back to their initial state; a dynamic id leaves. Counts the trained ones."""
        found, _ = self.resolve(self.one_table(table, ids))
        ids, found = ids[found >= 0], found[found >= 0]
        known = np.empty(found.size, np.bool_)
        batch_rows.test_bits(self.touched, found, known)
        self._remove(table, ids[known], found[known])
        return int(known.sum())

    # -- where rows stand ------------------------------------------------------------------------

    def _place_count(self) -> int:
        """How many rows the planes have places for: here one for each row."""
        return self.rows

    @property
    def _filled(self) -> U64:
        """Which places hold the state of a row."""
        return self.touched

    @property
    def _changed(self) -> U64:
        """Which places were written since somebody looked."""
        return self.dirty

    def _places(self, found: I64) -> I64:
        """The places of rows that are about to be written."""
        return found

    def _after_write(self, found: I64, places: I64) -> None:
        """Called when rows at these places have been written and the places are marked."""

    def _held_by(self, found: I64) -> Planes:
        """All planes of rows that are touched."""
        return {name: plane[found] for name, plane in self.planes.items()}

    def source(self) -> RowSource:
        """What a snapshot copies from."""
        return Arrays(self.planes)

    # -- details ---------------------------------------------------------------------------------

    def _no_rows(self) -> U64:
        bits: U64 = lazy_zeros((self.rows // 64,), np.uint64)
        return bits

    def _empty_slots(self) -> None:
        for t, table in enumerate(self.tables):
            if table.dynamic:
                part = slice(self.bases_T[t], self.bases_T[t] + self.slots_T[t])
                ticks = self.planes["used"][part, 0] if table.on_full == "evict_oldest" else None
                self.slots[t] = Slots(self.slots_T[t], self.ids[part], ticks)

    def restore_slots(self) -> None:
        """Makes the indexes of dynamic tables again, from the ids of the rows that are touched."""
        for t, slots in self.slots.items():
            slots.restore(self._touched_rows(t) - self.bases_T[t])

    def _over(self, count: int, write: Writer, *args: Any, least: int = _LEAST_ROWS) -> list[int]:
        """Runs a kernel over ranges of rows; its results."""
        return self.pool.together(Job(write, shares(count, self.pool.threads, least), args))[0]

    def one_table(self, table: int, ids: I64) -> RowIds:
        """A request for rows of one table alone."""
        offsets = np.zeros(len(self.tables) + 1, np.int64)
        offsets[table + 1 :] = ids.size
        return RowIds(np.ascontiguousarray(ids, np.int64), offsets)

    def _before_write(self, written: I64) -> None:
        if not written.size:
            return
        if self.snapshot is not None:
            self.snapshot.before_write(written)
        if self.recorder is not None:
            self.recorder.before_write(written)

    def _admit_all(
        self, wanted: RowIds, found: I64, unknown_T: Sequence[int], *, updating: bool = False
    ) -> Recording | SavesWithUpdate | None:
        """Gives new ids their slots, and lets the snapshot have the rows as they were: if an
        optimizer is `updating` rows, by what its kernel shall do beside that."""
        if self.recorder is not None and updating and found.size and not self.slots:
            if self.snapshot is not None:
                self.snapshot.before_write(found)
            return self.recorder.before_update(found)
        new = np.flatnonzero(found < 0) if self.slots else found[:0]
        with_update = updating and self.saves_with_update and self.recorder is None
        watched = None
        if not with_update:
            self._before_write(found if not new.size else found[found >= 0])
        elif self.snapshot is not None:
            watched = self.snapshot.before_update(found, _LEAST_ROWS)
        for t, slots in self.slots.items():
            self._admit(t, slots, wanted, found, unknown_T[t])
        if not with_update:
            self._before_write(found[new])
        elif self.snapshot is not None:
            self.snapshot.before_insert(found[new])
        return watched

    def _admit(self, t: int, slots: Slots, wanted: RowIds, found: I64, unknown: int) -> None:
        """Gives the unknown ids of table t slots, evicting the oldest rows where it must."""
        part = slice(wanted.offsets[t], wanted.offsets[t + 1])
        base = int(self.bases_T[t])
        rows = found[part]
        # First the rows of this push become the newest: eviction can then not choose them.
        slots.touch(rows[rows >= 0] - base)
        surplus = slots.count + unknown - slots.capacity
        if surplus > 0:
            gone = slots.take_oldest(surplus, lambda old: self._before_write(old + base))
            self._remove(t, slots.ids[gone], gone + base)
        if unknown:
            missing = rows < 0
            given = slots.insert(wanted.ids[part][missing])
            rows[missing] = given + base
            slots.touch(given)

    def _remove(self, table: int, ids: I64, found: I64) -> None:
        self._before_write(found)
        batch_rows.clear_bits(self.touched, found)
        batch_rows.set_bits(self.dirty, found)
        if self.ranking is not None:
            self.ranking.removed(found)
        if table in self.slots:
            self.slots[table].remove(ids, found - int(self.bases_T[table]))
            if self.tracker is not None:
                self.tracker.remove(table, ids)

    def _prepare(self, wanted: RowIds, places: I64) -> None:
        """Marks places and gives every plane of those that were never touched its initial value."""
        fresh = np.empty(places.size, np.int64)
        parts = shares(places.size, self.pool.threads, _LEAST_ROWS)
        args = (
            self.keys_T, self.kinds_T, self.shapes_T2, wanted.offsets, wanted.ids, places,
            self._filled, self._changed, self.planes["weight"], fresh,
        )  # fmt: skip
        counts = self.pool.together(Job(initial_values.write_prepare, parts, args))[0]
        for (start, _), count in zip(parts, counts, strict=True):
            if count:
                for name, plane in self.planes.items():
                    if name not in ("weight", "used"):
                        plane[fresh[start : start + count]] = self.optimizer.initial(name)

"""The rows of a shard's slabs as they are coded: what a write changed, and how rows come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from emberkeep._types import I64, U8, U32, Bools, Words
from emberkeep.erasure.codes import Placement
from emberkeep.erasure.messages import Changed, Layer, Shape, State
from emberkeep.kernels import batch_rows, galois, recorded_updates
from emberkeep.kernels.job_rounds import MOST_JOBS
from emberkeep.rows.push import Recording, Writer
from emberkeep.rows.slab import Slab, slab_rows
from emberkeep.runtime.memory import lazy_zeros, zero_again
from emberkeep.runtime.pool import Job, spans

_ID_NBYTES = 8
# Ranges of fewer rows than this are not worth a thread.
_LEAST_ROWS = 512
# Parts of a rebuild for each thread: one that was kept from its core has less to catch up with.
_PARTS = 4
# Rows whose marks are looked at a time: what is made of them takes many times their bytes.
_REVEAL_ROWS = 2**20
# Words of a bitmap looked at a time for rows that are not back.
_SCAN_WORDS = 4096


def shapes_of(slabs_N: Sequence[Sequence[Slab]]) -> list[Shape]:
    """What is coded of each slab, given the slabs of every shard."""
    return [
        Shape(
            rows=max(slab.rows for slab in same),
            words=sum(plane.shape[1] * plane.itemsize for plane in same[0].planes.values()) // 4,
            mark_nbytes=1 + (_ID_NBYTES if same[0].slots else 0),
        )
        for same in zip(*slabs_N, strict=True)
    ]


def shapes_on(slabs: Sequence[Slab], shards: int) -> list[Shape]:
    """What is coded of each slab, given those of one shard of so many."""
    return [
        Shape(
            rows=max(slab_rows(slab.tables, shard, shards) for shard in range(shards)),
            words=shape.words,
            mark_nbytes=shape.mark_nbytes,
        )
        for slab, shape in zip(slabs, shapes_of([slabs]), strict=True)
    ]


def state_of(slabs: Sequence[Slab]) -> State:
    """What slabs know beside their rows: the steps of their tables, the next ticks, and the edits
    of all."""
    values = [
        value
        for slab in slabs
        for value in (*slab.steps_T.tolist(), *(s.next_tick for s in slab.slots.values()))
    ]
    return (*values, *(edits for slab in slabs for edits in slab.edits_T.tolist()))


def load_state(slabs: Sequence[Slab], state: State) -> None:
    """The inverse of `state_of`."""
    values = iter(state)
    for slab in slabs:
        slab.steps_T[:] = [next(values) for _ in slab.tables]
        for slots in slab.slots.values():
            slots.next_tick = next(values)
    for slab in slabs:
        slab.edits_T[:] = [next(values) for _ in slab.tables]


@dataclass(slots=True)
class _Captured:
    """Rows as they were before a write, grouped by slot."""

    rows: I64
    bounds: I64
    records: U32
    marks: U8


@dataclass(slots=True)
class _Update:
    """Rows of fixed tables that an optimizer's kernel is about to change, and to record."""

    rows: I64
    bounds: I64
    at: I64
    stripes: I64
    known: Bools
    fresh: int
    records: U32
    done: I64

    def changed(self, number: int) -> Changed:
        """The differences, when the kernel has run. Fixed tables have no marks but the one that a
        row is trained."""
        marked = np.sort(self.at[~self.known]) if self.fresh else self.at[:0]
        return Changed(
            number, self.stripes, self.bounds, self.records, self.stripes[marked],
            np.searchsorted(marked, self.bounds), np.ones((marked.size, 1), np.uint8),
        )  # fmt: skip


class Recorder:
    """Finds out by what a write changes the rows of one slab.

    Code that is about to change rows calls `before_write`; when it is done, `take` has the
    differences of all of them, each row once. A push of fixed tables, which is nearly all that
    ever happens, calls `before_update` instead, and has its kernel take the differences.

    Where one of these fails, some differences are lost: `take` raises the same error until they
    are forgotten.
    """

    def __init__(self, number: int, slab: Slab, k: int) -> None:
        self.slab = slab
        self._number = number
        self._k = k
        self._planes = _words(slab)
        self._words = sum(plane.shape[1] for plane in self._planes)
        self._captured = lazy_zeros(slab.touched.shape, np.uint64)
        self._parts: list[_Captured] = []
        self._update: _Update | None = None
        self._failed: BaseException | None = None

    def before_update(self, written: I64) -> Recording | None:
        """Makes room for the differences of rows, which the optimizer's kernel takes.

        None where a kernel alone would not see all of a difference, because ids or ticks change
        with it or an earlier write is yet to be taken: rows were kept then, as for any write.
        """
        if self.slab.slots or self._parts or self._update is not None:
            self.before_write(written)
            return None
        count = written.size
        bounds, at = np.empty(self._k + 1, np.int64), np.empty(count, np.int64)
        stripes, known = np.empty(count, np.int64), np.empty(count, np.bool_)
        fresh = recorded_updates.arrange(
            written, self._k, self.slab.touched, self.slab.dirty, bounds, at, stripes, known
        )
        records, done = np.empty((count, self._words), np.uint32), np.zeros(1, np.int64)
        self._update = _Update(written, bounds, at, stripes, known, fresh, records, done)
        return Recording((at, known, records, done), fresh)

    def before_write(self, written: I64) -> None:
        """Keeps rows as they are, unless they were kept since the last `take`."""
        with self._whole_or_failed():
            self._keep(written)

    def _keep(self, written: I64) -> None:
        self._end_update()
        found, bounds = np.empty(written.size, np.int64), np.empty(self._k + 1, np.int64)
        count = galois.capture(written, self._k, self._captured, bounds, found)
        if count:
            found = found[:count]
            records = np.empty((count, self._words), np.uint32)
            add_planes(self.slab, self._planes, found, records, fresh=True)
            self._parts.append(_Captured(found, bounds, records, self._marks(found)))

    def take(self) -> Changed | None:
        """What changed since the last call; None if nothing was about to."""
        if self._failed is not None:
            raise self._failed
        with self._whole_or_failed():
            return self._take()

    @contextmanager
    def _whole_or_failed(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed = error
            raise

    def _take(self) -> Changed | None:
        update = self._update
        if update is not None and update.done[0] and not self._parts:
            self._update = None
            return update.changed(self._number)
        self._end_update()
        if not self._parts:
            return None
        part = self._parts[0] if len(self._parts) == 1 else self._joined()
        self._parts = []
        batch_rows.clear_bits(self._captured, part.rows)
        add_planes(self.slab, self._planes, part.rows, part.records, fresh=False)
        marks = part.marks ^ self._marks(part.rows)
        marked = np.flatnonzero(marks.any(axis=1))
        bounds = np.searchsorted(marked, part.bounds)
        stripes = part.rows // self._k
        return Changed(
            self._number, stripes, part.bounds, part.records, stripes[marked], bounds, marks[marked]
        )

    def forget(self) -> None:
        """Lets go of what was kept."""
        if self._failed is not None:  # which bits are set is not known
            zero_again(self._captured)
        for part in self._parts:
            batch_rows.clear_bits(self._captured, part.rows)
        self._parts, self._update, self._failed = [], None, None

    def _end_update(self) -> None:
        """A push was interrupted before its differences were taken: its rows as they were are
        kept, as if no kernel had been about to record them."""
        update, self._update = self._update, None
        if update is None:
            return
        found = np.empty_like(update.rows)
        found[update.at] = update.rows
        # Before the kernel has run nothing but the planes of new rows has changed.
        ran = bool(update.done[0])
        add_planes(self.slab, self._planes, found, update.records, fresh=not ran)
        if not ran:
            update.records[update.at[~update.known]] = 0
        marks = np.empty((found.size, 1), np.uint8)
        marks[update.at, 0] = update.known
        batch_rows.set_bits(self._captured, found)
        self._parts.append(_Captured(found, update.bounds, update.records, marks))

    def _joined(self) -> _Captured:
        found = np.concatenate([part.rows for part in self._parts])
        bounds, order = np.empty(self._k + 1, np.int64), np.empty(found.size, np.int64)
        galois.group_by_slot(found, self._k, bounds, order)
        records = np.concatenate([part.records for part in self._parts])
        marks = np.concatenate([part.marks for part in self._parts])
        return _Captured(found[order], bounds, records[order], marks[order])

    def _marks(self, found: I64) -> U8:
        return marks_of(self.slab, found)


def _words(slab: Slab) -> tuple[U32, ...]:
    """The planes of a slab as 32-bit words."""
    return tuple(plane.view(np.uint32) for plane in slab.planes.values())


def add_planes(slab: Slab, planes: Sequence[U32], found: I64, records: U32, *, fresh: bool) -> None:
    """Adds all planes of rows to their records, or writes them where the records are `fresh`."""
    jobs, column = [], 0
    for plane in planes:
        args = (found, plane, slab.touched, column, fresh, records)
        jobs.append((galois.write_add_plane, args))
        column += plane.shape[1]
    _over_rows(slab, found.size, jobs)


def _over_rows(
    slab: Slab,
    count: int,
    jobs: Sequence[tuple[Writer, tuple[Any, ...]]],
    parts_per_thread: int = 1,
) -> None:
    """Runs kernels over so many rows, each over all of them, on all threads."""
    parts = spans(count, parts_per_thread * slab.pool.threads, _LEAST_ROWS)
    for first in range(0, len(jobs), MOST_JOBS):
        some = jobs[first : first + MOST_JOBS]
        slab.pool.together(*(Job(write, parts, args) for write, args in some))


def marks_of(slab: Slab, found: I64) -> U8:
    """The marks of rows: whether they are trained and, with dynamic tables, their ids."""
    trained = np.empty(found.size, np.bool_)
    batch_rows.test_bits(slab.touched, found, trained)
    if not slab.slots:
        return trained.view(np.uint8).reshape(-1, 1)
    marks = np.zeros((found.size, 1 + _ID_NBYTES), np.uint8)
    marks[:, 0] = trained
    marks[:, 1:] = slab.ids[found].view(np.uint8).reshape(-1, _ID_NBYTES)
    marks[~trained] = 0
    return marks


class SlabRows:
    """The rows of one shard; those of a replacement (`lost=True`) are all to come back.

    Not thread-safe by itself: the caller holds the shard's lock.
    """

    def __init__(self, slabs: Sequence[Slab], placement: Placement, *, lost: bool = False) -> None:
        self._slabs = list(slabs)
        self._k = placement.k
        self._planes = [_words(slab) for slab in slabs]
        self._returned: list[U8] | None = None
        self._lost = [np.empty(0, np.uint64) for _ in slabs]
        # How many rows of each slot are not back, slab by slab.
        self._missing_GK = np.zeros((len(self._slabs), self._k), np.int64)
        self._scanned = [0] * len(self._slabs)
        if lost:
            self._returned = [
                np.zeros((slab.rows, 1 + (_ID_NBYTES if slab.slots else 0)), np.uint8)
                for slab in slabs
            ]

    @property
    def missing_rows(self) -> int:
        """How many rows are known not to be back."""
        return int(self._missing_GK.sum())

    def values(self, slab: int, layer: Layer, wanted: I64) -> Words:
        holder = self._slabs[slab]
        places = np.flatnonzero(wanted < holder.rows)
        inside = wanted if places.size == wanted.size else wanted[places]
        if layer == "marks":
            found: Words = marks_of(holder, inside)
        else:
            words = sum(plane.shape[1] for plane in self._planes[slab])
            found = np.empty((inside.size, words), np.uint32)
            # On one thread: a rebuild must not hold the threads of training meanwhile.
            column = 0
            for plane in self._planes[slab]:
                galois.add_plane(
                    0, inside.size, inside, plane, holder.touched, column, True, found
                )  # fmt: skip
                column += plane.shape[1]
        if inside is wanted:
            return found
        out = np.zeros((wanted.size, found.shape[1]), found.dtype)
        out[places] = found
        return out

    def unknown(self, slab: int, layer: Layer, wanted: I64) -> Bools:
        if self._returned is not None:
            return np.ones(wanted.size, np.bool_)
        out = np.zeros(wanted.size, np.bool_)
        if layer == "records" and self._missing_GK[slab].any():
            inside = wanted < self._slabs[slab].rows
            lost = np.empty(int(inside.sum()), np.bool_)
            batch_rows.test_bits(self._lost[slab], wanted[inside], lost)
            out[inside] = lost
        return out

    def lost(self, slot: int | None = None) -> bool:
        if self._returned is not None:
            return True
        missing = self._missing_GK if slot is None else self._missing_GK[:, slot]
        return bool(missing.any())

    def trained(self, slab: int, slot: int, start: int, stop: int) -> I64:
        stop = min(stop, -(-(self._slabs[slab].rows - slot) // self._k))
        stripes = np.arange(start, max(start, stop))
        trained = np.empty(stripes.size, np.bool_)
        batch_rows.test_bits(self._slabs[slab].touched, stripes * self._k + slot, trained)
        return stripes[trained]

    def install(self, slab: int, layer: Layer, wanted: I64, values: Words) -> None:
        inside = wanted < self._slabs[slab].rows
        if not inside.all():
            wanted, values = wanted[inside], values[inside]
        if self._returned is not None:
            if layer == "marks":
                self._returned[slab][wanted] = values
            return
        if layer == "marks":
            return
        still = self.unknown(slab, layer, wanted)
        if not still.all():
            wanted, values = wanted[still], values[still]
        galois.put_records(self._planes[slab], wanted, 0, wanted.size, values)
        self._are_back(slab, wanted)

    def _are_back(self, slab: int, wanted: I64) -> None:
        batch_rows.clear_bits(self._lost[slab], wanted)
        self._missing_GK[slab] -= np.bincount(wanted % self._k, minlength=self._k)

    def solve(
        self, slab: int, slot: int, stripes: I64, parity: U32, first: int,
        others: Sequence[tuple[SlabRows, int]],
    ) -> None:  # fmt: skip
        """Brings rows of a slot back: the parity of their stripes plus all other rows of them.

        The parity of stripe t, whose coefficients are all 1, is row `first + t`; `others` are the
        other members with their slots, whose rows nobody changes meanwhile.
        """
        jobs, column = [], 0
        for number, plane in enumerate(self._planes[slab]):
            table = np.array([member._place(slab, number, s) for member, s in others], np.int64)
            args = stripes, self._k, slot, plane, parity, first, column, table.reshape(-1, 4)
            jobs.append((galois.write_solve_rows, args))
            column += plane.shape[1]
        _over_rows(self._slabs[slab], stripes.size, jobs, _PARTS)
        self._are_back(slab, stripes * self._k + slot)

    def _place(self, slab: int, plane: int, slot: int) -> tuple[int, int, int, int]:
        """Where a plane is, for kernels that take several."""
        values, touched = self._planes[slab][plane], self._slabs[slab].touched
        return values.ctypes.data, values.shape[0], touched.ctypes.data, slot

    def add_records(
        self, slab: int, slot: int, stripes: I64, coefficient: int, target: U32, first: int
    ) -> None:
        """Adds coefficient * the records of the rows of a slot to row `first + stripe` of a
        target."""
        jobs, column = [], 0
        for plane in self._planes[slab]:
            args = (
                stripes, self._k, target, first, column, slot, plane, self._slabs[slab].touched,
                np.uint32(coefficient),
            )  # fmt: skip
            jobs.append((galois.write_add_member, args))
            column += plane.shape[1]
        _over_rows(self._slabs[slab], stripes.size, jobs, _PARTS)

    def reveal(self) -> None:
        """Marks rows as trained, and as changed for everybody who follows changes: what had been
        followed was lost with the shard."""
        assert self._returned is not None
        for g, (slab, marks) in enumerate(zip(self._slabs, self._returned, strict=True)):
            self._missing_GK[g] = 0
            for first in range(0, len(marks), _REVEAL_ROWS):
                some = marks[first : first + _REVEAL_ROWS]
                trained = np.flatnonzero(some[:, 0])
                ids = some[trained, 1:]
                trained += first
                batch_rows.set_bits(slab.touched, trained)
                batch_rows.set_bits(slab.dirty, trained)
                if slab.slots:
                    slab.ids[trained] = ids.copy().view(np.int64)[:, 0]
                self._missing_GK[g] += np.bincount(trained % self._k, minlength=self._k)
            if slab.slots:
                slab.restore_slots()
            self._lost[g] = slab.touched.copy()
        self._returned = None

    def next_missing(self, limit: int) -> tuple[int, I64] | None:
        """A slab and about so many of its rows that are not back, neighbours; None if all are."""
        if self._returned is not None:
            return None
        for slab, bits in enumerate(self._lost):
            while self._missing_GK[slab].any():
                first = self._scanned[slab]
                last = min(first + min(_SCAN_WORDS, -(-limit // 64)), bits.size)
                count = batch_rows.count_bits(bits, first, last)
                if count:
                    found = np.empty(count, np.int64)
                    batch_rows.list_bits(bits, first, last, found)
                    return slab, found
                self._scanned[slab] = last if last < bits.size else 0
        return None

    def drop(self) -> None:
        """Lets go of all memory: the shard is lost."""
        self._slabs, self._planes, self._lost = [], [], []
        self.give_up()

    def give_up(self) -> None:
        """Nothing is to come back any more: rows come from a repository, or start over."""
        self._returned = None
        self._missing_GK[:] = 0

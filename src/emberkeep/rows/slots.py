"""The slots of one dynamic table: which id has which, which are free, which is the oldest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, U64
from emberkeep.kernels import hash_index
from emberkeep.runtime.memory import lazy_zeros

# At each refill the oldest 1/64 of the slots is queued: a refill reads the ticks of all slots
# once, so an eviction costs the reading of about 64 of them, in sequence.
_QUEUE_SHARE = 64
_QUEUE_LEAST = 1024
_SAMPLE = 4096


class Slots:
    """Maps the ids of one dynamic table to slots 0..capacity-1 of its range of the slab.

    `ids` is the table's range of the slab's id plane; `ticks`, where given, is its range of the
    `used` plane: each push gives every row that it touches the next tick, so ticks order the rows
    by their last training exactly, and the order survives in a checkpoint as a plane. A slot
    without a row has tick 0.
    """

    def __init__(self, capacity: int, ids: I64, ticks: I64 | None) -> None:
        size = 16
        while size * 2 < capacity * 3:
            size *= 2
        self.capacity = capacity
        self.ids = ids
        self.ticks = ticks
        self.entries: U64 = lazy_zeros((size,), np.uint64)
        self.next_tick = 1
        self.fresh = 0  # slots from here on were never used
        self.freed: list[I64] = []
        self.count = 0
        self._queue: I64 = np.empty(0, np.int64)
        self._queue_ticks: I64 = np.empty(0, np.int64)

    def restore(self, occupied: I64) -> None:
        """Makes the index again, from the ids of the slots that are occupied, ascending."""
        hash_index.index_insert(self.entries, self.ids, self.ids[occupied], occupied)
        self.count = occupied.size
        self.fresh = int(occupied[-1]) + 1 if occupied.size else 0
        free = np.ones(self.fresh, np.bool_)
        free[occupied] = False
        self.freed = [np.flatnonzero(free)]

    def find(self, wanted: I64, base: int, found: I64) -> int:
        """Fills `found` with base + slot, -1 for unknown ids; returns how many are unknown."""
        return int(hash_index.index_find(self.entries, self.ids, wanted, base, found))

    def touch(self, slots: I64) -> None:
        """Makes these the most recently trained slots, in the order given."""
        if self.ticks is not None:
            self.ticks[slots] = np.arange(self.next_tick, self.next_tick + slots.size)
            self.next_tick += slots.size

    def installed(self, ticks: I64) -> None:
        """Rows came with ticks of their own: some may be older than those queued as the oldest."""
        self.next_tick = max(self.next_tick, int(ticks.max(initial=-1)) + 1)
        self._queue = self._queue_ticks = np.empty(0, np.int64)

    def newest_of(self, found: I64, ticks: I64, surplus: int) -> npt.NDArray[np.bool_]:
        """Which rows of an install to take where `surplus` rows have to go, the oldest of those
        that are here and those that come; `found` has the slots of the latter, -1 for new ids."""
        assert self.ticks is not None
        held = self.ticks[: self.fresh].copy()
        held[found[found >= 0]] = 0
        held = held[held > 0]
        new = np.flatnonzero(found < 0)
        oldest = np.argpartition(np.concatenate([held, ticks[new]]), surplus - 1)[:surplus]
        taken = np.ones(found.size, np.bool_)
        taken[new[oldest[oldest >= held.size] - held.size]] = False
        return taken

    def go_on_from(self, tick: int) -> None:
        """The next tick is this one, or the first that is later than those of all rows."""
        newest = 0 if self.ticks is None else int(self.ticks[: self.fresh].max(initial=0))
        self.next_tick = max(tick, newest + 1)

    def insert(self, new: I64) -> I64:
        """Gives each new id a free slot. The caller has made sure that there are enough."""
        taken: list[I64] = []
        missing = new.size
        while missing and self.freed:
            last = self.freed.pop()
            if last.size > missing:
                self.freed.append(last[missing:])
                last = last[:missing]
            taken.append(last)
            missing -= last.size
        taken.append(np.arange(self.fresh, self.fresh + missing, dtype=np.int64))
        self.fresh += missing
        slots = np.concatenate(taken)
        hash_index.index_insert(self.entries, self.ids, new, slots)
        self.count += new.size
        return slots

    def occupy(self, slots: I64) -> None:
        """Takes over slots, ascending, whose ids and ticks are there already; all others are free.

        For a table that is empty so far.
        """
        hash_index.index_insert(self.entries, self.ids, self.ids[slots].copy(), slots)
        self.count = slots.size
        self.fresh = int(slots[-1]) + 1 if slots.size else 0
        free = np.setdiff1d(np.arange(self.fresh), slots)
        self.freed = [free] if free.size else []
        if self.ticks is not None:
            self.ticks[free] = 0

    def remove(self, gone: I64, slots: I64) -> None:
        """Forgets ids that are present and frees their slots."""
        hash_index.index_remove(self.entries, self.ids, gone)
        if self.ticks is not None:
            self.ticks[slots] = 0
        self.freed.append(slots)
        self.count -= gone.size

    def take_oldest(self, count: int, before: Callable[[I64], object]) -> I64:
        """Takes the `count` slots that were trained least recently out of the order.

        `before` is called with slots whose ticks are about to change.
        """
        assert self.ticks is not None
        found: list[I64] = []
        while count:
            if self._queue.size == 0:
                self._refill(count)
                assert self._queue.size, "a row that is held has an age"
            # A slot that was trained or freed after it was queued is no longer the oldest.
            still = np.flatnonzero(self.ticks[self._queue] == self._queue_ticks)
            cut = self._queue.size if still.size < count else int(still[count - 1]) + 1
            slots = self._queue[still[:count]]
            self._queue, self._queue_ticks = self._queue[cut:], self._queue_ticks[cut:]
            before(slots)
            self.ticks[slots] = 0  # out of the order at once: a refill must not find them again
            found.append(slots)
            count -= slots.size
        return np.concatenate(found)

    def _refill(self, least: int) -> None:
        """Queues the oldest occupied slots: exactly those up to some tick, in order."""
        assert self.ticks is not None
        share = max(_QUEUE_LEAST, self.fresh // _QUEUE_SHARE, least)
        ticks = self.ticks[: self.fresh]
        if share * 2 >= self.fresh:
            candidates = np.flatnonzero(ticks)
        else:
            sample = np.sort(ticks[:: max(1, self.fresh // _SAMPLE)])
            limit = sample[min(sample.size - 1, sample.size * share // self.fresh + 1)]
            candidates = np.flatnonzero((ticks > 0) & (ticks <= limit))
            if candidates.size < least:
                candidates = np.flatnonzero(ticks)
        order = np.argsort(ticks[candidates])
        self._queue = candidates[order].astype(np.int64)
        self._queue_ticks = ticks[self._queue].copy()

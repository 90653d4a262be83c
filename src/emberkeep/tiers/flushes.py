"""Rows on their way from frames to the log."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emberkeep._types import I64, U32
from emberkeep.kernels import batch_rows as bits
from emberkeep.kernels import log_records as kernels
from emberkeep.runtime.clock import Event
from emberkeep.tiers.frames import FLUSHING, Frames
from emberkeep.tiers.log import PATIENCE, Extent, RowLog

# Copies for a checkpoint that may wait to be written before a push writes them itself.
_MOST_WAITING_NBYTES = 64 * 2**20


@dataclass(slots=True, eq=False)
class Flush:
    """Frames on their way to the log; the rows stay in their frames until they are there."""

    number: int
    extents: list[Extent]
    frames: I64
    used: I64
    evict: bool
    done: Event
    settled: bool = False


class Flushes:
    """The flushes of one slab. Its lock covers every method but `write`.

    `waiting` are extents that a push had to copy, to be written by upkeep.
    """

    def __init__(self, frames: Frames, positions: U32, log: RowLog) -> None:
        self.waiting: list[Extent] = []
        self._frames, self._positions, self._log = frames, positions, log
        self._under_way: list[Flush] = []
        self._number = 0

    def begin(self, frames: I64, *, evict: bool) -> Flush | None:
        """Copies frames that the log does not hold yet to the end of the log.

        With `evict`, frames that it does hold are free at once.
        """
        dirty = self._frames.unsaved_now(frames)
        unsaved = frames[dirty]
        if unsaved.size:
            self._log.make_room(unsaved.size)
        if evict:
            self._frames.unbind(frames[~dirty])
        if not unsaved.size:
            return None
        with self._log.whole():
            found, stamps = self._frames.row_of[unsaved], self._frames.stamps[unsaved]
            extents = self._append(found, unsaved, stamps, deleted=False)
            for bitmap in (self._frames.unsaved, self._frames.frozen):
                bits.clear_bits(bitmap, unsaved)
            self._number += 1
            self._frames.busy[unsaved] |= FLUSHING
            self._frames.flush_of[unsaved] = self._number
            flush = Flush(
                self._number, extents, unsaved, self._frames.used[unsaved], evict,
                Event(self._log.clock),
            )  # fmt: skip
            self._under_way.append(flush)
        return flush

    def write(self, flush: Flush) -> None:
        """Brings a flush to the file; needs no lock."""
        try:
            with self._log.whole():
                for extent in flush.extents:
                    self._log.write(extent)
        finally:
            flush.done.set()

    def wake(self) -> None:
        """Wakes the threads that wait for a flush; for a log that has failed."""
        for flush in list(self._under_way):
            flush.done.set()

    def settle(self, flush: Flush) -> None:
        """Once it is written: frames that nobody used meanwhile are free."""
        if flush.settled:
            return
        self._log.check()
        flush.settled = True
        self._under_way.remove(flush)
        for extent in flush.extents:
            self._log.written(extent)
        frames = self._frames
        unchanged = frames.flush_of[flush.frames] == flush.number
        still = flush.frames[unchanged]
        frames.busy[still] &= ~np.uint8(FLUSHING)
        frames.flush_of[still] = 0
        if flush.evict:
            idle = (frames.used[still] == flush.used[unchanged]) & (frames.busy[still] == 0)
            idle &= ~frames.unsaved_now(still)
            frames.unbind(still[idle])

    def finish_one(self) -> bool:
        """Waits for one of the flushes under way, if there is any."""
        if self._under_way:
            flush = self._under_way[0]
            flush.done.require(f"rows to be written to {self._log.path}", PATIENCE)
            self.settle(flush)
            return True
        return False

    def append_later(self, found: I64, frames: I64, stamps: I64, *, deleted: bool) -> None:
        """Copies rows to the end of the log at once; upkeep writes them, unless they are many."""
        with self._log.whole():
            self.waiting += self._append(found, frames, stamps, deleted=deleted)
        if sum(extent.words.nbytes for extent in self.waiting) > _MOST_WAITING_NBYTES:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Writes what pushes had to copy, in this thread and under the lock."""
        with self._log.whole():
            waiting, self.waiting = self.waiting, []
            for extent in waiting:
                self._log.write(extent)
                self._log.written(extent)

    def _append(self, found: I64, frames: I64, stamps: I64, *, deleted: bool) -> list[Extent]:
        """Copies rows to the end of the log, in memory so far; they are its newest records."""
        log, layout = self._log, self._log.layout
        extents = []
        done = 0
        while done < found.size:
            extent = log.extend(found.size - done)
            part = slice(done, done + extent.records)
            kernels.pack(
                extent.words, log.block_nbytes // 8, log.per_block, layout.record_words,
                0, found[part], deleted, frames[part], stamps[part], layout.addresses,
                layout.widths, layout.by_row,
            )  # fmt: skip
            rows = found[part]
            before = self._positions[rows].astype(np.int64) - 1
            log.supersede(before[before >= 0], stamps[part][before >= 0])
            first = extent.first(log.per_block)
            self._positions[rows] = np.arange(first + 1, first + 1 + extent.records)
            extents.append(extent)
            done += extent.records
        return extents

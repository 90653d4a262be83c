"""Which rows have their planes in memory: frames, the rows in them, and their last use."""

from __future__ import annotations

import numpy as np

from emberkeep._types import I32, I64, U64, Bools
from emberkeep.kernels import batch_rows as bits
from emberkeep.kernels import log_records as kernels
from emberkeep.runtime.memory import lazy_zeros

# Why a frame may not be given away: its row is being read, is being written, or is about to be
# pushed.
LOADING, FLUSHING, HELD = 1, 2, 4

# At each refill the oldest 1/32 of the frames is queued.
_QUEUE_SHARE = 32
_QUEUE_LEAST = 256
_SAMPLE = 4096


class Frames:
    """Frames 0..count-1, each free or with one row. The slab's lock covers everything.

    Bitmaps by frame: `filled` (its planes hold the row's state), `unsaved` (newer than the log)
    and `frozen` (newer than the log, and part of the checkpoint under way). `stamps` are the
    numbers of the writes that made rows what they are, `used` the turns of their last pull:
    least recently used means the smallest turn.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.count = count
        words = -(-count // 64)
        self.frame_of: I32 = lazy_zeros((rows,), np.int32)  # frame + 1: pages that are not needed
        self.row_of: I64 = np.full(count, -1, np.int64)
        self.used: I64 = np.zeros(count, np.int64)
        self.stamps: I64 = np.zeros(count, np.int64)
        self.busy = np.zeros(count, np.uint8)
        self.flush_of: I64 = np.zeros(count, np.int64)
        self.filled: U64 = np.zeros(words, np.uint64)
        self.unsaved: U64 = np.zeros(words, np.uint64)
        self.frozen: U64 = np.zeros(words, np.uint64)
        self.turn = 1
        self.reserved = 0
        self._stack: I64 = np.arange(count - 1, -1, -1)
        self._free = count
        self._held: I64 = np.empty(0, np.int64)
        self._queue: I64 = np.empty(0, np.int64)
        self._queue_used: I64 = np.empty(0, np.int64)

    @property
    def free(self) -> int:
        """Frames that anybody may take."""
        return self._free - self.reserved

    def of(self, rows: I64) -> I64:
        """The frames of rows, -1 where there is none."""
        return self.frame_of[rows].astype(np.int64) - 1

    def bind(self, rows: I64) -> I64:
        """Gives rows that have none a frame each; the caller has made sure that enough are free."""
        assert rows.size <= self._free
        frames = self._stack[self._free - rows.size : self._free].copy()
        self._free -= rows.size
        self.row_of[frames] = rows
        self.frame_of[rows] = frames + 1
        self.used[frames] = self.turn
        return frames

    def unbind(self, frames: I64) -> None:
        """Frees frames; whatever their planes hold is forgotten."""
        self.frame_of[self.row_of[frames]] = 0
        self.row_of[frames] = -1
        self.busy[frames] = 0
        self.flush_of[frames] = 0
        for bitmap in (self.filled, self.unsaved, self.frozen):
            bits.clear_bits(bitmap, frames)
        self._stack[self._free : self._free + frames.size] = frames
        self._free += frames.size

    def hold(self, frames: I64, reserved: int) -> None:
        """Keeps frames, and so many free ones, for the push that comes next; for one at a time."""
        self.busy[self._held] &= ~np.uint8(HELD)
        self.busy[frames] |= HELD
        self._held, self.reserved = frames, reserved

    def are(self, bitmap: U64, frames: I64) -> Bools:
        found = np.empty(frames.size, np.bool_)
        bits.test_bits(bitmap, frames, found)
        return found

    def unsaved_now(self, frames: I64) -> Bools:
        """Whether the log does not yet hold what frames hold."""
        return self.are(self.unsaved, frames) | self.are(self.frozen, frames)

    def oldest(self, count: int, before: int) -> I64:
        """Up to so many frames that can be given away, the least recently used first.

        Only such as were last used before that turn.
        """
        still = self._still_oldest(before)
        if still.size < count:
            self._refill(count, before)
            still = self._still_oldest(before)
        cut = self._queue.size if still.size < count else int(still[count - 1]) + 1
        taken = self._queue[still[:count]]
        self._queue, self._queue_used = self._queue[cut:], self._queue_used[cut:]
        return taken

    def _still_oldest(self, before: int) -> I64:
        """Places in the queue of frames that were neither used nor given away since."""
        return np.flatnonzero(
            (self.used[self._queue] == self._queue_used)
            & (self.row_of[self._queue] >= 0)
            & (self.busy[self._queue] == 0)
            & (self._queue_used < before)
        )

    def _refill(self, least: int, before: int) -> None:
        share = max(_QUEUE_LEAST, self.count // _QUEUE_SHARE, least)
        limit = before - 1
        if share * 2 < self.count:
            sample = self.used[:: max(1, self.count // _SAMPLE)]
            sample = np.sort(sample[self.row_of[:: max(1, self.count // _SAMPLE)] >= 0])
            if sample.size:
                limit = min(
                    limit, int(sample[min(sample.size - 1, sample.size * share // self.count + 1)])
                )
        out = np.empty(self.count, np.int64)
        found = kernels.list_oldest(self.used, self.row_of, self.busy, limit, out)
        if found < least and limit < before - 1:
            found = kernels.list_oldest(self.used, self.row_of, self.busy, before - 1, out)
        candidates = out[:found]
        order = np.argsort(self.used[candidates], kind="stable")
        self._queue = candidates[order]
        self._queue_used = self.used[self._queue]

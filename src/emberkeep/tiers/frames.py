"""Which rows have their planes in memory: frames, the rows in them, and how they are used.

Frames are given away by how often and how lately their rows were used. A use counts 1 and fades by
`_FADING` a turn; the sum for a row, S at its last use in turn n, is smaller than that for another
if n + log(S) / _FADING is. That number does not change between uses: it is the row's *worth*. The
order of last uses, simulated on one stream of ids (`retail`), misses a sixth more with a cache of
three batches, since it lets rows of every second batch go; with one of fourteen it is the same.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import F64, I32, I64, U64, Bools
from emberkeep.kernels import batch_rows as bits
from emberkeep.kernels import log_records as kernels
from emberkeep.runtime.memory import lazy_zeros

# Why a frame may not be given away: its row is being read, is being written, or is about to be
# pushed.
LOADING, FLUSHING, HELD = 1, 2, 4

# A use counts half after 28 turns: 14 batches, each of which is read ahead and pulled.
_FADING = 0.025
# A refill queues what is among the least worthy 1/32 of all frames, by a sample, and stands in the
# next of so many frames: it takes a few milliseconds, however many there are.
_QUEUE_SHARE = 32
_WINDOW = 2**18
_QUEUE_LEAST = 256
_SAMPLE = 4096


class Frames:
    """Frames 0..count-1, each free or with one row. The slab's lock covers everything.

    Bitmaps by frame: `filled` (its planes hold the row's state), `unsaved` (newer than the log)
    and `frozen` (newer than the log, and part of the checkpoint under way). `stamps` are the
    numbers of the writes that made rows what they are, `used` the turns of their last pull, `worth`
    what the module says.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.count = count
        words = -(-count // 64)
        self.frame_of: I32 = lazy_zeros((rows,), np.int32)  # frame + 1: pages that are not needed
        self.row_of: I64 = np.full(count, -1, np.int64)
        self.used: I64 = np.zeros(count, np.int64)
        self.worth: F64 = np.zeros(count, np.float64)
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
        self._next = 0  # where the next refill goes on

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
        self.worth[frames] = self.turn
        return frames

    def touch(self, frames: I64, turn: int) -> None:
        """Counts a use of each."""
        faded = np.exp(_FADING * (self.worth[frames] - turn))
        self.worth[frames] = turn + np.log1p(faded) / _FADING

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

    def least(self, count: int, before: int) -> I64:
        """Up to so many frames that can be given away, such as were last used before that turn;
        fewer only if there are no more. Those of little worth go first, about in its order."""
        still = self._still_idle(before)
        if still.size < count:
            self._refill(self._queue[still], count, before)
            still = self._still_idle(before)
        cut = self._queue.size if still.size < count else int(still[count - 1]) + 1
        taken = self._queue[still[:count]]
        self._queue, self._queue_used = self._queue[cut:], self._queue_used[cut:]
        return taken

    def _still_idle(self, before: int) -> I64:
        """Places in the queue of frames that were neither used nor given away since."""
        return np.flatnonzero(
            (self.used[self._queue] == self._queue_used)
            & (self.row_of[self._queue] >= 0)
            & (self.busy[self._queue] == 0)
            & (self._queue_used < before)
        )

    def _refill(self, queued: I64, least: int, before: int) -> None:
        """Queues frames beside those that still are: window after window, until it is enough."""
        share = max(_QUEUE_LEAST, self.count // _QUEUE_SHARE, least)
        most = np.inf
        if share * 2 < self.count:
            every = max(1, self.count // _SAMPLE)
            idle = (self.row_of[::every] >= 0) & (self.used[::every] < before)
            sample = np.sort(self.worth[::every][idle])
            if sample.size:
                most = sample[min(sample.size - 1, share // every + 1)]
        candidates = self._list_idle(queued, least, most, before)
        if candidates.size < least and most < np.inf:
            candidates = self._list_idle(queued, least, np.inf, before)
        order = np.argsort(self.worth[candidates], kind="stable")
        self._queue = candidates[order]
        self._queue_used = self.used[self._queue]

    def _list_idle(self, queued: I64, least: int, most: float, before: int) -> I64:
        """The queued frames and what the next windows have, each looked at once."""
        listed, looked_at, total = [queued], 0, 0
        while looked_at < self.count and total < least:
            start = self._next
            stop = min(start + _WINDOW, start + self.count - looked_at, self.count)
            some = slice(start, stop)
            out = np.empty(stop - start, np.int64)
            found = kernels.list_idle(
                self.worth[some], most, self.used[some], before, self.row_of[some],
                self.busy[some], out,
            )  # fmt: skip
            listed.append(start + out[:found])
            looked_at, total = looked_at + stop - start, total + found
            self._next = stop % self.count
        return np.unique(np.concatenate(listed))

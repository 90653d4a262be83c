"""What a tier is compared with: other caches, and none, before the same file.

They are slabs as the tier's is: the same records, checks and optimizer kernels, the same file
opened for direct I/O, so the same bits. What differs, and is measured, is when the work is done.
None of them has a thread of its own: their files are never cleaned, and grow while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numba
import numpy as np

from emberkeep._types import I64, RowIds
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.runtime import pool as pools
from emberkeep.tables import Optimizer, Table
from emberkeep.tiers.durable_open import open_slab
from emberkeep.tiers.frames import Frames
from emberkeep.tiers.reads import Reads
from emberkeep.tiers.tiered_slab import TieredSlab

Kind = Literal["pipelined", "inline", "ordinary", "hash"]


class ListedFrames(Frames):
    """Frames whose order of use is a list, as `std::list` keeps it for the paper's Ori-Cache.

    The list is linked through arrays by compiled code; a use moves a frame to its end.
    """

    def __init__(self, count: int, rows: int) -> None:
        super().__init__(count, rows)
        # Frame `count` stands for both ends; -1: in no list.
        self._older = np.full(count + 1, -1, np.int64)
        self._newer = np.full(count + 1, -1, np.int64)
        self._older[count] = self._newer[count] = count

    def touch(self, frames: I64, turn: int) -> None:
        """Uses are noted by the list alone."""

    def move_to_end(self, frames: I64) -> None:
        """Notes a use of each."""
        _move_to_end(self._older, self._newer, frames)

    def least(self, count: int, before: int) -> I64:
        out = np.empty(count, np.int64)
        taken = _take_oldest(self._older, self._newer, self.busy, self.used, before, out)
        return out[:taken]


class InlineCache(TieredSlab):
    """Our cache alone: its order of eviction and its reads, but everything is done in the path of a
    request, under the lock. Nothing happens between requests and nothing is read ahead."""

    def _wake(self) -> None:
        """There is no upkeep to wake."""

    def fetch(self, wanted: RowIds, *, ahead: bool = False) -> None:
        if not ahead:
            with self.lock:
                super().fetch(wanted)


class OrdinaryCache(InlineCache):
    """The paper's Ori-Cache: an ordinary cache that does its upkeep in the path of a request.

    Under the lock a pull moves the rows that it hits to the end of the list of uses, one by one,
    frees the oldest for those that it misses, writes back what these hold, and reads what it
    misses: each thread as it meets them, one at a time, since a cache that is asked for one key
    after the other has nothing else to read meanwhile. A push is a use of its own and moves rows
    again.

    It is kinder than the paper's in one way: victims of a request are written together.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.loads.reads = Reads(self.log, threads=self.pool.threads)
        self.loads.reads.deep = False

    def _new_frames(self, count: int) -> ListedFrames:
        return ListedFrames(count, self.rows)

    def fetch(self, wanted: RowIds, *, ahead: bool = False) -> None:
        if not ahead:
            with self.lock:
                super().fetch(wanted)
                found, _ = self.resolve(wanted)
                self._note_use(self.frames.of(found[found >= 0]))

    def _after_write(self, found: I64, places: I64) -> None:
        super()._after_write(found, places)
        self._note_use(places)

    def _note_use(self, frames: I64) -> None:
        assert isinstance(self.frames, ListedFrames)
        self.frames.move_to_end(frames)


class StorageHash(TieredSlab):
    """The paper's PMem-Hash: no cache. A pull reads every row from storage, a push reads it again,
    updates it, and writes it back before it returns.

    Frames hold the rows of the push under way and are empty between requests. Kinder than one
    row after the other: a request reads with 64 reads under way at once, and writes together.
    """

    def _wake(self) -> None:
        """There is no upkeep to wake."""

    def fetch(self, wanted: RowIds, *, ahead: bool = False) -> None:
        """There is nowhere to bring rows to."""

    def _after_write(self, found: I64, places: I64) -> None:
        super()._after_write(found, places)
        flush = self.flushes.begin(places, evict=True)
        if flush is not None:
            self.flushes.write(flush)
            self.flushes.settle(flush)


SLABS: dict[Kind, type[TieredSlab]] = {
    "pipelined": TieredSlab,
    "inline": InlineCache,
    "ordinary": OrdinaryCache,
    "hash": StorageHash,
}


@dataclass(frozen=True, slots=True)
class LocalOf:
    """One shard in this process, whose tiers have a cache of this kind."""

    kind: Kind

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> LocalCluster:
        slabs = partial(open_slab, kind=SLABS[self.kind])
        return LocalCluster(tables, optimizer, seed=seed, pool=pools.shared(), slabs=slabs)


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _move_to_end(older: np.ndarray, newer: np.ndarray, frames: np.ndarray) -> None:
    end = older.size - 1
    for frame in frames:
        if frame < 0:
            continue
        if older[frame] >= 0:
            newer[older[frame]] = newer[frame]
            older[newer[frame]] = older[frame]
        last = older[end]
        older[frame], newer[frame] = last, end
        newer[last] = frame
        older[end] = frame


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _take_oldest(
    older: np.ndarray, newer: np.ndarray, busy: np.ndarray, used: np.ndarray, before: int,
    out: np.ndarray,
) -> int:  # fmt: skip
    end = older.size - 1
    found = 0
    frame = newer[end]
    while frame != end and found < out.size:
        following = newer[frame]
        if busy[frame] == 0 and used[frame] < before:
            newer[older[frame]] = following
            older[following] = older[frame]
            older[frame] = newer[frame] = -1
            out[found] = frame
            found += 1
        frame = following
    return found

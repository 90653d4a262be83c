"""The file behind a tier: rows as records, appended in large writes, never overwritten in place.

The file is a head (`superblock`) and segments of equal size; a segment is filled block by block
from its start, sealed when it is full, and used again under its next *generation* once none of its
records is needed. A record carries the life that wrote it, a *stamp* (the number of the write that
made the row what it is) and its block's sequence number. Of the records of a row, the one with the
highest stamp is the row. A record that was superseded is kept until its successor's stamp is
committed: until then the committed batch still needs it, unless it is of none; see `superseded`.

Nothing here looks at rows: which of them move where, and when, is the slab's business.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep._types import I64, U8, U64, Bools, Json
from emberkeep.blobs.system_disk import Disk
from emberkeep.errors import DamageError, TierError
from emberkeep.kernels import log_records as kernels
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, wait_in_time
from emberkeep.runtime.system_calls import read_at
from emberkeep.tiers import directory
from emberkeep.tiers.directory import Claim
from emberkeep.tiers.record_layout import BLOCK, Layout, aligned, bytes_of
from emberkeep.tiers.segment_index import SegmentIndex
from emberkeep.tiers.superblock import (
    ROOM,
    SLOT_NBYTES,
    START,
    Point,
    Superblock,
    encode,
    extents_of,
    pack_bits,
    slot,
)
from emberkeep.tiers.superseded import Superseded

_FREE, _ACTIVE, _SEALED, _AREA = 0, 1, 2, 3
# Room that a head has for what changes until it is written: a few numbers.
_SPARE = 4096
_MOST_RECORDS = 2**32 - 2
MOST_ROWS = _MOST_RECORDS // 2
"""Rows of one file: until a batch is committed, its records stand beside those of the last one."""


PATIENCE = timedelta(minutes=10)
"""A read or write is a few megabytes; one that takes longer hangs."""


@dataclass(slots=True)
class Extent:
    """Whole blocks of one segment that are about to be written."""

    words: U64
    block: int
    records: int
    generation: int
    sequence: int
    segment: int

    def first(self, per_block: int) -> int:
        return self.block * per_block


class RowLog:
    """One file, which `claim` makes ours. Its slab reads time from its `clock`.

    The slab's lock covers every method but `write`, `read_segment`, `sync` and those that change
    the head, which come one at a time.
    """

    def __init__(
        self,
        path: str,
        head: Superblock,
        sequence: int,
        layout: Layout,
        disk: Disk,
        claim: Claim,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.clock = clock
        self.path = path
        self._claim = claim
        self.disk = disk
        self.head = head
        self.layout = layout
        self.failed: BaseException | None = None
        self._users = 0
        self._idle = threading.Condition()
        self._head_sequence = sequence
        self._heads = threading.RLock()  # one change of the head at a time
        self.block_nbytes = layout.block_nbytes
        self.per_block = (self.block_nbytes - kernels.HEADER) // (8 * layout.record_words)
        self.segment_blocks = layout.segment_blocks(head.segment_nbytes)
        self.slots = self.segment_blocks * self.per_block
        self.salt = np.uint64(head.salt)
        self.handle, self.direct = directory.open_file(path, disk, claim)
        self.index = SegmentIndex(
            path, self.salt, layout, self.per_block, self.segment_blocks, disk, direct=self.direct
        )
        self.generations: I64
        self.live: I64
        self._unwritten: I64
        self.states: U8
        self._superseded: Superseded
        self.resize(head.segments)
        self._free: list[int] = []
        self._limbo: list[tuple[int, int]] = []  # segments that readers may still look at
        self._unlisted: list[int] = []  # free segments that the head does not name yet
        self._readers: dict[int, int] = {}
        self._turn = 0
        self._damaged: dict[int, DamageError] = {}  # segments, also once their rows have died
        self._active = -1
        self._filled = 0
        self._promised = 0
        self.sequence = 1
        self.horizon: int | None = None
        self.changed = True  # which segments are dead or worth cleaning
        self.reads = 0
        self.appended = 0

    # -- opening ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for reads and writes under way, refuses later ones, and lets the file go.

        The next process that opens the file can rely on it that nothing is written any more.
        """
        with self._idle:
            self.failed = self.failed or TierError("it was closed")
            what = f"reads and writes of {self.path} to end before it is closed"
            wait_in_time(self._idle, lambda: not self._users, what, PATIENCE, self.clock)
            handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)
            self.index.close()
        self._claim.release()

    def __del__(self) -> None:
        if getattr(self, "handle", -1) >= 0:
            os.close(self.handle)
            self.index.close()

    # -- appending -------------------------------------------------------------------------------

    def make_room(self, records: int, pieces: int = 8) -> int:
        """Makes sure that so many records, in so many pieces, can be appended without failing,
        beside what was promised. Returns how many blocks they may take."""
        self.check()
        blocks = -(-records // self.per_block) + pieces
        while self._room() < blocks + self._promised:
            self._add_segment()
        return blocks

    def promise(self, records: int, pieces: int = 8) -> None:
        """Keeps room for a write that comes later, in the place of what was promised before: none
        of it goes to others until `keep_promise`."""
        self._promised = 0
        self._promised = self.make_room(records, pieces)

    def keep_promise(self) -> None:
        """The write has taken what it needed, or does not come."""
        self._promised = 0

    def _room(self) -> int:
        """Blocks that can be filled before the file has to grow."""
        have = self.segment_blocks - self._filled if self._active >= 0 else 0
        return have + len(self._free) * self.segment_blocks

    def extend(self, records: int) -> Extent:
        """Room for up to so many records, at the end; whole blocks are taken."""
        self.check()
        if self._active < 0 or self._filled == self.segment_blocks:
            if self._active >= 0:
                self.states[self._active] = _SEALED
            if not self._free:
                self._add_segment()
            self._active = self._free.pop()
            self.states[self._active] = _ACTIVE
            # Above that of every use in an earlier life, whatever of that reached the medium.
            used = max(int(self.generations[self._active]), self.head.life << 32)
            self.generations[self._active] = used + 1
            self._superseded.begin_segment(self._active)
            self.index.begin(self._active, used + 1, self.head.life, self.sequence)
            self._filled = 0
        wanted = -(-records // self.per_block)
        blocks = min(wanted, self.segment_blocks - self._filled)
        extent = Extent(
            aligned(blocks * self.block_nbytes),
            self._active * self.segment_blocks + self._filled,
            min(records, blocks * self.per_block),
            int(self.generations[self._active]),
            self.sequence,
            self._active,
        )
        self._filled += blocks
        self.sequence += blocks
        self.live[self._active] += extent.records
        self._unwritten[self._active] += 1
        self.appended += extent.records
        return extent

    def write(self, extent: Extent) -> None:
        """Brings an extent that was filled to the file. Its bytes can be read then; see `sync`."""
        offset = START + extent.block * self.block_nbytes
        with self._ending("written"):
            kernels.seal(
                extent.words, self.block_nbytes // 8, self.per_block, extent.records,
                self.head.life, extent.sequence, extent.generation, extent.block, self.salt,
            )  # fmt: skip
            self.disk.write_at(self.handle, bytes_of(extent.words), offset)
            self.index.note(extent.segment, extent.words, extent.block % self.segment_blocks)

    def written(self, extent: Extent) -> None:
        """Notes, under the lock, that an extent is in the file."""
        self.changed = True
        self._unwritten[extent.segment] -= 1
        self.index.written(extent.segment, extent.words)

    def _add_segment(self) -> None:
        number = self.states.size
        if (number + 1) * self.slots > _MOST_RECORDS:
            raise TierError(f"{self.path} holds as many records as one file can; use more shards")
        nbytes = self.segment_blocks * self.block_nbytes
        try:
            self.disk.allocate(self.handle, START + number * nbytes, nbytes)
        except OSError as error:
            raise TierError(
                f"{self.path} cannot grow: {error.strerror}; no row was lost or changed. Free "
                "space and go on, or save checkpoints more often: space of superseded rows is used "
                "again once a checkpoint is committed"
            ) from None
        for name in ("generations", "live", "_unwritten"):
            setattr(self, name, np.append(getattr(self, name), 0))
        self.states = np.append(self.states, np.uint8(_FREE))
        self._superseded.add_segment()
        self._free.append(number)

    def resize(self, segments: int) -> None:
        """Takes so many segments into account, those of a file that was just opened."""
        for name in ("generations", "live", "_unwritten"):
            setattr(self, name, np.zeros(segments, np.int64))
        self.states = np.zeros(segments, np.uint8)
        self._superseded = Superseded(segments)
        for area in self.head.areas:
            self.states[list(area)] = _AREA

    def holds_head(self, segment: int) -> bool:
        """Whether a segment has a head in place of rows."""
        return bool(self.states[segment] == _AREA)

    def adopt(self, segment: int) -> None:
        """Of a file that was just opened: keeps a segment that has rows, frees one that has not."""
        if self.live[segment]:
            self.states[segment] = _SEALED
        elif not self.holds_head(segment):
            self._free.append(segment)

    # -- which records are needed ----------------------------------------------------------------

    def supersede(self, records: I64, stamps: I64) -> None:
        """Records whose rows have newer ones, with those stamps, that were appended just now."""
        if not records.size:
            return
        self.changed = True
        segments = records // self.slots
        if self.horizon is None:
            np.subtract.at(self.live, segments, 1)
            return
        np.subtract.at(self.live, self._superseded.note(segments, stamps), 1)

    def clear(self) -> None:
        """All rows were superseded, and no batch is under way: until one begins, none needs what
        is written from now on, and its space is used again without one."""
        self._superseded.clear()

    @property
    def undecided(self) -> I64:
        """By segment: superseded records that wait for a batch to be committed."""
        return self._superseded.undecided

    def begin_batch(self, stamp: int) -> None:
        """A batch of all that was written up to now, with that stamp, is about to be prepared."""
        if self.horizon is None:
            self.horizon = stamp
        self._superseded.begin_batch(stamp)

    def decide(self) -> None:
        """Lets go of what neither the committed batch nor a later one needs."""
        if self.horizon is None:
            return
        self.changed = True
        self.live -= self._superseded.decide(self.horizon)

    def release(self, segment: int) -> None:
        """A sealed segment without needed records may be used again, once its readers are gone.

        One that is damaged is not: its next bytes might not last either.
        """
        self.states[segment] = _FREE
        self.index.forget(segment)
        self._limbo.append((segment, self._turn))
        self._turn += 1
        self._drain_limbo()

    def release_dead(self) -> None:
        dead = (self.states == _SEALED) & (self.live == 0) & (self._unwritten == 0)
        for segment in np.flatnonzero(dead):
            self.release(int(segment))

    def begin_reading(self) -> int:
        """From now on no segment is used again until `end_reading`."""
        self._readers[self._turn] = self._readers.get(self._turn, 0) + 1
        return self._turn

    def end_reading(self, turn: int) -> None:
        self._readers[turn] -= 1
        if not self._readers[turn]:
            del self._readers[turn]
        self._drain_limbo()

    def _drain_limbo(self) -> None:
        oldest = min(self._readers, default=self._turn)
        idle = [s for s, turn in self._limbo if turn < oldest and s not in self._damaged]
        # Once there is something to come back to, the head says first that a segment's blocks are
        # not needed: torn by a new use of it, they would look like damage. It has never said
        # anything else of loose ones.
        for segment in idle:
            listed = self.horizon is None or self._superseded.is_loose(segment)
            (self._free if listed else self._unlisted).append(segment)
        self._limbo = [entry for entry in self._limbo if entry[1] >= oldest]

    def reconsider(self) -> int | None:
        """Lets dead segments be used again; the one whose cleaning gives back most, if any.

        Costs nothing where no record died and none was written since it found nothing to do.
        """
        if not self.changed:
            return None
        self.release_dead()
        found = self._cleanable()
        self.changed = found is not None
        return found

    def _cleanable(self) -> int | None:
        """One of the mostly dead segments, if more of the file is dead than alive."""
        sealed = (self.states == _SEALED) & (self._unwritten == 0)
        slots = int(sealed.sum()) * self.slots
        if slots <= 2 * int(self.live[sealed].sum()) + 4 * self.slots:
            return None
        sealed[list(self._damaged)] = False
        candidates = np.flatnonzero(sealed & (self.undecided == 0))
        if not candidates.size:
            return None
        best = int(candidates[np.argmin(self.live[candidates])])
        return best if self.live[best] * 4 <= self.slots * 3 else None

    def set_aside(self, segment: int, error: DamageError) -> None:
        """Leaves a damaged segment where it is: for the rest of this life it is not cleaned, and
        nothing is declared durable while it holds rows. The next life reads all of the file. Needs
        no lock."""
        self._damaged[segment] = error
        self.index.distrust()

    def check_whole(self) -> None:
        """Raises if rows are known to be damaged: a batch that holds them would not come back."""
        for segment, error in list(self._damaged.items()):
            if self.states[segment] != _FREE:
                raise error

    # -- reading ---------------------------------------------------------------------------------

    def read_segment(self, segment: int, words: U64, first: int = 0) -> None:
        """The blocks of a segment from one on; what lies beyond the end of the file stays."""
        view = bytes_of(words)
        offset = START + (segment * self.segment_blocks + first) * self.block_nbytes
        while view:
            got = read_at(self.handle, view, offset)
            if not got:
                break
            view, offset = view[got:], offset + got

    # -- what is durable -------------------------------------------------------------------------

    def sync(self) -> None:
        """Everything that was written is on the medium when this returns."""
        with self._ending("synced"):
            self.disk.sync(self.handle)

    def write_head(self, **changes: Any) -> None:
        """Changes the head, durably. Bytes that it speaks of were synced before."""
        with self._heads:
            self._write_head(changes)

    def _write_head(self, changes: Json) -> None:
        head = replace(self.head, **changes)
        sequence = self._head_sequence + 1
        which = (sequence - 1) % 2  # never the slot that is the newest, nor its area
        text = encode(head)
        nbytes = self.segment_blocks * self.block_nbytes
        extents = extents_of(head.areas[which], nbytes, len(text))
        done = 0
        with self._ending("written"):
            for offset, count in extents:
                self._write_padded(text[done : done + count], offset)
                done += count
            self._write_padded(slot(text, sequence, extents), which * SLOT_NBYTES)
        self.sync()
        self.head, self._head_sequence = head, sequence

    def _write_padded(self, content: bytes, offset: int) -> None:
        words = aligned(-(-len(content) // BLOCK) * BLOCK)
        bytes_of(words)[: len(content)] = content
        self.disk.write_at(self.handle, bytes_of(words), offset)

    def reserve_head(self, **changes: Any) -> None:
        """Makes sure that a head with these changes can be written, and the one after it.

        Under the lock: it may take segments, so list the free ones after it.
        """
        with self._heads:
            self._reserve_head(changes)

    def _reserve_head(self, changes: Json) -> None:
        nbytes = self.segment_blocks * self.block_nbytes
        while True:
            wanted = len(encode(replace(self.head, **changes))) + _SPARE
            short = [
                which
                for which in (0, 1)
                if wanted > max(ROOM, len(self.head.areas[which]) * nbytes)
            ]
            if not short:
                return
            while not self._free or self._room() < self.segment_blocks + self._promised:
                self._add_segment()
            segment = self._free.pop()
            self.states[segment] = _AREA
            areas = list(self.head.areas)
            areas[short[0]] += (segment,)
            self.head = replace(self.head, areas=(areas[0], areas[1]))

    def prepare(self, point: Point, free: Bools, wanted: Callable[[], bool]) -> bool:
        """From now on the file can be taken to `point`, should everybody else get there.

        `free` are the segments that were free when the point was made; see `free_segments`. Does
        nothing if it is not `wanted` any more; whether it was. Needs no lock.
        """
        self.sync()
        self.check_named()
        with self._heads:
            if not wanted():
                return False
            # The outcome of the batch before would be lost with it.
            self.check_recorded()
            self.write_head(prepared=point, segments=int(free.size), free=pack_bits(free))
            return True

    def unlisted(self) -> tuple[int, ...]:
        """Segments that may be used again once a head says that they are free."""
        return tuple(self._unlisted)

    def use_again(self, listed: Sequence[int]) -> None:
        """A head says now that these are free."""
        for segment in listed:
            self._unlisted.remove(segment)
        self._free.extend(listed)

    def check_recorded(self) -> None:
        """Raises if the file waits for the outcome of a batch: no other can be prepared then."""
        if (waiting := self.head.prepared) is not None:
            raise TierError(
                f"{self.path} has prepared batch {waiting.batch} and has not recorded whether that "
                "took place; nothing was changed, and opening the tier again does so"
            )

    @property
    def prepared(self) -> Point | None:
        """The batch whose outcome the file has not recorded."""
        with self._heads:
            return self.head.prepared

    def unprepare(self, nonce: str) -> bool:
        """Records that a batch was given up, if it is the prepared one; whether it was.

        Its blocks stay: among them are the cleaner's copies, whose originals may be gone.
        """
        with self._heads:
            point = self.head.prepared
            if point is None or point.nonce != nonce:
                return False
            self.write_head(prepared=None, synced=max(self.head.synced, point.sequence))
            return True

    def free_segments(self) -> Bools:
        return np.equal(self.states, _FREE)

    def free_now(self) -> Json:
        """What a head says of segments as they are now."""
        free = self.free_segments()
        return {"segments": int(free.size), "free": pack_bits(free)}

    def commit(self, nonce: str) -> bool:
        """The prepared point becomes the one to come back to, if it is of that batch; whether it
        was. What it made superfluous dies."""
        with self._heads:
            point = self.head.prepared
            if point is None or point.nonce != nonce:
                return False
            self.check_named()
            self.write_head(prepared=None, committed=point)
            self.check_named()
            self.horizon = point.stamp
            return True

    def check_named(self) -> None:
        """Raises if the file, or the lock beside it, was removed or replaced: what is in it then
        would be durable under no name."""
        with self._ending("found again"):
            gone = self._claim.missing()
            if not directory.names(self.path, self.handle):
                gone = self.path
        if gone is not None:
            error = TierError(
                f"{gone} was removed or replaced while it was in use; this shard has ended, and "
                "what was not durable before is lost. Bring the file back, then resume"
            )
            self.fail(error)
            raise error

    @property
    def damaged(self) -> int:
        """Segments that are known to be damaged and still hold rows."""
        return sum(int(self.states[segment] != _FREE) for segment in list(self._damaged))

    def check(self) -> None:
        """Raises once the file has failed."""
        if self.failed is not None:
            why = str(self.failed) or type(self.failed).__name__
            raise TierError(
                f"{self.path} has failed ({why}) and takes no more rows: end this process, check "
                "the disk, and resume from the last durable batch"
            ) from self.failed

    def fail(self, error: BaseException) -> None:
        """Takes nothing more, for good: it is not known what is in the file, or in its index."""
        self.failed = self.failed or error

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What happens meanwhile happens as a whole, or the file fails: records that the index
        names and nobody writes would be taken for rows."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    @contextmanager
    def using(self) -> Iterator[None]:
        """The file stays open meanwhile."""
        with self._idle:
            self.check()
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    @contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """A failed write or sync is final: what the medium holds then is unknown."""
        with self.using():
            try:
                yield
            except OSError as error:
                self.fail(error)
                raise TierError(
                    f"{self.path} could not be {what}: {error.strerror}; this shard has ended. The "
                    "last durable batch is safe: check the disk, then resume from it"
                ) from error
            except BaseException as error:
                self.fail(error)
                raise

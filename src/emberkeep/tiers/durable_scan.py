"""What the segments of a tier's file hold, when it is opened: from the index, or read whole.

Why a segment need not be read of which the index has an entry. A segment is filled once, from its
start, by one life, and its block i has the sequence number of its first block plus i. It is used
again only after a durable head named it free, so of a segment that the *newest* head does not name
free no block of a later use can be there: the first block of the use that the head speaks of was
synced before it, as was every block up to where its life ended. An entry is written once all blocks
of its use are in the file, and holds if it goes as far as that life did, and first and last block
are there to the checksum: so it is of this use, whatever became of extents that were written out of
order, and of no copy of the file that went on otherwise or ended before. Blocks beyond the end of
their life do not count, be they whole or not. What remains is damage of blocks between the two;
those are checked when a row of them is read, when the cleaner moves them, and by upkeep, which
looks through all segments that opening has not read.

Segments that the head names free are not looked at: a use has a generation above that of every
earlier life, so nothing that they still have can be taken for what is written to them.

Both rest on the head being the newest one. Where that is not certain, since one of the two is torn
or damaged, every segment is read.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from emberkeep._types import I64, Bools
from emberkeep.errors import DamageError
from emberkeep.kernels import log_index
from emberkeep.kernels import log_records as kernels
from emberkeep.runtime.crew import Crew
from emberkeep.tiers.log import RowLog
from emberkeep.tiers.record_layout import aligned
from emberkeep.tiers.segment_index import Entry, Noted
from emberkeep.tiers.superblock import START, Point, is_newest, unpack_bits
from emberkeep.tiers.tiered_slab import TieredSlab

# Threads that read entries, and the blocks that these speak of: small reads, that wait.
_READERS = 16
_LEFT = "it is left where it is, and no batch is declared durable with it"

Lives = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Scanned:
    """What was found."""

    first_life: int
    """The oldest life that has a block in the file."""
    sequence: int
    """The highest of a block that counts, or may."""
    indexed: set[int]
    """Segments that came from the index."""
    read: set[int]
    """Segments with rows that were read."""


class _Blocks:
    """Memory for blocks of a segment, and what `check_blocks` says of them."""

    def __init__(self, log: RowLog, count: int) -> None:
        self.words = aligned(count * log.block_nbytes)
        self.generations = np.empty(count, np.int64)
        self.sequences = np.empty(count, np.int64)
        self._log = log

    def read(self, segment: int, first: int = 0) -> None:
        log = self._log
        self.words[:] = 0
        log.read_segment(segment, self.words, first)
        kernels.check_blocks(
            self.words, log.block_nbytes // 8, log.per_block, segment * log.segment_blocks + first,
            log.salt, self.generations, self.sequences,
        )  # fmt: skip

    @property
    def lives(self) -> I64:
        """Where blocks are whole, the life that wrote each."""
        return (self.words[1 :: self._log.block_nbytes // 8] >> np.uint64(32)).astype(np.int64)


def scan(slab: TieredSlab, point: Point, lives: Lives, advance: Callable[[], object]) -> Scanned:
    """Takes the newest record of each row that counts, from all segments in parallel.

    What it finds is the same with an index and without.
    """
    log = slab.log
    extra = max(0, (os.path.getsize(log.path) - START)) // (log.segment_blocks * log.block_nbytes)
    log.resize(max(log.head.segments, extra))
    needed = _needed(log)
    newest_head = is_newest(log.path)
    if newest_head:
        log.index.open()
    stamps_R = np.zeros(slab.rows, np.int64)
    ends, last = (np.array(part, np.int64) for part in zip(*lives, strict=True))
    layout = log.layout
    merging = threading.Lock()
    oldest, newest = [log.head.life + 1], [point.sequence, int(last.max())]
    indexed: set[int] = set()
    read: set[int] = set()

    def check(bad: int) -> None:
        if bad >= 0:
            raise DamageError(f"{log.path} names row {bad}, which there is not", name=log.path)

    def from_index(segments: Sequence[int]) -> None:
        place, end = aligned(log.index.place_nbytes), _Blocks(log, 1)
        for segment in segments:
            advance()
            entry = log.index.find(segment, place)
            if entry is not None and says_all(entry) and _holds(log, segment, entry, end):
                check(merge_entry(segment, entry))

    def says_all(entry: Entry) -> bool:
        """Whether it goes as far as the life did that filled the segment: one of a copy of the file
        may speak of fewer blocks, all of which are here, too."""
        life = entry.life - log.head.first_life
        if not 0 <= life < len(lives):
            return True  # nothing of such a life counts
        return entry.counts.size >= min(log.segment_blocks, int(last[life]) - entry.sequence + 1)

    def from_file(segments: Sequence[int]) -> None:
        blocks = _Blocks(log, log.segment_blocks)
        for segment in segments:
            advance()
            check(merge_blocks(segment, blocks))

    def merge_entry(segment: int, entry: Entry) -> int:
        life = entry.life - log.head.first_life
        with merging:
            indexed.add(segment)
            log.generations[segment] = entry.generation
            oldest.append(entry.life)
            if not 0 <= life < len(lives):
                return -1
            blocks = min(entry.counts.size, int(last[life]) - entry.sequence + 1)
            bad: int = log_index.merge_entry(
                entry.counts, entry.codes, entry.lowest, entry.planes, segment * log.slots,
                log.per_block, blocks, int(ends[life]), point.floor, slab.rows, stamps_R,
                slab.positions, slab.touched, layout.addresses, layout.widths, layout.by_row,
            )  # fmt: skip
        return bad

    def merge_blocks(segment: int, blocks: _Blocks) -> int:
        blocks.read(segment)
        generations = blocks.generations
        generation = int(generations.max(initial=-1))
        if needed[segment]:
            lost = _lost(log, blocks, generation, lives)
            if lost:
                raise _damage(log, segment, lost, "nothing was changed")
        if generation <= 0:
            return -1
        whole, found_lives = generations == generation, blocks.lives
        with merging:
            oldest.append(int(found_lives[whole].min()))
            if not newest_head:
                newest.append(int(blocks.sequences.max()))
            log.generations[segment] = generation
        if not needed[segment]:
            return -1  # free when the head was written: whatever it holds is dead or younger
        place = np.clip(found_lives - log.head.first_life, 0, len(lives) - 1)
        generations[blocks.sequences > last[place]] = -1
        with merging:
            read.add(segment)
            bad: int = kernels.merge_records(
                blocks.words, log.block_nbytes // 8, log.per_block, layout.record_words,
                segment * log.segment_blocks, generations, generation, log.head.first_life, ends,
                point.floor, slab.rows, stamps_R, slab.positions, slab.touched, layout.addresses,
                layout.widths, layout.by_row,
            )  # fmt: skip
        return bad

    wanted = np.flatnonzero(needed).tolist()
    if log.index.is_open:
        crew = Crew(_READERS, "emberkeep-tier-opening", clock=log.clock)
        try:
            list(crew.map(from_index, (wanted[i::_READERS] for i in range(_READERS))))
        finally:
            crew.shutdown()
    if not newest_head:
        wanted = [s for s in range(log.states.size) if not log.holds_head(s)]
    wanted = [segment for segment in wanted if segment not in indexed]
    threads = slab.pool.threads
    slab.pool.run([partial(from_file, wanted[i::threads]) for i in range(threads)])
    return Scanned(max(log.head.first_life, min(oldest)), max(newest), indexed, read)


def _needed(log: RowLog) -> Bools:
    """The segments whose blocks must all be there."""
    needed = np.zeros(log.states.size, np.bool_)
    try:
        needed[: log.head.segments] = ~unpack_bits(log.head.free, log.head.segments)
    except ValueError as error:
        raise DamageError(
            f"{log.path} does not say which segments are free: {error}", name=log.path
        ) from error
    for area in log.head.areas:
        needed[list(area)] = False
    return needed


def _holds(log: RowLog, segment: int, entry: Entry, block: _Blocks) -> bool:
    """Whether the first and the last block of an entry are in the file."""
    last = entry.counts.size - 1
    for place, digest in ((0, entry.first), (last, entry.last)):
        block.read(segment, place)
        said = block.generations[0], block.sequences[0], block.lives[0], block.words[0]
        if said != (entry.generation, entry.sequence + place, entry.life, digest):
            return False
        if block.words[1] & kernels.LOW != entry.counts[place]:
            return False
    return True


def _lost(log: RowLog, blocks: _Blocks, generation: int, lives: Lives) -> int:
    """Blocks of a segment that are not there: it is filled from its start by one life, and what
    that life had synced must be there."""
    whole = blocks.generations == generation
    there = np.flatnonzero(whole & (blocks.sequences >= 0))
    if not there.size:
        return int(whole.size)
    first = int(there[0])
    life = int(blocks.lives[first]) - log.head.first_life
    ended = lives[life][1] if 0 <= life < len(lives) else -1
    expected = blocks.sequences[first] - first + np.arange(whole.size)
    return int((~whole & (expected <= ended)).sum())


def _damage(log: RowLog, segment: int, lost: int, what: str) -> DamageError:
    return DamageError(
        f"{log.path}, segment {segment}: {lost} blocks that were durable are damaged; {what}. "
        "Check the disk, and restore a version of a repository into a new tier",
        name=log.path,
    )


@contextmanager
def reading(log: RowLog, segment: int) -> Iterator[None]:
    """A segment is read whole in the body, for nobody who waits for it: where the disk cannot, the
    segment is damaged. A lack of memory says nothing of it."""
    try:
        with log.using():
            yield
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise _damage(log, segment, log.segment_blocks, f"{error}; {_LEFT}") from error


def look_at(log: RowLog, segment: int) -> Noted | None:
    """Checks a segment that an earlier life has filled as opening does, if it reads it.

    Raises `DamageError` if something of it is lost or cannot be read. Returns what the index is to
    say of it: all its blocks up to the end of that life. The caller has started reading.
    """
    blocks = _Blocks(log, log.segment_blocks)
    with reading(log, segment):
        blocks.read(segment)
    generation, lives = int(log.generations[segment]), log.head.lives
    lost = _lost(log, blocks, generation, lives)
    if lost:
        raise _damage(log, segment, lost, _LEFT)
    if blocks.generations[0] != generation:
        return None
    first, life = int(blocks.sequences[0]), int(blocks.lives[0])
    count = min(log.segment_blocks, lives[life - log.head.first_life][1] - first + 1)
    noted = log.index.blank(segment, generation, life, first, count)
    log.index.note_in(noted, blocks.words[: count * log.block_nbytes // 8], 0)
    return noted

"""The index beside a tier's file: what its segments hold, so that a restart need not read them.

It is a hint and nothing more. An entry counts only if it is whole, of this file and this layout,
and if the first and the last block that it speaks of are in the file as it says, to the checksum,
and no block that counts comes after them; whatever else there is, the segment itself is read. So
nobody waits for the index to be on the medium, an error of it fails nothing, and it may be removed,
or left behind, at any time.

Each segment has a place of its own, number times `place_nbytes`, which is written in place once
all blocks of a use of the segment are in the file; a torn write is no entry. So the index stays in
proportion to the file, and places that were never written take no space.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import xxhash

from emberkeep._types import U8, U64
from emberkeep.blobs.system_disk import Disk
from emberkeep.kernels import log_index as kernels
from emberkeep.runtime.system_calls import read_at
from emberkeep.tiers.record_layout import BLOCK, Layout, aligned, bytes_of

_MAGIC = int.from_bytes(b"EMBRIDX1", "little")
_HEAD = 13  # words of an entry before its counts
_LOW = 2**32 - 1
# Entries that wait for upkeep; what comes beyond has none in this life.
_MOST_READY = 16
# Segments that opening has not read are read one by one: first after so many seconds, and then as
# often that this takes 100 MB a second of the disk, with segments of 4 MiB.
_FIRST_LOOK, _PAUSE = 10.0, 0.04


def index_path(path: str) -> str:
    """Where the index of a file of rows is."""
    return os.path.splitext(path)[0] + ".index"


@dataclass(slots=True, eq=False)
class Noted:
    """One use of a segment, of which so many blocks were noted: what an entry is made of."""

    segment: int
    generation: int
    life: int
    sequence: int
    """Of its first block; the others follow."""
    blocks: int
    counts: U8
    heads: U64
    planes: U8
    first: int = 0
    """The checksum of its first block."""
    last: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What the index says of a segment: the records of its first `counts.size` blocks, in order."""

    generation: int
    life: int
    sequence: int
    first: int
    last: int
    lowest: int
    counts: U8
    codes: U64
    planes: U8


class SegmentIndex:
    """The index of the file at `path`. The slab's lock covers every method but `note`, `write`,
    `distrust` and those of opening."""

    def __init__(
        self, path: str, salt: np.uint64, layout: Layout, per_block: int, segment_blocks: int,
        disk: Disk, *, direct: bool,
    ) -> None:  # fmt: skip
        self.path = index_path(path)
        self.ready: list[Noted] = []
        """Segments that are in the file, to be written by upkeep."""
        self.unchecked: set[int] = set()
        """Segments that came from the index and were not read yet."""
        self.missing: set[int] = set()
        """Segments that opening has read because they have no entry."""
        self.due = 0.0
        self._of, self._salt, self._layout = path, int(salt), layout
        self._per_block, self._segment_blocks = per_block, segment_blocks
        self._width = int(layout.widths[layout.by_row].sum())
        slots = segment_blocks * per_block
        nbytes = 8 * (_HEAD + -(-segment_blocks // 8) + slots + -(-slots * self._width // 8))
        self.place_nbytes = -(-nbytes // BLOCK) * BLOCK
        self._disk, self._direct = disk, direct
        self._handle = -1
        self._given_up = False
        self._noted: dict[int, Noted] = {}
        self._writing = threading.Lock()

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(handle)

    # -- opening ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Opens the index if there is one, so that `find` may find something."""
        if self._given_up:
            return
        try:
            self._handle = self._disk.open(self.path, direct=self._direct)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._give_up(error)

    @property
    def is_open(self) -> bool:
        """Whether there is one that counts."""
        return self._handle >= 0 and not self._given_up

    def find(self, segment: int, words: U64) -> Entry | None:
        """What the index says of a segment, if that is whole; read to `words`, which are
        `place_nbytes` long. Safe to call from several threads."""
        view, offset = bytes_of(words), segment * self.place_nbytes
        try:
            while view:
                got = read_at(self._handle, view, offset)
                if not got:
                    break
                view, offset = view[got:], offset + got
        except OSError:
            return None
        there = self.place_nbytes - len(view)
        return self._decode(segment, words[: there // 8])

    def _decode(self, segment: int, words: U64) -> Entry | None:
        if words.size < _HEAD:
            return None
        magic, digest, *given = (int(word) for word in words[:_HEAD])
        *said, generation, life, sequence, first, last, lowest, blocks, records = given
        if magic != _MAGIC or said != [segment, self._layout.record_words, self._width]:
            return None
        if not 0 < blocks <= self._segment_blocks or not 0 < records <= blocks * self._per_block:
            return None
        codes_at, planes_at, end = self._parts(blocks, records)
        if end > words.size or digest != self._digest(words[:end]):
            return None
        octets = words.view(np.uint8)
        counts = octets[8 * _HEAD : 8 * _HEAD + blocks]
        if counts.max() > self._per_block or int(counts.sum(dtype=np.int64)) != records:
            return None
        planes = octets[8 * planes_at : 8 * planes_at + records * self._width]
        return Entry(
            generation, life, sequence, first, last, lowest, counts, words[codes_at:planes_at],
            planes.reshape(records, self._width),
        )  # fmt: skip

    def _parts(self, blocks: int, records: int) -> tuple[int, int, int]:
        """The words at which records begin, their planes by row, and what comes after."""
        codes = _HEAD + -(-blocks // 8)
        planes = codes + records
        return codes, planes, planes + -(-records * self._width // 8)

    def _digest(self, words: U64) -> int:
        return xxhash.xxh3_64_intdigest(bytes_of(words)[16:], seed=self._salt)

    # -- while blocks are written ----------------------------------------------------------------

    def begin(self, segment: int, generation: int, life: int, sequence: int) -> None:
        """Records go to that segment from now on, its first block under that sequence number."""
        if not self._given_up:
            with contextlib.suppress(MemoryError):
                blocks = self._segment_blocks
                self._noted[segment] = self.blank(segment, generation, life, sequence, blocks)

    def blank(self, segment: int, generation: int, life: int, sequence: int, blocks: int) -> Noted:
        """A use of a segment of which nothing is noted yet."""
        slots = blocks * self._per_block
        return Noted(
            segment, generation, life, sequence, blocks, np.zeros(blocks, np.uint8),
            np.zeros((slots, 2), np.uint64), np.zeros((slots, self._width), np.uint8),
        )  # fmt: skip

    def note(self, segment: int, words: U64, block: int) -> None:
        """Notes sealed blocks, the first of which is block `block` of its segment."""
        noted = self._noted.get(segment)
        if noted is not None:
            self.note_in(noted, words, block)

    def note_in(self, noted: Noted, words: U64, block: int) -> None:
        """The same for a use of a segment that `blank` has made."""
        layout, block_words = self._layout, self._layout.block_nbytes // 8
        blocks = words.size // block_words
        kernels.note_records(
            words, block_words, self._per_block, layout.record_words, blocks, block,
            layout.widths, layout.by_row, noted.counts, noted.heads, noted.planes,
        )  # fmt: skip
        if block == 0:
            noted.first = int(words[0])
        if block + blocks == noted.blocks:
            noted.last = int(words[(blocks - 1) * block_words])

    def written(self, segment: int, words: U64) -> None:
        """Blocks of a segment, which were noted, are in the file."""
        noted = self._noted.get(segment)
        if noted is None:
            return
        noted.written += words.nbytes // self._layout.block_nbytes
        if noted.written == noted.blocks:
            self._noted.pop(segment, None)  # it may just have been given up
            self.ready.append(noted)
            del self.ready[:-_MOST_READY]

    def forget(self, segment: int) -> None:
        """None of its records is needed any more."""
        self._noted.pop(segment, None)
        self.looked_at(segment)

    def write(self, noted: Noted) -> None:
        """Writes the entry of a segment, all of whose blocks are in the file. An error of the disk
        is a warning, once: the index says nothing new in this life."""
        with self._writing:
            if self._given_up:
                return
            try:
                words = self._encode(noted)
                if words is None:
                    return
                if self._handle < 0:
                    self._handle = self._open()
                offset = noted.segment * self.place_nbytes
                self._disk.write_at(self._handle, bytes_of(words), offset)
            except MemoryError:
                pass  # this one has no entry
            except OSError as error:
                self._give_up(error)

    def distrust(self) -> None:
        """The file is known to be damaged: the next opening is to read all of it, and to say so.
        It would else come back with the damage, over and over."""
        with self._writing:
            self._given_up = True
            try:
                self._disk.unlink(self.path)
                self._disk.sync_directory(os.path.dirname(self.path))
            except FileNotFoundError:
                pass
            except OSError:
                with contextlib.suppress(OSError):
                    self._disk.empty(self.path)

    def _open(self) -> int:
        """The index, made if there is none; whatever is in it already harms nobody."""
        try:
            return self._disk.open(self.path, direct=self._direct)
        except FileNotFoundError:
            self._disk.close(self._disk.create(self.path))
            return self._disk.open(self.path, direct=self._direct)

    def _encode(self, noted: Noted) -> U64 | None:
        taken = np.arange(self._per_block) < noted.counts[:, None]
        heads = noted.heads.reshape(noted.blocks, self._per_block, 2)[taken]
        codes, stamps = heads[:, 0], heads[:, 1]
        lowest = int(stamps.min())
        if int(stamps.max()) - lowest > _LOW:
            return None  # two records of one segment are four billion writes from each other
        codes_at, planes_at, end = self._parts(noted.blocks, codes.size)
        words = aligned(-(-8 * end // BLOCK) * BLOCK)
        words[:_HEAD] = [
            _MAGIC, 0, noted.segment, self._layout.record_words, self._width, noted.generation,
            noted.life, noted.sequence, noted.first, noted.last, lowest, noted.blocks, codes.size,
        ]  # fmt: skip
        octets = words.view(np.uint8)
        octets[8 * _HEAD : 8 * _HEAD + noted.blocks] = noted.counts
        words[codes_at:planes_at] = codes | (stamps - np.uint64(lowest)) << np.uint64(32)
        planes = noted.planes.reshape(noted.blocks, self._per_block, self._width)[taken]
        octets[8 * planes_at : 8 * planes_at + planes.size] = planes.ravel()
        words[1] = self._digest(words[:end])
        return words

    def _give_up(self, error: OSError) -> None:
        self._given_up = True
        self._noted.clear()
        self.missing.clear()
        with contextlib.suppress(RuntimeWarning):  # nor does it end anything as an error
            warnings.warn(
                f"{self.path} cannot be used: {error.strerror}. No row is concerned: it only makes "
                f"restarts faster, and the next one reads all of {self._of}; look at the disk",
                RuntimeWarning,
                stacklevel=2,
            )

    # -- what opening has not read ---------------------------------------------------------------

    def opened(self, unchecked: set[int], missing: set[int], now: float) -> None:
        """Some segments came from the index, others were read and are to have an entry."""
        self.unchecked = unchecked
        self.missing = set() if self._given_up else missing
        self.postpone(now)

    def next_look(self, now: float) -> int | None:
        """A segment to look at now, if it is time and there is one."""
        if self._given_up:
            self.missing.clear()  # they get no entries
        if now < self.due or not (waiting := self.unchecked or self.missing):
            return None
        self.due = now + _PAUSE
        return next(iter(waiting))

    def awaits_look(self, segment: int) -> bool:
        """Whether it has rows and is still to be looked at."""
        return segment in self.unchecked or segment in self.missing

    def looked_at(self, segment: int) -> None:
        """It need not be looked at any more."""
        self.unchecked.discard(segment)
        self.missing.discard(segment)

    def rest(self, now: float) -> float | None:
        """Seconds until the next look; None if there is nothing to look at."""
        return max(_PAUSE, self.due - now) if self.unchecked or self.missing else None

    def postpone(self, now: float) -> None:
        """There is something else to care about."""
        self.due = now + _FIRST_LOOK


def remove(path: str, disk: Disk) -> None:
    """Removes the index of a file of rows that starts over; one that stays harms nobody."""
    with contextlib.suppress(OSError):
        disk.unlink(index_path(path))

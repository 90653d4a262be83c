"""What a tiered slab does between pulls and pushes: evict, save, clean, and look through what
opening has not read.

Each round does a little of each under a short lock and writes without it, so that a pull never
waits for longer than a slice.
"""

from __future__ import annotations

import contextlib
import warnings
from concurrent.futures import InvalidStateError

import numpy as np

from emberkeep.errors import DamageError, EmberkeepError
from emberkeep.kernels import batch_rows
from emberkeep.kernels import log_records as kernels
from emberkeep.tiers.durable_scan import look_at, reading
from emberkeep.tiers.log import Extent
from emberkeep.tiers.record_layout import aligned
from emberkeep.tiers.superblock import Point
from emberkeep.tiers.tiered_slab import TieredSlab

# Frames that are copied under one holding of the lock.
_FRAMES = 2048


def run(slab: TieredSlab) -> bool:
    """One round; whether there is more to do."""
    try:
        more = _write_waiting(slab)
        more = _evict(slab) or more
        more = _save(slab) or more
        _write_index(slab)
        more = _clean(slab) or more
        if not more:
            _look(slab)
        return more
    except EmberkeepError as error:
        # A file that cannot grow or has failed: the next call that needs room
        # raises it. A checkpoint under way is given up, but never half of one declared whole.
        slab.log.index.postpone(slab.log.clock.monotonic())
        saving = slab.saving
        if saving is not None and not saving.prepared.done():
            with contextlib.suppress(InvalidStateError):  # given up this very moment
                # Which is kept, and holds on to no rows.
                saving.prepared.set_exception(error.with_traceback(None))
            slab.abandon(saving)
        return False


def _write_waiting(slab: TieredSlab) -> bool:
    if not slab.flushes.waiting:
        return False
    with slab.lock:
        waiting, slab.flushes.waiting = slab.flushes.waiting, []
    for extent in waiting:
        slab.log.write(extent)
    with slab.lock:
        for extent in waiting:
            slab.log.written(extent)
    return False


def _evict(slab: TieredSlab) -> bool:
    """Frees frames ahead of the next batch's misses, those of the least worth first."""
    if slab.reserve <= slab.frames.free:
        return False
    with slab.lock:
        frames = slab.frames
        short = slab.reserve - frames.free
        if short <= 0:
            return False
        # What this batch or the next has pulled stays.
        victims = frames.least(min(short, _FRAMES), frames.turn - 1)
        if not victims.size:
            return False
        flush = slab.flushes.begin(victims, evict=True)
    if flush is not None:
        slab.flushes.write(flush)
        with slab.lock:
            slab.flushes.settle(flush)
    return True


def _save(slab: TieredSlab) -> bool:
    """A slice of the checkpoint under way; the last one makes it durable."""
    if slab.saving is None:
        return False
    with slab.lock:
        saving, frames = slab.saving, slab.frames
        if saving is None or saving.prepared.done():
            return False
        word, found = saving.word, 0
        while word < frames.frozen.size and found < _FRAMES:
            stop = min(frames.frozen.size, word + _FRAMES // 64)
            found += batch_rows.count_bits(frames.frozen, word, stop)
            word = stop
        listed = np.empty(found, np.int64)
        batch_rows.list_bits(frames.frozen, saving.word, word, listed)
        saving.word = word
        flush = slab.flushes.begin(listed, evict=False)
        last = word == frames.frozen.size
    if flush is not None:
        slab.flushes.write(flush)
        with slab.lock:
            slab.flushes.settle(flush)
    if not last:
        return True
    with slab.lock:
        # Nothing that was appended before this point is still in memory alone.
        slab.flushes.write_waiting()
        slab.log.check_whole()
        point = Point(
            batch=saving.batch, stamp=saving.stamp, sequence=slab.log.sequence - 1,
            rows=saving.rows, floor=saving.floor, tables=saving.tables, nonce=saving.nonce,
            home=saving.home, run=saving.run,
        )  # fmt: skip
        slab.log.reserve_head(prepared=point, **slab.log.free_now())
        free, unlisted = slab.log.free_segments(), slab.log.unlisted()
    prepared = slab.log.prepare(point, free, lambda: slab.saving is saving)
    with slab.lock:
        if prepared:
            slab.log.use_again(unlisted)
        if slab.saving is saving:
            with contextlib.suppress(InvalidStateError):  # closed this very moment
                saving.prepared.set_result(point)
    return False


def _write_index(slab: TieredSlab) -> None:
    """Tells the index of segments that are full and in the file; it fails nothing."""
    index = slab.log.index
    if not index.ready:
        return
    with slab.lock:
        ready, index.ready = index.ready, []
    with slab.log.using():
        for noted in ready:
            index.write(noted)


def _look(slab: TieredSlab) -> None:
    """Checks one of the segments that opening has not read, or writes the entry of one that had
    none, if it is time for one. Damage is reported, and left where it is."""
    log = slab.log
    with slab.lock:
        segment = log.index.next_look(log.clock.monotonic())
        if segment is None:
            return
        turn = log.begin_reading()
        missing = segment in log.index.missing
    looked = True
    try:
        noted = look_at(log, segment)
        if missing and noted is not None:
            with log.using():
                log.index.write(noted)
    except DamageError as error:
        with slab.lock:
            needed = log.index.awaits_look(segment)  # its rows may have died meanwhile
            if needed:
                log.set_aside(segment, error)
        if needed:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    except (MemoryError, OSError):  # nobody waits for it: no memory now is no reason to end
        looked = False
    finally:
        with slab.lock:
            if looked:
                log.index.looked_at(segment)
            else:
                log.index.postpone(log.clock.monotonic())
            log.end_reading(turn)


def _clean(slab: TieredSlab) -> bool:
    """Moves the rows of one segment that is mostly dead, so that it can be used again.

    One that is damaged is left where it is, and reported.
    """
    log = slab.log
    if not log.changed:
        return False
    with slab.lock:
        segment = log.reconsider()
        if segment is None:
            return False
        turn = log.begin_reading()
    try:
        try:
            words = aligned(log.segment_blocks * log.block_nbytes)
            with reading(log, segment):
                log.read_segment(segment, words)
        except (MemoryError, OSError):  # no memory: a later round tries again
            return False
        moved = _move(slab, segment, words)
    except DamageError as error:
        log.set_aside(segment, error)
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return True
    finally:
        with slab.lock:
            log.end_reading(turn)
    for extent, _, _ in moved:
        log.write(extent)
    if log.horizon is not None and moved:
        log.sync()  # the copies are durable before the originals may be overwritten
    with slab.lock:
        for extent, found, before in moved:
            log.written(extent)
            first = extent.first(log.per_block)
            still = slab.positions[found] == before
            # Rows that were written meanwhile have newer records: their copies are dead at once.
            log.live[extent.segment] -= int((~still).sum())
            log.live[segment] -= int(still.sum())
            slab.positions[found[still]] = first + 1 + np.flatnonzero(still)
        log.release_dead()
    return True


def _move(
    slab: TieredSlab, segment: int, words: np.ndarray
) -> list[tuple[Extent, np.ndarray, np.ndarray]]:
    """Copies the newest records of a segment to the end of the log, in memory so far.

    The copies are sealed again, so their blocks are checked before: damage that was moved would
    look like rows.
    """
    log = slab.log
    block_words, record_words = log.block_nbytes // 8, log.layout.record_words
    first_block = segment * log.segment_blocks
    generations = np.empty(log.segment_blocks, np.int64)
    sequences = np.empty(log.segment_blocks, np.int64)
    kernels.check_blocks(
        words, block_words, log.per_block, first_block, log.salt, generations, sequences
    )
    moved = []
    with slab.lock:
        found, sources = np.empty(log.slots, np.int64), np.empty(log.slots, np.int64)
        count = kernels.list_live(
            words, block_words, log.per_block, record_words, first_block, generations,
            int(log.generations[segment]), slab.positions, found, sources,
        )  # fmt: skip
        needed = int(log.live[segment] - log.undecided[segment])
        if count != needed:
            raise DamageError(
                f"{log.path}, segment {segment}: {needed - count} records of rows are not what was "
                "written; nothing of them was used, and the segment is left where it is. No batch "
                "is declared durable with them: end this process, check the disk, and resume from "
                "the last durable batch or from a repository",
                name=log.path,
            )
        log.make_room(count)
        done = 0
        while done < count:
            extent = log.extend(count - done)
            part = slice(done, done + extent.records)
            kernels.move_records(
                extent.words, block_words, log.per_block, record_words, 0, words, sources[part]
            )
            moved.append((extent, found[part], slab.positions[found[part]].copy()))
            done += extent.records
    return moved

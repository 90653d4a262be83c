"""A slab whose rows live in a file, the hot ones in memory.

The planes of the slab are arrays of *frames*, as many as the memory allows; every kernel of the
engine acts on frames as it would on rows, so results are the same bits. Bitmaps stay one bit per
row. What a frame holds is the truth about its row; a row without a frame is the newest record
that the log has of it.

A push finds all its rows in frames: whatever must be read, and whatever must be written to make
room, is done by `fetch` (ahead of the pull, beside other work) and at the latest by `check_push`,
before any row changes. Upkeep runs in threads of its own between the calls; see `upkeep`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from emberkeep._types import F32, I64, U64, Json, Planes, RowIds
from emberkeep.errors import CancelledError, ConfigError, ShardLostError, TierError
from emberkeep.kernels import batch_rows, scatter
from emberkeep.kernels import log_records as kernels
from emberkeep.rows.push import Push
from emberkeep.rows.slab import Slab
from emberkeep.runtime.background import Worker
from emberkeep.runtime.memory import Values, lazy_zeros
from emberkeep.runtime.pool import ForkLock, Pool
from emberkeep.tables import Optimizer, Table
from emberkeep.tiers.flushes import Flushes
from emberkeep.tiers.frames import Frames
from emberkeep.tiers.loads import Loads
from emberkeep.tiers.log import RowLog
from emberkeep.tiers.reading import Reading
from emberkeep.tiers.record_layout import Layout, layout_of
from emberkeep.tiers.superblock import Point
from emberkeep.tiers.tier_use import TierStatus

# What a frame costs beside its planes.
_FRAME_NBYTES = 48
# Rows that are read or written at a time where there may be any number of them.
_SLICE = 16384
# Rows, or frames, that are cleared at a time.
_CLEAR_SLICE = 2**18


@dataclass(slots=True, eq=False)
class Saving:
    """A checkpoint under way: everything up to `stamp` goes to the log."""

    batch: int
    stamp: int
    rows: int
    tables: Json
    floor: int
    nonce: str
    home: str
    run: str
    pushes: Mapping[str, int]
    word: int = 0
    prepared: Future[Point] = field(default_factory=Future)


class TieredSlab(Slab):
    """The rows of some tables on one shard, behind a cache: its `share` of the tier's `memory`.

    `batch` is the last durable batch of its file. `upkeep` does
    a round of it and says whether there is more to do. Make it with `durable_open.open_slab`.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer,
        *,
        memory: int,
        share: Fraction,
        open_log: Callable[[Layout], RowLog],
        upkeep: Callable[[TieredSlab], bool],
        shard: int = 0,
        shards: int = 1,
        seed: int = 0,
        pool: Pool,
        lock: ForkLock | None = None,
    ) -> None:
        self._memory, self._share = memory, share
        super().__init__(
            tables, optimizer, shard=shard, shards=shards, seed=seed, pool=pool, lock=lock
        )
        self.saves_with_update = False
        self.frames = self._new_frames(self.planes["weight"].shape[0])
        self.positions = lazy_zeros((self.rows,), np.uint32)  # of the newest record, plus one
        framed = [plane for name, plane in self.planes.items() if name != "used"]
        by_row = [self.ids] if self.slots else []
        if "used" in self.planes:
            by_row.append(self.planes["used"])
        self.log = open_log(layout_of(framed, by_row))
        self.loads = Loads(self.frames, self.positions, self.log, self.lock)
        self.flushes = Flushes(self.frames, self.positions, self.log)
        self.stamp = 0
        self.floor = 0
        self.trained = 0  # rows that are touched
        self.pushed = 0  # rows that were pushed, one push after the other
        self.waits = 0
        self.pulled = 0  # rows that were pulled
        self.missed = 0  # of these, what was read for them
        self._waited = 0.0
        self.saving: Saving | None = None
        self.given_up: Saving | None = None  # the last that was: it knows why
        self.reserve = 0
        self._lacking = 0
        self._fetched = False
        self._gone: list[I64] = []
        self.batch: int | None = None
        self._upkeep_round = upkeep
        # Not repeated: after an error nobody knows what the file holds.
        self._upkeep = Worker(
            "emberkeep-tier-upkeep", self._keep_up, nice=5, on_error=self.fail, clock=self.log.clock
        )

    def _new_frames(self, count: int) -> Frames:
        return Frames(count, self.rows)

    @property
    def direct(self) -> bool:
        return False

    def drop(self, lost: ShardLostError) -> None:
        try:
            self._let_go()
        finally:  # also where its disk hangs
            super().drop(lost)

    def close(self) -> None:
        """Lets the file go; what is not durable is lost. Raises what ended the work beside it."""
        self._let_go()
        error = self._upkeep.error or self.loads.error
        if error is not None:
            raise TierError(
                f"{self.log.path}: the work beside training had ended with "
                f"{str(error) or type(error).__name__}; what was durable before is safe: resume "
                "from it"
            ) from error

    def _let_go(self) -> None:
        self.loads.stop()
        self._upkeep.stop()
        self._give_up(TierError(f"{self.log.path} was closed"))
        self.log.close()

    def fail(self, error: BaseException) -> None:
        """Ends the slab: threads that wait fail now, all others at their next call."""
        self.log.fail(error)
        self.flushes.wake()
        self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        saving = self.saving
        if saving is not None:
            # It may be done this very moment, by upkeep.
            with contextlib.suppress(InvalidStateError):
                saving.prepared.set_exception(error)

    def status(self) -> TierStatus:
        """How the slab and its file are doing."""
        log = self.log
        return TierStatus(
            path=log.path, batch=self.batch, direct=log.direct, deep=self.loads.reads.deep,
            frames=self.frames.count, waits=self.waits, reads=log.reads, appended=log.appended,
            segments=log.states.size, damaged=log.damaged, pulled=self.pulled, missed=self.missed,
            wait_seconds=self._waited + self.loads.waited, unchecked=len(log.index.unchecked),
        )  # fmt: skip

    def _keep_up(self) -> float | None:
        more = self._upkeep_round(self)
        return 0 if more else self.log.index.rest(self.log.clock.monotonic())

    def _wake(self) -> None:
        """Has upkeep do a round, if it would find anything to do."""
        if (
            self.reserve > self.frames.free
            or self.saving is not None
            or self.flushes.waiting
            or self.log.changed
        ):
            self._upkeep.wake()

    # -- where rows stand ------------------------------------------------------------------------

    def _place_count(self) -> int:
        return max(1, min(self.rows, int(self._memory * self._share / self._frame_nbytes)))

    @property
    def _frame_nbytes(self) -> int:
        return _FRAME_NBYTES + 4 * (self.dim + sum(self.optimizer.planes(self.dim).values()))

    @property
    def _filled(self) -> U64:
        return self.frames.filled

    @property
    def _changed(self) -> U64:
        return self.frames.unsaved

    def _places(self, found: I64) -> I64:
        """Frames of rows that are about to be written whole or are in frames already."""
        frames = self.frames.of(found)
        new = np.flatnonzero(frames < 0)
        touched = np.empty(found.size, np.bool_)
        batch_rows.test_bits(self.touched, found, touched)
        self.trained += int(found.size - touched.sum())
        self.frames.reserved = 0
        if new.size:
            frames[new] = self.frames.bind(found[new])
        return frames

    def _after_write(self, found: I64, places: I64) -> None:
        self.stamp += 1
        self.frames.stamps[places] = self.stamp
        scatter.mark(0, found.size, found, self.touched, self.dirty)
        self.frames.hold(places[:0], 0)
        self._bury()
        self.log.keep_promise()
        self._wake()

    def _held_by(self, found: I64) -> Planes:
        planes = {
            name: np.empty((found.size, plane.shape[1]), plane.dtype)
            for name, plane in self.planes.items()
        }
        for start in range(0, found.size, _SLICE):
            part = slice(start, start + _SLICE)
            later = self.take(found[part], {name: v[part] for name, v in planes.items()})
            if later is not None:
                later()
        return planes

    beside_writers = False

    def source(self) -> TieredSlab:
        return self

    def take(self, wanted: I64, out: Planes, pool: Pool | None = None) -> Reading | None:
        """Copies rows out: those in frames at once, the others are read without the lock."""
        frames = np.empty(wanted.size, np.int64)
        missing = np.empty(wanted.size, np.int64)
        touched = self.touched
        count = kernels.translate(
            self.frames.frame_of, touched, wanted, 0, self.frames.used, frames, missing
        )
        self.loads.wait(frames[frames >= 0])
        for name, values in out.items():
            index = wanted if name == "used" else frames
            np.take(self.planes[name], index, axis=0, out=values, mode="clip")
        if not count:
            return None
        missing = missing[:count].copy()
        records = self.positions[wanted[missing]].astype(np.int64) - 1

        def read() -> None:
            names = [name for name in self.planes if name != "used"]
            held = {
                name: np.empty((count, self.planes[name].shape[1]), self.planes[name].dtype)
                for name in names
            }
            by_row = self.log.layout.arrays[len(names) :]
            layout = self.log.layout.onto((*held.values(), *by_row))
            self.loads.reads.read(
                records, wanted[missing], np.arange(count), np.empty(count, np.int64), layout
            )
            for name in out:
                if name != "used":
                    out[name][missing] = held[name]

        return Reading(read, self.log, self.lock)

    # -- reading ---------------------------------------------------------------------------------

    def pull(self, wanted: RowIds, out_UD: F32) -> None:
        """Weights from frames, and from the file where there is none; admits nothing."""
        found, _ = self.resolve(wanted)
        frames = np.empty(found.size, np.int64)
        missing = np.empty(found.size, np.int64)
        count = kernels.translate(
            self.frames.frame_of, self.touched, found, 0, self.frames.used, frames, missing
        )
        self.loads.wait(frames[frames >= 0])
        self._pull(wanted, frames, out_UD)
        self.pulled += found.size
        self.missed += count
        if count:
            missing = missing[:count]
            for start in range(0, count, _SLICE):
                part = missing[start : start + _SLICE]
                weight = np.empty((part.size, self.dim), np.float32)
                later = self.take(found[part], {"weight": weight})
                assert later is not None
                later()
                out_UD[part] = weight

    def fetch(self, wanted: RowIds, *, ahead: bool = False) -> None:
        """Brings rows that will be pulled and pushed to frames. Called without the lock.

        With `ahead` it returns at once: rows are read in the background, as many as there are
        frames free for them. Without, all are there when it returns.
        """
        with self.lock:
            found, _ = self.resolve(wanted)
            self._fetched = True
            self.frames.turn += 1
            frames, missing = self._look(found[found >= 0], self.frames.turn)
            # Rows that were never trained, and ids that are new, need frames too.
            lacking = wanted.ids.size - int((frames >= 0).sum())
            self._lacking = max(lacking, self._lacking * 9 // 10)
            self.reserve = min(self._lacking * 5 // 4 + 64, self.frames.count // 4)
            if ahead:
                missing = missing[: max(0, self.frames.free)]
            else:
                self._make_free(missing.size, self.frames.turn)
                missing = missing[: max(0, self.frames.free)]  # the push tells of what does not fit
            load = self.loads.begin(missing) if missing.size else None
            self.missed += missing.size
            if ahead:
                if load is not None:  # first: whatever becomes of the thread, somebody has it
                    self.loads.leave(load)
                self._wake()
                return
        start = self.log.clock.monotonic()
        if load is not None:
            self.loads.perform(load)
        with self.lock:
            if load is not None:
                self._waited += self.log.clock.monotonic() - start
                self.loads.settle(load)
            self.loads.wait(frames[frames >= 0])
        self._wake()

    def _look(self, found: I64, turn: int) -> tuple[I64, I64]:
        """The frames of rows, and the touched rows that have none."""
        frames = np.empty(found.size, np.int64)
        missing = np.empty(found.size, np.int64)
        count = kernels.translate(
            self.frames.frame_of, self.touched, found, turn, self.frames.used, frames, missing
        )
        if turn:
            self.frames.touch(frames[frames >= 0], turn)
        return frames, found[missing[:count]]

    # -- writing ---------------------------------------------------------------------------------

    def check_push(self, wanted: RowIds, grads_UD: F32, *, finite: bool = False) -> Push:
        push = super().check_push(wanted, grads_UD, finite=finite)
        self._hold(push.rows[push.rows >= 0], sum(push.unknown_T))
        self.pushed += push.rows.size
        return push

    def _hold(self, found: I64, new: int, *, whole: bool = False) -> None:
        """Makes room for a write of rows, and reads those that it needs; nothing can fail then.

        `whole` says that rows are overwritten, so that old ones need not be read.
        """
        self.log.keep_promise()  # of one that was let go
        # The pull of this batch has noted what was used: its push does not do so again.
        turn = 0 if self._fetched else self.frames.turn + 1
        self.frames.turn += not self._fetched
        self._fetched = False
        frames, missing = self._look(found, turn)
        needed = found.size + new
        if needed > self.frames.count:
            # The tier's memory grows for all its slabs alike. Rounded up, so that it is enough.
            enough = Fraction(21, 20) * needed * self._frame_nbytes / self._share
            raise ConfigError(
                f"a batch of {needed} rows on shard {self.shard} does not fit its cache of "
                f"{self.frames.count}: raise memory= of the tier to "
                f"{math.ceil(enough * 10 / 2**20) / 10:.1f} MiB or more; no row was changed"
            )
        self.loads.wait(frames[frames >= 0], needed=not whole)
        if whole:  # what could not be read has no frame any more
            frames = self.frames.of(found)
        held = frames[frames >= 0]
        self.frames.hold(held, 0)
        self._make_free(needed - held.size, self.frames.turn + 1)
        # Copies for a checkpoint under way, also of rows that new ones evict; those of a table go
        # one piece at a time.
        self.log.promise(found.size + new, 8 + 4 * len(self.slots) + new // _SLICE)
        if missing.size and not whole:
            start = self.log.clock.monotonic()
            load = self.loads.begin(missing)
            self.missed += missing.size
            self.loads.perform(load)
            self._waited += self.log.clock.monotonic() - start
            self.loads.settle(load)
            held = np.concatenate([held, load.frames])
        self.frames.hold(held, needed - held.size)

    def _make_free(self, count: int, before: int) -> None:
        """Frees frames in the calling thread, which upkeep should have done ahead of it.

        Fewer only where the others were used in turn `before` or later, or are held.
        """
        if self.frames.free >= count:
            return
        start = self.log.clock.monotonic()
        try:
            self._evict_for(count, before)
        finally:
            self._waited += self.log.clock.monotonic() - start

    def _evict_for(self, count: int, before: int) -> None:
        while self.frames.free < count:
            self.waits += 1
            short = count - self.frames.free
            victims = self.frames.least(short, before)
            if victims.size:
                flush = self.flushes.begin(victims, evict=True)
                if flush is not None:
                    self.flushes.write(flush)
                    self.flushes.settle(flush)
            elif not (self.flushes.finish_one() or self.loads.finish_one()):
                return

    def _before_write(self, written: I64) -> None:
        super()._before_write(written)
        if self.saving is None or not written.size:
            return
        frames = self.frames.of(written)
        frames = frames[frames >= 0]
        frozen = frames[self.frames.are(self.frames.frozen, frames)]
        if frozen.size:
            found, stamps = self.frames.row_of[frozen], self.frames.stamps[frozen]
            self.flushes.append_later(found, frozen, stamps, deleted=False)
            batch_rows.clear_bits(self.frames.frozen, frozen)

    def _remove(self, table: int, ids: I64, found: I64) -> None:
        frames = self.frames.of(found)
        self.loads.wait(frames[frames >= 0], needed=False)
        super()._remove(table, ids, found)
        frames = self.frames.of(found)  # of what could not be read there is none any more
        self.frames.unbind(frames[frames >= 0])
        self.trained -= found.size
        self._gone.append(found)

    def _bury(self) -> None:
        """Rows that were deleted and have records get one that says so."""
        if not self._gone:
            return
        gone, self._gone = np.unique(np.concatenate(self._gone)), []
        back = np.empty(gone.size, np.bool_)
        batch_rows.test_bits(self.touched, gone, back)
        gone = gone[~back & (self.positions[gone] > 0)]
        for start in range(0, gone.size, _SLICE):
            part = gone[start : start + _SLICE]
            stamps = np.full(part.size, self.stamp, np.int64)
            self.flushes.append_later(part, part, stamps, deleted=True)

    def delete(self, table: int, ids: I64) -> int:
        # Copies for a checkpoint under way, and records that rows are gone.
        self.log.make_room(2 * ids.size, 8 + ids.size // _SLICE)
        count = super().delete(table, ids)
        self.stamp += 1
        self._bury()
        return count

    def install(self, wanted: RowIds, planes: Mapping[str, Values], *, busy: int = 0) -> None:
        self._check_install(wanted, planes)
        most = max(1, min(_SLICE, self.frames.count))
        for start in range(0, wanted.ids.size, most):
            part = wanted.part(start, start + most)
            found, unknown = self.resolve(part)
            self._hold(found[found >= 0], sum(unknown), whole=True)
            some = slice(start, start + most)
            super().install(part, {name: v[some] for name, v in planes.items()}, busy=busy)

    def clear(self) -> None:
        """Takes every row back to its initial state, in slices: what it needs beside the rows is
        the same for any number of them."""
        while self.loads.finish_one():
            pass
        self.log.keep_promise()
        frames, frozen = self.frames, self.frames.frozen
        if copies := int(batch_rows.count_bits(frozen, 0, frozen.size)):
            self.log.make_room(copies, 8 + frames.count // _CLEAR_SLICE)
        self.stamp += 1
        self.floor = self.stamp
        frames.hold(np.empty(0, np.int64), 0)
        for start in range(0, frames.count, _CLEAR_SLICE):
            bound = start + np.flatnonzero(frames.row_of[start : start + _CLEAR_SLICE] >= 0)
            self._before_write(frames.row_of[bound])
            frames.unbind(bound)
        for start in range(0, self.rows, _CLEAR_SLICE):
            part = self.positions[start : start + _CLEAR_SLICE]
            held = np.flatnonzero(part)  # pages that were never written stay so
            stamps = np.full(held.size, self.stamp, np.int64)
            self.log.supersede(part[held].astype(np.int64) - 1, stamps)
            part[held] = 0
        if self.saving is None:
            self.log.clear()
        self._gone, self.trained = [], 0
        super().clear()

    # -- checkpoints -----------------------------------------------------------------------------

    def checkpoint(
        self, batch: int, tables: Json, nonce: str, home: str = "", run: str = "",
        pushes: Mapping[str, int] | None = None,
    ) -> Future[Point]:  # fmt: skip
        """Declares the rows as they are now to be those of `batch`. Returns at once.

        The future is done when they are in the file, durably; `commit` makes them the batch to
        come back to. `nonce` names the decision about it, which is the same for all files, and
        `home` leads to where it stands, for the files of a `run` on servers to its store; see
        `decisions`. `pushes` are those that the rows hold, the last of each worker.
        """
        with self.lock:
            self.log.check()
            self.log.check_whole()
            self.log.check_recorded()
            if self.saving is not None:
                raise AssertionError("a slab has one checkpoint under way at a time")
            frames = self.frames
            frames.frozen |= frames.unsaved
            frames.unsaved = np.zeros_like(frames.unsaved)
            self.log.begin_batch(self.stamp)
            self.saving = Saving(
                batch, self.stamp, self.trained, tables, self.floor, nonce, home, run, pushes or {}
            )
            saving = self.saving
        self._wake()
        return saving.prepared

    @property
    def unchanged(self) -> bool:
        """Whether no row was written since the durable batch, or there is none."""
        with self.lock:
            committed = self.log.head.committed
            return self.stamp == (0 if committed is None else committed.stamp)

    def commit(self, nonce: str) -> bool:
        """Makes a batch the one to come back to, durably, if it is the prepared one; whether it
        was. What is prepared or under way by then under another nonce stays as it is."""
        if not self.log.commit(nonce):
            return False
        with self.lock:
            assert self.log.head.committed is not None
            self.batch = self.log.head.committed.batch
            if self.saving is not None and self.saving.nonce == nonce:
                self.saving = None
            self.log.decide()
            self.log.release_dead()
        self._wake()
        return True

    def abandon(self, only: Saving | None = None) -> None:
        """Gives up the checkpoint under way, if there is one; its rows wait for the next. With
        `only`, if it is that one. Who looks for it without the lock finds it in `saving` or then
        in `given_up`."""
        with self.lock:
            if only is not None and self.saving is not only:
                return
            saving = self.saving
            self.given_up = saving or self.given_up
            self.saving = None
            self.frames.unsaved |= self.frames.frozen
            self.frames.frozen = np.zeros_like(self.frames.frozen)
        if saving is not None:
            with contextlib.suppress(InvalidStateError):
                saving.prepared.set_exception(CancelledError(f"batch {saving.batch} was given up"))

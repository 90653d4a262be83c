"""Rows on their way from the log to frames, at once or ahead of the batch that needs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from emberkeep._types import I64, U32
from emberkeep.kernels import batch_rows as bits
from emberkeep.runtime.background import Worker
from emberkeep.runtime.clock import Event
from emberkeep.runtime.pool import ForkLock
from emberkeep.tiers.frames import LOADING, Frames
from emberkeep.tiers.log import PATIENCE, RowLog
from emberkeep.tiers.reads import Reads


@dataclass(slots=True, eq=False)
class Load:
    """Rows on their way from the log to frames."""

    records: I64
    rows: I64
    frames: I64
    turn: int | None
    done: Event
    error: BaseException | None = None
    settled: bool = False


class Loads:
    """The loads of one slab. Its lock covers every method but `perform`.

    A frame that is being loaded is looked at by nobody: a thread that needs it waits for it, for
    `waited` seconds in all.
    """

    def __init__(self, frames: Frames, positions: U32, log: RowLog, lock: ForkLock) -> None:
        self.reads = Reads(log)
        self._frames, self._positions, self._log, self._lock = frames, positions, log, lock
        self._under_way: list[Load] = []
        self._left: list[Load] = []
        self._reading: Load | None = None
        self.waited = 0.0
        # Not repeated: the rows of a load that is half done are in nobody's hands.
        self._reader = Worker(
            "emberkeep-tier-read", self._read_left, on_error=self._fail, clock=log.clock
        )

    @property
    def error(self) -> BaseException | None:
        """What ended reading ahead."""
        return self._reader.error

    def _fail(self, error: BaseException) -> None:
        self._log.fail(error)
        if self._reading is not None and not self._reading.done.is_set():
            self._reading.error = error
            self._reading.done.set()

    def stop(self) -> None:
        self._reader.stop()

    def begin(self, missing: I64) -> Load:
        """Gives rows that have none frames, for which the caller has made room."""
        # First whatever may find no memory: a frame that no load fills would look like its row.
        records = self._positions[missing].astype(np.int64) - 1
        done = Event(self._log.clock)
        frames = self._frames.bind(missing)
        self._frames.busy[frames] |= LOADING
        load = Load(records, missing, frames, self._log.begin_reading(), done)
        self._under_way.append(load)
        return load

    def perform(self, load: Load) -> None:
        """Reads, without the lock: nobody else looks at frames that are being loaded."""
        try:
            self.reads.read(
                load.records, load.rows, load.frames, self._frames.stamps, self._log.layout
            )
        except BaseException as error:
            load.error = error
        load.done.set()

    def leave(self, load: Load) -> None:
        """Leaves a load to the thread that reads ahead."""
        self._left.append(load)
        self._reader.wake()

    def _read_left(self) -> float | None:
        with self._lock:
            if not self._left:
                self._reading = None
                return None
            load = self._reading = self._left.pop(0)
        self.perform(load)
        with self._lock:
            if load.error is not None:  # for who needs the rows, if anybody ever does
                self._end_reading(load)
            elif not load.settled:
                self.settle(load)
        return 0

    def _end_reading(self, load: Load) -> None:
        turn, load.turn = load.turn, None
        if turn is not None:
            self._log.end_reading(turn)

    def settle(self, load: Load) -> None:
        """Once the load is done: its rows are in their frames, or it raises."""
        self._release(load)
        if load.error is not None:
            raise load.error

    def _release(self, load: Load) -> None:
        if load.settled:
            return
        load.settled = True
        self._under_way.remove(load)
        self._end_reading(load)
        if load.error is not None:
            self._frames.unbind(load.frames)
        else:
            self._frames.busy[load.frames] &= ~np.uint8(LOADING)
            bits.set_bits(self._frames.filled, load.frames)

    def wait(self, frames: I64, *, needed: bool = True) -> None:
        """Waits until rows that are being read are in these frames. With the lock held: reading
        needs no lock, and a thread that waits settles it.

        Rows that are not `needed`, because they are about to be overwritten or removed, may turn
        out not to be readable: then they have no frames any more, and that is no error.
        """
        if not self._are_loading(frames):
            return
        start = self._log.clock.monotonic()
        try:
            while self._are_loading(frames):
                for load in list(self._under_way):
                    if np.isin(load.frames, frames).any():
                        self._finish(load, needed=needed)
        finally:
            self.waited += self._log.clock.monotonic() - start

    def _are_loading(self, frames: I64) -> bool:
        return bool(self._under_way) and bool((self._frames.busy[frames] & LOADING).any())

    def finish_one(self) -> bool:
        """Waits for one of the loads under way, if there is any. Its rows are for others: if they
        could not be read their frames are free, and a caller that needs them reads them again."""
        if self._under_way:
            self._finish(self._under_way[0], needed=False)
            return True
        return False

    def _finish(self, load: Load, *, needed: bool) -> None:
        if load in self._left:  # nobody has started to read it
            self._left.remove(load)
            self.perform(load)
        load.done.require(f"rows to be read from {self._log.path}", PATIENCE)
        if needed or not isinstance(load.error, Exception):  # an interrupt is for the caller
            self.settle(load)
        else:
            self._release(load)

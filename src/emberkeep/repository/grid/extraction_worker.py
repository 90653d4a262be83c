"""Extraction beside saving: in a thread of its own, at low priority, and never far behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta

from emberkeep._types import Json
from emberkeep.errors import DamageError, EmberkeepError, FencedError
from emberkeep.repository.grid.catalog import grid_of
from emberkeep.repository.grid.extraction import Extracted, Extractor, Holders
from emberkeep.repository.manifest import Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.policies import Grid, GridCosts
from emberkeep.repository.writer import Writer
from emberkeep.runtime.background import Worker
from emberkeep.runtime.bandwidth import Bandwidth

# A round moves gigabytes; one that takes longer hangs.
_PATIENCE = timedelta(hours=1)
# Who waits looks so often whether the process is being stopped.
_LOOK = timedelta(seconds=0.2)


class ExtractionWorker:
    """Runs a round of extraction whenever versions have been committed; several at once if it
    must. After each, `collect` removes what is not needed any more. The next save waits for
    neither.

    A round that fails, whatever the error, is warned of, reported as `extraction_failed`, and done
    again with the next version that is committed, once for each: nothing depends on it. A wait for
    a round is no longer than the round, however it ends.
    """

    def __init__(
        self,
        writer: Writer,
        rules: Grid,
        tell: Callable[[str, Json], object],
        collect: Callable[[], object],
        nice: int,
        bandwidth: Bandwidth | None = None,
        holders: Holders = lambda _: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`holders` says who prepares a round in the part of a shard, if not this process. Who
        waits looks at `stopping`: a process that is being stopped makes no room."""
        self._stopping = stopping
        self._bandwidth = bandwidth
        self._holders = holders
        self.rules = rules
        self._collect = collect
        self.failure: FencedError | None = None
        self.failed_in_a_row = 0
        self._writer = writer
        self._tell = tell
        self._clock = writer.repository.clock
        self._worker = Worker("emberkeep-extract", nice=nice, clock=self._clock)
        self._changed = self._worker.changed
        self._waiting: list[Manifest] = []
        self._passed_over: Manifest | None = None
        self._busy = False
        self._extractor: Extractor | None = None
        self._restore: tuple[float, int] | None = None

    def arrived(self, manifest: Manifest) -> None:
        """A version of a grid was committed; returns at once."""
        with self._changed:
            self._waiting.append(manifest)
            if not self._busy:
                self._start()

    def _start(self) -> None:
        self._worker.do(self._work, self._ended)
        self._busy = True

    def make_room(self) -> None:
        """Called before a version is saved: waits while extraction is too far behind."""
        if self.rules.behind == "skip" or len(self._waiting) <= self.rules.most_behind:
            return
        start = self._clock.monotonic()
        behind = len(self._waiting)
        self._wait(
            lambda stopping: stopping or len(self._waiting) <= self.rules.most_behind,
            f"extraction, which is {behind} versions behind,",
        )
        waited = (self._clock.monotonic() - start) * 1e3
        self._tell("extraction_behind", {"versions": behind, "waited_ms": waited})

    def join(self) -> None:
        """Waits until no round is under way."""
        self._wait(lambda _stopping: False, "a round of extraction")

    def _wait(self, enough: Callable[[bool], bool], what: str) -> None:
        """Until no round is under way, or there is `enough`, as far as the process goes on."""

        def ended() -> bool:
            return enough(self._stopping()) or not self._busy

        self._worker.wait(ended, what, _PATIENCE, looks=_LOOK)

    def close(self) -> None:
        """Waits until no round is under way, and ends the thread."""
        self.join()
        self._worker.close()

    def restored(self, seconds: float, nbytes: int) -> None:
        """A restore took so long: the best there is to predict the next one."""
        self._restore = (seconds, max(1, nbytes))

    def costs(
        self, grid: VersionId, write_seconds_per_byte: float, increment_nbytes: int
    ) -> GridCosts | None:
        """What the next version would cost either way; None as long as nothing was measured."""
        extractor = self._extractor
        if extractor is None or extractor.grid != grid or extractor.catalog is None:
            return None
        seconds, nbytes = self._restore or (extractor.read_seconds, extractor.read_nbytes)
        if not nbytes:
            return None
        read, needed = extractor.living
        # What has died and was passed over for now will be moved: it does not stay that much.
        read = min(read, int(needed / max(1e-9, 1 - self.rules.ratio)))
        per_byte = seconds / nbytes
        return GridCosts(
            write_base=needed * write_seconds_per_byte,
            write_increment=increment_nbytes * write_seconds_per_byte,
            read_base=needed * per_byte,
            read_more=(read - needed) * per_byte,
            grid_nbytes=extractor.stored_nbytes,
            base_nbytes=needed,
        )

    # -- in the thread ---------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                waiting = list(self._waiting)
                if not waiting and self._passed_over is None:
                    return
            done = self._round(waiting)
            self.failed_in_a_row = 0
            with self._changed:
                self._waiting = self._waiting[done:]
                self._changed.notify_all()
            self._collect()

    def _ended(self, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._failed(error)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if self._waiting:  # it came after the last look
                    self._start()

    def _round(self, waiting: list[Manifest]) -> int:
        """Takes in the versions of the first grid that waits, or, if none does, splits what was
        passed over when they were too many; returns how many there were."""
        newest = waiting[0] if waiting else self._passed_over
        assert newest is not None
        grid = grid_of(newest)
        assert grid is not None
        own = [manifest for manifest in waiting if grid_of(manifest) == grid]
        newest = own[-1] if own else newest
        if self._extractor is None or self._extractor.grid != grid:
            self._extractor = Extractor(
                self._writer, grid, self.rules, self._bandwidth, self._holders
            )
        # Never twice in a row: the dead that are passed over would pile up.
        many = len(own) > self.rules.most_behind and self._passed_over is None
        split = self.rules.behind == "wait" or not many
        start = self._clock.monotonic()
        extracted = self._extractor.settle(newest, split=split)
        self._passed_over = None if split else newest
        self._tell("extracted", _details(extracted, self._clock.monotonic() - start))
        return len(own)

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            # The next version brings them back: it names the one before it.
            self._waiting, self._passed_over = [], None
        if isinstance(error, FencedError):
            self.failure = error
            return
        self.failed_in_a_row += 1
        what = "damage" if isinstance(error, DamageError) else "a failure"
        message = str(error) if isinstance(error, EmberkeepError) else repr(error)
        self._tell("extraction_failed", {"error": message, "in_a_row": self.failed_in_a_row})
        warnings.warn(
            f"extraction ended with {what}, {self.failed_in_a_row} in a row by now: {message}; no "
            "version is in danger, and the next one tries again",
            stacklevel=1,
        )


def _details(extracted: Extracted, seconds: float) -> Json:
    return {
        "versions": list(extracted.versions),
        "covered": extracted.covered,
        "pieces": extracted.pieces,
        "read_nbytes": extracted.read_nbytes,
        "written_nbytes": extracted.written_nbytes,
        "skipped": extracted.skipped,
        "seconds": seconds,
    }

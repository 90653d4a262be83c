"""How a process becomes the only writer of a repository: before its saver is made, or beside what
the saver reads first.

From an object store a takeover takes three round trips, one after another: the seal, a look at what
then stands, the claim. A version that is brought back meanwhile is read as any reader reads it,
under a pin. Before the first row changes the takeover must have ended, and the history must be the
one that the reading went by: what the writer before has committed until it was sealed counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emberkeep.blobs import Call
from emberkeep.checkpoint.held_version import Known
from emberkeep.checkpoint.restore import Fits, Restored
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.errors import EmberkeepError
from emberkeep.repository import Collector, Repository, VersionId, Writer
from emberkeep.repository.grid.extraction_worker import ExtractionWorker
from emberkeep.repository.history import History


@dataclass(frozen=True, slots=True)
class _Opened:
    """What only the one writer may have."""

    writer: Writer
    collector: Collector
    extraction: ExtractionWorker
    restores: dict[bool, int]


class _AnotherHistoryError(Exception):
    """The history is not the one that was read from."""


class TakesOver:
    """A saver whose takeover may be under way: what needs it waits for it, and raises what it met.

    Nothing is saved, collected or changed in rows before it has ended."""

    _opening: Call[_Opened]
    _before: History | None = None
    """The history as it was looked at before a takeover that may be under way."""

    def _take_over(
        self, repository: Repository, history: History | None, settings: SaveSettings,
        extraction: Callable[[Writer], ExtractionWorker], *, beside: bool,
    ) -> None:  # fmt: skip
        """With `beside` it may return at once, where that spares round trips: if there is a version
        to bring back."""

        def opened() -> _Opened:
            counted = Call(repository.store, repository.restore_counts)
            writer = Writer.open(repository, history)
            self._started_from(writer.newest)
            collector = Collector(writer, policy=settings.retention, grace=settings.grace)
            return _Opened(writer, collector, extraction(writer), counted.result())

        self._opening = Call(repository.store, opened)
        found = history is not None and history.newest is not None
        self._before = history if beside and found and self._opening.made else None
        if self._before is None:
            self.finish_takeover()

    def _started_from(self, newest: VersionId | None) -> None:
        """What has to be known of the newest version before anything else happens."""

    @property
    def writer(self) -> Writer:
        return self._opening.result().writer

    @property
    def _collector(self) -> Collector:
        return self._opening.result().collector

    @property
    def _extraction(self) -> ExtractionWorker:
        return self._opening.result().extraction

    @property
    def _restores(self) -> dict[bool, int]:
        """How often versions were restored that were exact, and that were not."""
        return self._opening.result().restores

    def finish_takeover(self) -> None:
        """Returns when this process is the only writer; raises what that has met."""
        self._opening.result()

    def _end_extraction(self) -> None:
        self._opening.wait()
        if self._opening.error is None:
            self._extraction.close()

    def _restored(
        self, restore: Callable[[Known, Fits | None], Restored | None], fits: Fits | None
    ) -> Restored | None:
        """What `restore` makes of the history."""
        history, self._before = self._before, None
        restored = None if history is None else self._restored_beside(history, restore, fits)
        if restored is None:
            self.writer.settle()
            restored = restore(Known.of(self.writer), fits)
        return restored

    def _restored_beside(
        self, history: History, restore: Callable[[Known, Fits | None], Restored | None],
        fits: Fits | None,
    ) -> Restored | None:  # fmt: skip
        """`restore` beside the takeover, of the history that was there before. None if it is not
        the same after it, or if anything is wrong until then: no row has changed, and what is there
        after the takeover decides."""
        taken_over = False

        def admit(found: Restored) -> None:
            nonlocal taken_over
            if self.writer.known_history() != history.versions:
                raise _AnotherHistoryError
            taken_over = True
            if fits is not None:
                fits(found)

        try:
            return restore(Known(versions=history.versions, newest=history.newest), admit)
        except (EmberkeepError, _AnotherHistoryError):
            if taken_over:
                raise
            return None

"""What a server is at work on: requests, and work that takes longer than one may, started by one
and asked for by others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager

from emberkeep._types import Json
from emberkeep.errors import EpochError, ServerError
from emberkeep.runtime.background import Worker
from emberkeep.runtime.clock import Clock
from emberkeep.server.server_events import ServerEvents


class Requests:
    """Counts what a server is at work on, and refuses more once it is about to end."""

    def __init__(self, clock: Clock) -> None:
        self.draining = False
        self._clock = clock
        self._at_work = 0
        self._idle = threading.Condition()

    @contextmanager
    def working(self, *, always: bool = False) -> Iterator[None]:
        if self.draining and not always:
            raise ServerError("the server is shutting down")
        with self._idle:
            self._at_work += 1
        try:
            yield
        finally:
            with self._idle:
                self._at_work -= 1
                self._idle.notify_all()

    def drain(self, patience_seconds: float) -> bool:
        """Refuses what comes, waits for what is under way; whether it ended in time."""
        self.draining = True
        with self._idle:
            return self._clock.wait_for(self._idle, lambda: self._at_work == 0, patience_seconds)


class LongWork:
    """One piece of work at a time, in a thread of its own; `answer` says what became of it.

    `working` is entered around it, so that a server which is shutting down waits for it.
    """

    def __init__(
        self, events: ServerEvents, working: Callable[[], AbstractContextManager[None]],
        clock: Clock,
    ) -> None:  # fmt: skip
        self._tell = events
        self._working = working
        self._clock = clock
        self._lock = threading.Lock()
        self._worker = Worker("emberkeep-job", clock=clock)
        self._progress = 0
        self._coordinator: str | None = None
        self.job: tuple[int, Future[Json]] | None = None
        """The epoch that the last piece of work is of, and what becomes of it."""

    def begin(
        self, event: str, epoch: int, about: Json, work: Callable[[], Json], *,
        coordinator: str | None = None,
    ) -> None:  # fmt: skip
        """Returns at once; `event` is said when the work has ended well.

        Refused while another piece is under way, unless this one begins an epoch, of a
        `coordinator` who alone hears of it: it starts when the other has ended, and nobody hears
        of that one any more.
        """
        job: Future[Json] = Future()
        started = self._clock.monotonic()
        done: list[Json] = []

        def run() -> None:
            with self._working():
                done.append(work())

        def ended(error: BaseException | None) -> None:
            if error is not None:
                job.set_exception(error)
                self._tell("failed", {"what": event, "error": str(error)})
                return
            job.set_result(done.pop())
            seconds = round(self._clock.monotonic() - started, 3)
            self._tell(event, {**about, "seconds": seconds})

        with self._lock:
            if coordinator is None and self.job is not None and not self.job[1].done():
                raise ServerError("the server is still at work on something else")
            self._worker.do(run, ended)
            self.job, self._coordinator = (epoch, job), coordinator

    def answer(self, epoch: int, coordinator: str | None = None) -> Json:
        """Whether the work of an epoch is done, with what it returned; raises what it raised."""
        owner = self._coordinator
        if self.job is None or self.job[0] != epoch or owner not in (None, coordinator):
            raise EpochError(f"no work was started in epoch {epoch}")
        job = self.job[1]
        if job.done():
            return {"done": True, **job.result()}
        return {"done": False, "progress": self._progress}

    def advance(self) -> None:
        """It has come further: the one who waits for it need not give up."""
        self._progress += 1

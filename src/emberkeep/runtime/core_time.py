"""How much processor time work in several threads takes, and a share of a core to keep it in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from emberkeep.errors import CancelledError, ConfigError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.pool import Pool

_T = TypeVar("_T")

# A rest is looked at so often: whether it was given up, or somebody waits for the work.
_LOOK_SECONDS = 0.02


class CoreTime:
    """Adds up the processor time, the kernel's included, that threads spend on what is counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._open = threading.local()

    @property
    def seconds(self) -> float:
        """So far; of a body that is being counted, what its thread has noted."""
        return self._seconds

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What the calling thread does in the body; within another such body, nothing is new."""
        if hasattr(self._open, "since"):
            yield
            return
        self._open.since = time.thread_time()
        try:
            yield
        finally:
            self.note()
            del self._open.since

    def note(self) -> None:
        """Adds what the calling thread has spent in its body up to now, if it is in one."""
        if not hasattr(self._open, "since"):
            return
        now = time.thread_time()
        with self._lock:
            self._seconds += now - self._open.since
        self._open.since = now

    def iterating(self, items: Iterable[_T]) -> Iterator[_T]:
        """What the thread that iterates spends on making the items, not on using them."""
        iterator = iter(items)
        while True:
            try:
                with self.counting():
                    item = next(iterator)
            except StopIteration:
                return
            yield item
            del item

    def noting(self, items: Iterable[_T]) -> Iterator[_T]:
        """The same items; the thread that uses them, in a body that is counted, notes each."""
        for item in items:
            self.note()
            yield item
            del item


class Budget:
    """Keeps what is counted within a `share` of a core, on average since `start`; without a share
    it limits nothing."""

    def __init__(
        self, share: float | None, cores: CoreTime, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        check_share(share)
        self.cores = cores
        self.share = share
        self._clock = clock
        self._changed = threading.Condition()
        self._awaited = 0
        self.start()

    def start(self) -> None:
        """Nothing is spent yet."""
        self._started, self._spent = self._clock.monotonic(), self.cores.seconds

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Somebody waits for the work in the body: nobody rests meanwhile."""
        with self._changed:
            self._awaited += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._awaited -= 1

    def rest(self, hurried: Callable[[], bool], cancelled: threading.Event | None = None) -> None:
        """Returns when what was spent is within the share again, or at once while the work is
        `hurried` or `awaited`; `CancelledError` if that is given up meanwhile."""
        with self._changed:
            while (share := self.share) is not None:
                spent = self.cores.seconds - self._spent
                left = self._started + spent / share - self._clock.monotonic()
                if left <= 0 or self._awaited or hurried():
                    return
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError("a save was given up while it rested")
                self._clock.wait_for(
                    self._changed, lambda: self.share is None or self._awaited > 0,
                    min(left, _LOOK_SECONDS),
                )  # fmt: skip

    def lift(self) -> None:
        """From now on there is no limit: a process that is about to be ended has no time for it."""
        with self._changed:
            self.share = None
            self._changed.notify_all()


def check_share(share: float | None) -> None:
    if share is not None and not 0 < share < math.inf:
        raise ConfigError(
            f"background_share is a part of a core, such as 0.1, and above 0, not {share}"
        )


class CountedPool(Pool):
    """A pool for work beside training: its threads are counted, and sleep when they have none. The
    caller, which is one of them, counts itself."""

    def __init__(self, threads: int | None, cores: CoreTime, *, nice: int = 0) -> None:
        super().__init__(threads, nice=nice, eager=False)
        self._cores = cores

    def run(self, tasks: Sequence[Callable[[], object]]) -> None:
        caller = threading.get_ident()
        super().run([partial(self._run, task, caller) for task in tasks])

    def _run(self, task: Callable[[], object], caller: int) -> None:
        if threading.get_ident() == caller:
            task()
            return
        with self._cores.counting():
            task()

"""Time that passes when somebody sleeps, or when a test says so."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

# A condition belongs to who waits on it, so `advance` cannot notify it: waits look now and then.
_LOOK_SECONDS = 0.002
# What a woken thread gets to do its work; it may need a lock that who sleeps is holding.
_WORK_SECONDS = 0.2
_START = datetime(2026, 1, 1, tzinfo=timezone.utc)


class VirtualClock:
    """A `Clock` whose sleeps take no time: each advances the clock and returns.

    A wait with a bound ends when its condition holds, or when sleeps and `advance` have taken the
    clock to the bound. They go there in steps: a thread whose wait ends on the way does its work,
    until it waits again, before time goes on. So a lease that is renewed in the background does
    not lapse, however long a sleep is. While a wait lasts, time itself passes `pace` times as fast
    as on the machine: by default it stands still.
    """

    def __init__(self, start: datetime = _START, *, pace: float = 0.0) -> None:
        self._start = start
        self._pace = pace
        self._seconds = 0.0
        self._lock = threading.Lock()
        # When the waits of threads end, and the threads that work since time has ended their wait.
        self._due: dict[threading.Thread, float] = {}
        self._woken: set[threading.Thread] = set()

    def monotonic(self) -> float:
        return self._seconds

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._seconds)

    def sleep(self, seconds: float) -> None:
        until = self._seconds + seconds
        while self._seconds < until:
            with self._lock:
                self._woken.discard(threading.current_thread())
                steps = [due for due in self._due.values() if due > self._seconds]
                self._seconds = max(self._seconds, min([*steps, until]))
            self._let_others_work()

    def advance(self, by: timedelta) -> None:
        """Lets time pass."""
        self.sleep(by.total_seconds())

    def jump(self, by: timedelta) -> None:
        """Sets the date, as that of a machine may be set, forward or back: no time passes."""
        self._start += by

    def wait_for(
        self, changed: threading.Condition, until: Callable[[], bool], seconds: float | None
    ) -> bool:
        thread = threading.current_thread()
        due = math.inf if seconds is None else self._seconds + seconds
        with self._lock:
            self._due[thread] = due
            self._woken.discard(thread)
        try:
            if seconds is None:
                return changed.wait_for(until)
            while not until() and self._seconds < due:
                changed.wait(_LOOK_SECONDS)
                with self._lock:
                    self._seconds += _LOOK_SECONDS * self._pace
            return until()
        finally:
            with self._lock:
                del self._due[thread]
                if self._seconds >= due:
                    self._woken.add(thread)

    def _let_others_work(self) -> None:
        """Returns when all threads wait again whose time has come; gives them a bounded time."""
        give_up = time.monotonic() + _WORK_SECONDS
        while time.monotonic() < give_up:
            with self._lock:
                self._woken = {thread for thread in self._woken if thread.is_alive()}
                over = any(due <= self._seconds for due in self._due.values())
                if not over and not self._woken - {threading.current_thread()}:
                    return
            time.sleep(_LOOK_SECONDS / 10)

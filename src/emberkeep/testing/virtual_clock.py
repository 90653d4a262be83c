"""Time that passes when somebody sleeps, or when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

# A condition belongs to who waits on it, so `advance` cannot notify it: waits look now and then.
_LOOK_SECONDS = 0.002
_START = datetime(2026, 1, 1, tzinfo=timezone.utc)


class VirtualClock:
    """A `Clock` whose sleeps take no time: each advances the clock and returns.

    A wait with a bound ends when its condition holds, or when sleeps and `advance` have taken the
    clock beyond the bound. While such a wait lasts, time itself passes `pace` times as fast as on
    the machine: by default it stands still.
    """

    def __init__(self, start: datetime = _START, *, pace: float = 0.0) -> None:
        self._start = start
        self._pace = pace
        self._seconds = 0.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self._seconds

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._seconds)

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds

    def advance(self, by: timedelta) -> None:
        """Lets time pass."""
        self.sleep(by.total_seconds())

    def jump(self, by: timedelta) -> None:
        """Sets the date, as that of a machine may be set, forward or back: no time passes."""
        self._start += by

    def wait_for(
        self, changed: threading.Condition, until: Callable[[], bool], seconds: float | None
    ) -> bool:
        if seconds is None:
            return changed.wait_for(until)
        due = self._seconds + seconds
        while not until() and self._seconds < due:
            changed.wait(_LOOK_SECONDS)
            self.sleep(_LOOK_SECONDS * self._pace)
        return until()

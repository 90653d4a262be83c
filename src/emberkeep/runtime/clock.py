"""Where time comes from: everything that waits or measures is handed a `Clock`.

A lease, a grace period or a back-off can so be tested without waiting for it, and a whole cluster
can run on virtual time (`emberkeep.testing.virtual_clock`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Protocol

from emberkeep.errors import DeadlineError


class Clock(Protocol):
    """Tells the time and lets a thread wait for it to pass. Safe to use from many threads."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""

    def now(self) -> datetime:
        """The date and time in UTC, as the machine believes it; it may jump."""

    def sleep(self, seconds: float) -> None: ...

    def wait_for(
        self, changed: threading.Condition, until: Callable[[], bool], seconds: float | None
    ) -> bool:
        """Waits until `until` holds, looked at whenever `changed`, which the caller holds, is
        notified; returns whether it does. None waits without a bound."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(
        self, changed: threading.Condition, until: Callable[[], bool], seconds: float | None
    ) -> bool:
        return changed.wait_for(until, seconds)


SYSTEM_CLOCK: Clock = SystemClock()


def wait_in_time(
    changed: threading.Condition,
    until: Callable[[], bool],
    what: str,
    deadline: timedelta,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Returns once `until` holds, looked at whenever `changed`, which the caller holds, is
    notified. Nobody waits for ever: after `deadline` it is a `DeadlineError` about `what`."""
    if not clock.wait_for(changed, until, deadline.total_seconds()):
        raise overdue(what, deadline)


def overdue(what: str, deadline: timedelta) -> DeadlineError:
    """What is said of `what` when it was waited for that long."""
    return DeadlineError(
        f"waited {deadline.total_seconds():g} s for {what}; it is still under way, or hangs: look "
        "at what it works on, and try again"
    )


class Progress:
    """For one who asks again and again: work may last, but not stand still for `patience`."""

    def __init__(self, patience: timedelta, clock: Clock) -> None:
        self._patience = patience.total_seconds()
        self._clock = clock
        self._figure: object = None
        self._since = clock.monotonic()

    def require(self, figure: object, what: Callable[[], str]) -> None:
        """`figure` is how far the work is; `DeadlineError` about `what` if it has not changed."""
        now = self._clock.monotonic()
        if figure != self._figure:
            self._figure, self._since = figure, now
        elif now - self._since > self._patience:
            raise DeadlineError(
                f"waited for {what()}, and for {now - self._since:g} s there was no progress: look "
                "at what it works on (a store or a peer that does not answer), and try again"
            )


class Event:
    """A `threading.Event` whose waits are on a clock, and bounded."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def wait(self, timeout: timedelta) -> bool:
        """Whether it is set in time."""
        with self._changed:
            return self._clock.wait_for(self._changed, self.is_set, timeout.total_seconds())

    def require(self, what: str, deadline: timedelta) -> None:
        """Waits for `what`, which sets it; `DeadlineError` if that takes longer."""
        with self._changed:
            wait_in_time(self._changed, self.is_set, what, deadline, self._clock)

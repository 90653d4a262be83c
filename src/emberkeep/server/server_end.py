"""When a server ends that was asked to: not while its run still needs it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, Event

_LOOK = timedelta(milliseconds=100)
# Not longer: a signal that is handled right before this thread begins to wait does not wake it.
_REST = timedelta(seconds=1)


class ServerEnd:
    """What ends a server, and when.

    A signal often reaches every process of a job at once: Ctrl-C those of a terminal, systemd those
    of a service. The trainer then saves its last version, and needs its servers for that. So after
    a first SIGTERM or SIGINT a server serves on while it is `needed`, for `grace` at most. A
    second signal ends it, and so does `now`.
    """

    def __init__(
        self, needed: Callable[[], bool], grace: timedelta, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._needed = needed
        self._grace = grace
        self._clock = clock
        self._signal = 0
        # Reentrant, so that they can be set by a signal that interrupts a wait for them.
        self._asked = Event(clock)
        self._now = Event(clock)

    def hear(self, number: int, _frame: Any = None) -> None:
        """A signal; for `signal.signal`."""
        if self._asked.is_set():
            self._now.set()
        self._signal = self._signal or number
        self._asked.set()

    def now(self) -> None:
        """What started the server has let go of it, or nobody has come back for its rows."""
        self._now.set()
        self._asked.set()

    def wait(self, on_event: Callable[[str, dict[str, Any]], object]) -> None:
        """Returns when the server is to end."""
        while not self._asked.wait(_REST):
            pass
        if self._now.is_set() or not self._needed():
            return
        on_event(
            "ending",
            {
                "signal": signal.Signals(self._signal).name,
                "waits_for": "the end of its run; a second signal ends it now",
                "grace_seconds": self._grace.total_seconds(),
            },
        )
        until = self._clock.monotonic() + self._grace.total_seconds()
        while self._needed() and self._clock.monotonic() < until:
            if self._now.wait(_LOOK):
                return

"""Where time comes from: everything that waits or measures is handed a `Clock`.

A lease, a grace period or a back-off can so be tested without waiting for it, and a whole cluster
can run on virtual time (`emberkeep.testing.virtual_clock`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Protocol


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

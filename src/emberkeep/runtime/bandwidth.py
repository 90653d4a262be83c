"""How fast bytes may be written: storage that many jobs share is what limits how often each of
them can save."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TypeAlias

from emberkeep.errors import CancelledError, ConfigError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

_Buffer: TypeAlias = "bytes | bytearray | memoryview"

# A wait is looked at so often: whether it was given up.
_LOOK_SECONDS = 0.2
# So much goes at once: a slow store is not sent 16 MB in a burst.
_MOST_NBYTES = 4 * 2**20


class Bandwidth:
    """Lets `most_mb_per_second` through, on average over what several threads write; without a
    number, everything at once. Up to 4 MiB more may be under way.

    Where others write elsewhere, it is divided: what passes here is one part, and each of the
    others has a `share` of its own.
    """

    def __init__(self, most_mb_per_second: float | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        check_rate(most_mb_per_second)
        self._rate = None if most_mb_per_second is None else most_mb_per_second * 1e6
        self._parts = 1
        self._clock = clock
        self._changed = threading.Condition()
        self._free_at = -math.inf

    def passing(
        self, buffers: Iterable[_Buffer], cancelled: threading.Event | None = None
    ) -> Iterator[_Buffer]:
        """The same bytes, each when it is their turn; `CancelledError` if that is given up
        meanwhile."""
        for buffer in buffers:
            if self._rate is None:
                yield buffer
                continue
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), _MOST_NBYTES):
                part = view[start : start + _MOST_NBYTES]
                self.spend(len(part), cancelled)
                yield part

    def spend(self, nbytes: int, cancelled: threading.Event | None = None) -> None:
        """Returns when so many bytes may be written."""
        with self._changed:
            asked, start = math.nan, -math.inf
            while True:
                rate = self._rate  # once: a signal may lift the limit in between
                if rate is None:
                    return
                if rate != asked:  # it has its turn by the limit that there is now
                    asked = rate
                    start = max(self._clock.monotonic(), self._free_at)
                    self._free_at = start + nbytes * self._parts / rate
                left = start - self._clock.monotonic()
                if left <= 0:
                    return
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError("writing was given up while it waited for bandwidth")
                self._clock.wait_for(
                    self._changed, partial(self._is_other, rate), min(left, _LOOK_SECONDS)
                )

    def _is_other(self, rate: float) -> bool:
        return self._rate != rate

    def divide(self, parts: int) -> None:
        """From now on it is in so many equal parts, one of them for what passes here."""
        with self._changed:
            self._parts = parts

    def share(self) -> float | None:
        """What each of the parts may take, in MB per second."""
        rate = self._rate  # once: a signal may lift the limit in between
        return None if rate is None else rate / self._parts / 1e6

    def limit(self, most_mb_per_second: float | None) -> None:
        """From now on so much may pass; without a number, everything at once."""
        check_rate(most_mb_per_second)
        with self._changed:
            rate = None if most_mb_per_second is None else most_mb_per_second * 1e6
            if rate != self._rate:
                self._rate, self._free_at = rate, -math.inf  # what was owed at another rate is not
                self._changed.notify_all()

    def lift(self) -> None:
        """From now on there is no limit: a process that is about to be ended has no time for it."""
        self.limit(None)


def check_rate(mb_per_second: float | None, name: str = "most_mb_per_second") -> None:
    if mb_per_second is not None and not 0 < mb_per_second < math.inf:
        raise ConfigError(f"{name} must be above 0, not {mb_per_second}")

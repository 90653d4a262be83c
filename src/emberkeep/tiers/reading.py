"""Rows that were taken from a slab, and are yet to be read from its file."""

from __future__ import annotations

from collections.abc import Callable

from emberkeep.runtime.pool import ForkLock
from emberkeep.tiers.log import RowLog


class Reading:
    """No segment of the log is used again from when it is made, with the slab's lock held, until
    it was called, however that ends, or ended."""

    def __init__(self, read: Callable[[], None], log: RowLog, lock: ForkLock) -> None:
        self._read, self._log, self._lock = read, log, lock
        self._turn: int | None = log.begin_reading()

    def __call__(self) -> None:
        try:
            self._read()
        finally:
            self.end()

    def end(self) -> None:
        if self._turn is not None:
            with self._lock:
                turn, self._turn = self._turn, None
                self._log.end_reading(turn)

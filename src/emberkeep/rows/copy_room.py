"""How much memory the copies may take that pushes make while a save is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, wait_in_time

# A save takes a few megabytes at a time; one that takes nothing for that long hangs.
_PATIENCE = timedelta(hours=1)


class CopyRoom:
    """The memory for copies that writers make of rows, of all that was frozen together.

    A writer waits while it is full, and then copies what it is about to write: beyond `nbytes`
    there are the rows of one push.
    """

    def __init__(self, nbytes: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.nbytes = nbytes
        self.clock = clock
        self._held_nbytes = 0
        self._changed = threading.Condition()

    def change(self, nbytes: int = 0) -> None:
        """So much more is held, or less; wakes those who wait in any case."""
        with self._changed:
            self._held_nbytes += nbytes
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        return self._held_nbytes > self.nbytes

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits while it is full, unless something else holds."""
        with self._changed:
            wait_in_time(
                self._changed, lambda: not self.full or until(),
                "a save to take rows that a push is about to change", _PATIENCE, self.clock,
            )  # fmt: skip

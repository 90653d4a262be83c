"""What a process waits for before it can go on, such as servers that start.

A library says nothing on its own: messages go to the logger "emberkeep" with the level INFO, which
Python drops unless somebody listens. Commands print them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

LOGGER = logging.getLogger("emberkeep")
_PAUSE_SECONDS = 5.0


class Waiting:
    """Says what is waited for: at once, and while it lasts every five seconds at most."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._said = -math.inf

    def say(self, what: str) -> None:
        now = self._clock.monotonic()
        if now - self._said >= _PAUSE_SECONDS:
            self._said = now
            LOGGER.info(what)

    def over(self, what: str) -> None:
        """What was waited for is there; says after how long."""
        LOGGER.info("%s after %.1f s", what, self._clock.monotonic() - self._started)


@contextmanager
def unsaid() -> Iterator[None]:
    """Nothing is said meanwhile: nobody waits for what is simulated."""
    before = LOGGER.level
    LOGGER.setLevel(logging.WARNING)
    try:
        yield
    finally:
        LOGGER.setLevel(before)

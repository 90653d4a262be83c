"""Waiting in tests: for something to happen, never for a while in the hope that it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from emberkeep.testing.virtual_clock import VirtualClock


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Returns as soon as the condition holds; fails with `what` was waited for if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.001)


def passing(
    clock: VirtualClock, condition: Callable[[], object], what: str, step: timedelta
) -> None:
    """As `until`, while time passes in steps. A thread that has just done something may not rest
    yet: time that passed once, before its pause began, would never end the pause."""

    def holds() -> object:
        if not (held := condition()):
            clock.advance(step)
        return held

    until(holds, what)

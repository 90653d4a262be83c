"""Waiting in tests: for something to happen, never for a while in the hope that it has."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Returns as soon as the condition holds; fails with `what` was waited for if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.001)

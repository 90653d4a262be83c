"""Threads in tests: those that a test started. Others, of earlier tests, come and go beside it."""

from __future__ import annotations

import threading


def started_since(before: set[threading.Thread], name: str = "") -> list[threading.Thread]:
    """The living threads that were not there before and whose names start with `name`."""
    return [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(name)
    ]

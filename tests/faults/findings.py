"""What the harnesses of this directory look for, and how they count what they have tried."""

from __future__ import annotations

import faulthandler
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

Counts = Counter[str]
"""How many cases a run has tried, by kind."""


class LostVersionError(AssertionError):
    """A version that was acknowledged, and that retention keeps, is not there."""


class WrongRowsError(AssertionError):
    """Rows came back as they never were."""


class HangError(AssertionError):
    """Something waits for what never comes."""


def within(seconds: float, action: Callable[[], _Result]) -> _Result:
    """Runs an action in a thread of its own; `HangError` if it takes longer than it may."""
    outcome: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback(all_threads=True)
        raise HangError(f"not done after {seconds} s")
    if errors:
        raise errors[0]
    return outcome[0]

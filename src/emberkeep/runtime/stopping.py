"""Waits that end when the process is asked to stop.

Who waits for somebody else, for a server that shall be started again say, may wait for long. What
asks a process to stop (a signal, which a keeper notes) is not to be kept waiting with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

Heed = Callable[[str, bool], object]


class Stop:
    """What the waits of one cluster look at, in whatever thread they are.

    `heed` hands in a method that is called while something is waited for: with what that is, and
    whether it is others who train, which come to the end of their step by themselves. It raises
    what ends the process when the wait is to be given up: no `Exception`, so that nobody takes it
    for a failure of a server. It is held weakly: threads and finalizers hold this object.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._heed: weakref.WeakMethod[Heed] | None = None

    def heed(self, method: Heed | None) -> None:
        self._heed = None if method is None else weakref.WeakMethod(method)

    def look(self, what: str, *, others: bool = False) -> None:
        """Returns if `what` may be waited for."""
        method = None if self._heed is None else self._heed()
        if method is not None:
            method(what, others)

    def pause(self, seconds: float, what: str) -> None:
        """Sleeps between two looks at whether `what` has come."""
        self.look(what)
        self._clock.sleep(seconds)

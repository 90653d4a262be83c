"""SIGTERM as a request that is granted at the end of a step."""

from __future__ import annotations

import signal
import threading
from typing import Any


class Termination:
    """Notes the first SIGTERM; a second one acts as if nobody had listened.

    Signals belong to the main thread: made elsewhere, this notes nothing and changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None
        self._listening = threading.current_thread() is threading.main_thread()
        if self._listening:
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, _signal: int, _frame: Any) -> None:
        self.asked = True
        self.close()

    def close(self) -> None:
        """Puts back what was there before."""
        if self._listening:
            self._listening = False
            # None stands for a handler that was not installed from Python: it cannot be put back.
            before = signal.SIG_DFL if self._before is None else self._before
            signal.signal(signal.SIGTERM, before)

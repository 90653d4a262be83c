"""SIGTERM and Ctrl-C as requests that are granted at the end of a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

EXIT_CODE = 75
"""Of a process that was asked to stop: "try again later", as `sysexits.h` has it."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HINT = b"\nemberkeep: stopping after this step, with a version; Ctrl-C again to end at once\n"


class Termination:
    """Notes the first SIGTERM or SIGINT; a second one acts as if nobody had listened.

    A SIGINT that the process was started to ignore, as in the background of a shell, stays ignored.
    Signals belong to the main thread: made elsewhere, this notes nothing and changes nothing.
    """

    def __init__(self) -> None:
        self.asked = 0
        """The number of the signal; 0 as long as there was none."""
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        self.asked = number
        self.close()
        if number == signal.SIGINT:
            # Not print: the signal may have come while this thread was writing to the same stream.
            os.write(2, _HINT)

    def close(self) -> None:
        """Puts back what was there before."""
        while self._before:
            number, before = self._before.popitem()
            # None stands for a handler that was not installed from Python: it cannot be put back.
            signal.signal(number, signal.SIG_DFL if before is None else before)


def announce(asked: int, step: int, saved: int | None) -> None:
    """Says on stderr what a signal has come to: after which step, and what is saved."""
    kept = f"version of step {saved}" if saved is not None else "no version of this run"
    message = f"{signal.Signals(asked).name}: stopped after step {step}; {kept} was saved"
    print(f"emberkeep: {message}", file=sys.stderr, flush=True)


def end(asked: int) -> NoReturn:
    """Ends the process after a signal: SIGTERM with `EXIT_CODE`, Ctrl-C as it ever does."""
    if asked == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(EXIT_CODE)

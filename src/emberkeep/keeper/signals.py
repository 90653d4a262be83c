"""SIGTERM and Ctrl-C as requests that are granted at the end of a step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from emberkeep.keeper.run_saver import Kept, version_number
from emberkeep.runtime.clock import Clock

EXIT_CODE = 75
"""Of a process that was asked to stop: "try again later", as `sysexits.h` has it."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HINT = b"\nemberkeep: stopping after this step, with a version; Ctrl-C again to end at once\n"


# What was lost for an instant is back by then, and the step ends as after any signal.
_MOMENT = timedelta(seconds=3)


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


class SignalledWaits:
    """Ends the process where a step waits for somebody else, for lost shards say, and a signal was
    noted: a moment after the wait has met it. Others who train have as long as `grace` to end their
    step, and so has whatever the last version waits for, until its own `deadline`.

    Nothing of such a step is saved: the model may be recovered by half. `leave` hears once, before
    the first wait ends, of the signal and of what was waited for.
    """

    def __init__(
        self, termination: Termination, leave: Callable[[int, str], object], grace: timedelta,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._termination = termination
        self._leave = leave
        self._grace = grace
        self._clock = clock
        self._met: float | None = None
        self.left = False
        """Whether a wait was ended."""
        self._lock = threading.Lock()
        self.deadline = 0.0
        """Of the last version, by `clock.monotonic`."""

    def look(self, what: str, others: bool) -> None:
        """Returns if `what` may be waited for; from any thread."""
        asked = self._termination.asked
        if not asked:
            return
        now = self._clock.monotonic()
        with self._lock:
            if self._met is None:
                self._met = now
            most = self._grace if others else min(_MOMENT, self._grace)
            if now < max(self.deadline, self._met + most.total_seconds()):
                return
            first, self.left = not self.left, True
        if first:
            self._leave(asked, what)
        end(asked)


def announce_waiting(asked: int, what: str, step: int, newest: Kept | None) -> None:
    """Says on stderr that a signal has ended a wait, and what is left of the run."""
    if newest is None:
        kept = "no version of this run was saved: started again, it starts over"
    else:
        number = version_number(newest)
        durable = "the durable step" if number is None else f"version {number} of step"
        since = f"{durable} {newest.step}"
        kept = f"nothing was saved since {since}: start the run again to go on from there"
    name = signal.Signals(asked).name
    message = f"{name}: stopped after step {step}, waiting for {what}; {kept}"
    print(f"emberkeep: {message}", file=sys.stderr, flush=True)


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

"""Keeps a group of workers going: hears what they do, starts them again, and has them stop.

Knows nothing of Ray: a group is handed in.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from emberkeep._types import Json
from emberkeep.errors import (
    ConfigError,
    DamageError,
    DataError,
    FencedError,
    FormatError,
    GradientError,
    IdError,
    SecurityError,
    ServerError,
    StateError,
    TableFullError,
)
from emberkeep.keeper.signals import Termination, announce, end
from emberkeep.server.ray.ray_workers import Failure, Mailbox
from emberkeep.train.hooks import Hook, Step

ATTEMPTS = 4
"""So often workers are started without a new version in between."""

_POLL_SECONDS = 0.2
# What they would meet again.
_FINAL = (
    ConfigError, DamageError, DataError, FencedError, FormatError, GradientError, IdError,
    SecurityError, TableFullError,
)  # fmt: skip


class Relay(Hook):
    """In rank 0: sends all that a hook may hear to the process that has started the workers, and
    stops the run when that asks for it."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def on_begin(self, stop: Callable[[int], object]) -> None:
        self._mailbox.on_ask(stop)
        self._mailbox.send(("begin",))

    def on_step(self, step: Step) -> None:
        self._mailbox.send(("step", asdict(step)))

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        self._mailbox.send(("event", event, details))

    def on_trained(self) -> None:
        self._mailbox.send(("trained",))

    def warn(self, message: str) -> None:
        self._mailbox.send(("warning", message))


class Group(Protocol):
    """Workers that were started, once."""

    ended: bool
    result: Json | None
    failures: list[Failure]

    def poll(self, seconds: float) -> list[Any]: ...

    def ask_to_stop(self, number: int) -> None: ...

    def close(self) -> None: ...


class Supervisor:
    """Runs workers to their end.

    - `hooks` hear what a hook of rank 0 would.
    - When workers fail they are started again, at most `ATTEMPTS` times without a new version; if
      the run is not `kept`, only as long as no step was taken. What they would meet again is
      raised.
    - `fresh` starts the run over once, whenever that has happened.
    - SIGTERM and Ctrl-C have the workers stop after a step with a version, as in one process.
      Before their first step, and after their last version, signals act at once.
    """

    def __init__(
        self, start: Callable[[bool], Group], hooks: Sequence[Hook], *, kept: bool, fresh: bool
    ) -> None:
        self._start = start
        self._hooks = hooks
        self._kept = kept
        self._fresh = fresh
        self._failed = 0
        self._began = False
        self._stepped = False
        self._stopped = False
        self._step = 0
        self._saved: int | None = None
        self._termination: Termination | None = None

    def run(self) -> Json:
        """What rank 0 has returned."""
        try:
            while True:
                group = self._start(self._fresh)
                try:
                    self._follow(group)
                finally:
                    if not group.ended:
                        group.close()
                asked = self._asked()
                if self._stopped or (asked and group.failures):
                    self._leave(asked or signal.SIGTERM)
                if not group.failures:
                    assert group.result is not None
                    return group.result
                self._consider(group.failures)
        finally:
            self._listen(False)

    def _follow(self, group: Group) -> None:
        self._began = self._stepped = False
        passed_on = False
        while not group.ended:
            for message in group.poll(_POLL_SECONDS):
                self._hear(*message)
            asked = self._asked()
            if asked and not passed_on:
                if not self._began:
                    self._leave(asked)  # they are starting again: nothing is new since the version
                group.ask_to_stop(asked)
                passed_on = True

    def _hear(self, kind: str, *content: Any) -> None:
        if kind == "begin":
            self._began = True
            self._listen(True)
        elif kind == "step":
            step = Step(**content[0])
            self._stepped, self._step = True, step.number
            for hook in self._hooks:
                hook.on_step(step)
        elif kind == "trained":
            self._listen(False)
        elif kind == "warning":
            warnings.warn(content[0], stacklevel=2)
        else:
            self._note(*content)
            self._tell(*content)

    def _note(self, event: str, details: Json) -> None:
        if event == "started_over":
            self._fresh = False
        elif event in ("saved", "resumed"):
            if event == "saved" and details["step"] > (self._saved or 0):
                self._failed = 0
            self._saved = details["step"]
            self._step = max(self._step, details["step"])
        elif event == "stopped":
            self._stopped, self._step = True, details["step"]
            self._saved = details["saved_step"]

    def _consider(self, failures: Sequence[Failure]) -> None:
        """Raises what ends the run; returns if the workers are to be started again."""
        for failure in failures:
            # Of a rank that could not agree with rank 0, which says why, it may be about anything.
            own_state = failure.rank == 0 and isinstance(failure.error, StateError)
            if failure.error is not None and (own_state or isinstance(failure.error, _FINAL)):
                raise failure.error
        first = failures[0]
        self._failed += 1
        if self._stepped and not self._kept:
            raise ServerError(
                f"the workers failed, and what they trained is lost: {first.reason}; set "
                "checkpoint.path, and they are started again from the newest version"
            )
        if self._failed >= ATTEMPTS:
            raise ServerError(
                f"the workers failed {ATTEMPTS} times without a new version, the last time: "
                f"{first.reason}"
            )
        details = {"reason": first.reason, "attempt": self._failed + 1, "attempts": ATTEMPTS}
        self._tell("restarting", details)

    def _tell(self, event: str, details: Json) -> None:
        for hook in self._hooks:
            hook.on_event(event, details)

    def _listen(self, wanted: bool) -> None:
        """Whether a signal asks the workers to stop, or acts as if nobody listened."""
        if wanted and self._termination is None:
            self._termination = Termination()
        elif not wanted and self._termination is not None:
            self._termination.close()
            self._termination = None

    def _asked(self) -> int:
        return 0 if self._termination is None else self._termination.asked

    def _leave(self, asked: int) -> NoReturn:
        announce(asked, self._step, self._saved)
        end(asked)

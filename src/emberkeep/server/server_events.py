"""What a server tells of itself, and the last of it for its status."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from emberkeep._types import Json
from emberkeep.errors import EmberkeepError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

OnEvent = Callable[[str, Json], object]

# Clients come and go: the last thing that happened to the rows is more than that.
_PASSING = ("connected", "disconnected", "refused_token", "refused")
_MOST_REFUSED = 64


class ServerEvents:
    """Hands events on to `on_event`; counts connections and those that were refused.

    Safe from several threads.
    """

    def __init__(self, on_event: OnEvent | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._on_event = on_event
        self._clock = clock
        self._lock = threading.Lock()
        self.last: Json | None = None
        """The last event, with its time (Unix); None if there was none yet."""
        self.streams = 0
        """Connections on which rows are pulled and pushed, and streams of parity."""
        self.connections = 0
        """All of them so far."""
        self.refused_tokens = 0
        self.refused_trainers = 0
        self._refused: dict[tuple[str, str], type] = {}
        self.expired_leases = 0

    def __call__(self, event: str, details: Json) -> None:
        with self._lock:
            self.refused_trainers += event == "refused"
            self.expired_leases += event == "lease_expired"
        if event not in _PASSING:
            self.last = {"event": event, "at": self._clock.now().timestamp(), **details}
        if self._on_event is not None:
            self._on_event(event, details)

    @contextmanager
    def connected(self, peer: str, run: str | None) -> Iterator[None]:
        """A client's stream, for as long as the body lasts."""
        with self._lock:
            self.streams += 1
            self.connections += 1
        about = {"peer": peer, "run": run}
        start = self._clock.monotonic()
        self("connected", about)
        try:
            yield
        finally:
            with self._lock:
                self.streams -= 1
            seconds = round(self._clock.monotonic() - start, 3)
            self("disconnected", {**about, "seconds": seconds})

    @contextmanager
    def refusing(self, run: str, trainer: str) -> Iterator[None]:
        """A trainer is refused where the body raises: its own words are on another machine. That is
        said once, though it asks again and again until another's lease is over."""
        try:
            yield
        except EmberkeepError as error:
            with self._lock:
                known = self._refused.get((run, trainer)) is type(error)
                self._refused[run, trainer] = type(error)
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
            if not known:
                self("refused", {"run": run, "trainer": trainer, "error": str(error)})
            raise
        with self._lock:
            self._refused.pop((run, trainer), None)

    def refuse_token(self, method: str) -> None:
        """A call without the token, or with a wrong one, was refused."""
        with self._lock:
            self.refused_tokens += 1
        self("refused_token", {"call": method, "refused": self.refused_tokens})

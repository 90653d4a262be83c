"""When a server ends that was asked to."""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

from emberkeep.server.server_end import ServerEnd
from emberkeep.testing.virtual_clock import VirtualClock

GRACE = timedelta(seconds=120)


class Server:
    """A server that a run needs until some instant."""

    def __init__(self, needed_until: float) -> None:
        self.clock = VirtualClock(pace=500)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.looked = 0
        self.needed_until = self.clock.monotonic() + needed_until
        self.started = self.clock.monotonic()
        self.end = ServerEnd(self._needed, GRACE, self.clock)

    def _needed(self) -> bool:
        self.looked += 1
        return self.clock.monotonic() < self.needed_until

    def waited(self) -> float:
        self.end.wait(lambda event, details: self.events.append((event, details)))
        return self.clock.monotonic() - self.started


def test_a_server_that_nobody_needs_ends_at_once() -> None:
    server = Server(needed_until=0)
    server.end.hear(signal.SIGTERM)
    assert server.waited() == 0
    assert server.events == []


def test_it_serves_on_until_its_run_has_ended() -> None:
    server = Server(needed_until=7)
    server.end.hear(signal.SIGINT)
    assert 7 <= server.waited() < 10
    ((event, details),) = server.events
    assert (event, details["signal"], details["grace_seconds"]) == ("ending", "SIGINT", 120)


def test_it_serves_on_for_its_grace_at_most() -> None:
    server = Server(needed_until=10_000)
    server.end.hear(signal.SIGTERM)
    assert 120 <= server.waited() < 125


def test_a_second_signal_ends_it() -> None:
    server = Server(needed_until=10_000)
    server.end.hear(signal.SIGTERM)
    server.end.hear(signal.SIGTERM)
    assert server.waited() == 0


def test_it_ends_with_what_started_it() -> None:
    server = Server(needed_until=10_000)
    server.end.now()
    assert server.waited() == 0
    assert server.events == []

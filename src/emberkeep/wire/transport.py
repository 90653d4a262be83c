"""How messages reach a server: bytes on deadlines, whatever they mean.

`Connection` gives them their meaning. `FlightTransport` carries them to other processes;
`emberkeep.testing.local_transport` to servers that are objects of this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from datetime import timedelta
from typing import Any, Protocol

from emberkeep._types import U8
from emberkeep.wire.security import Security


class Channel(Protocol):
    """One connection to one server: calls, and one stream of requests and replies.

    A server that does not answer in time, or cannot be reached, is `ServerError`; the channel is of
    no use then.
    """

    def call(self, kind: str, content: bytes, deadline: timedelta) -> Iterator[Any]:
        """One question; the frames of its answer, as bytes, all of them within the deadline."""

    def open(self, command: bytes) -> None:
        """Opens the stream. `call` something first: that connects, on its deadline."""

    def send(self, blob: U8, deadline: timedelta) -> None:
        """Sends a request; replies come in the order of sending, within the deadline."""

    def receive(self) -> U8: ...

    def settled(self) -> None:
        """Nothing is awaited any more."""

    def close(self) -> None:
        """Ends the connection; what is still awaited is given up."""


class Transport(Protocol):
    """Reaches servers by their addresses. Safe to use from many threads."""

    def dial(self, address: str, security: Security) -> Channel:
        """A channel of its own, which connects with its first call."""

    def executor(self, most: int, name: str) -> Executor:
        """What calls to several servers, `most` at once, are made on."""

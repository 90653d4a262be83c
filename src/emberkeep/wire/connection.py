"""One connection to a shard server: actions, and one stream for pulls and pushes, on deadlines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy.typing as npt

from emberkeep._types import U8, Json
from emberkeep.errors import ProtocolError
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import PROTOCOL, check_protocol, error_from, pack_frame, unpack_frame
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport


class Connection:
    """A client's side of one connection. Used by one thread at a time; made again after any
    `ServerError`. Errors that the server itself raised come out as what they are."""

    def __init__(
        self, address: str, security: Security, incarnation: int = 0, *,
        transport: Transport = FLIGHT,
    ) -> None:  # fmt: skip
        self.address = address
        self._incarnation = incarnation
        self._channel = transport.dial(address, security)

    # -- actions ---------------------------------------------------------------------------------

    def act(
        self,
        kind: str,
        header: Json | None = None,
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        deadline: timedelta,
    ) -> tuple[Json, dict[str, npt.NDArray[Any]]]:
        """One question, one answer."""
        answers = list(self.stream(kind, header, arrays, deadline=deadline))
        if len(answers) != 1:
            raise ProtocolError(f"{kind} was answered by {len(answers)} frames")
        return answers[0]

    def stream(
        self,
        kind: str,
        header: Json | None = None,
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        *,
        deadline: timedelta,
    ) -> Iterator[tuple[Json, dict[str, npt.NDArray[Any]]]]:
        """One question, the frames of its answer."""
        content = pack_frame(header or {}, arrays)
        for body in self._channel.call(kind, content, deadline):
            answer = unpack_frame(body)
            if "error" in answer[0]:
                raise error_from(answer[0])
            yield answer

    # -- pulls and pushes ------------------------------------------------------------------------

    def open(self, deadline: timedelta) -> Json:
        """Greets the server and opens the stream; returns what it says of itself."""
        greeting, _ = self.act("status", deadline=deadline)
        check_protocol(self.address, greeting)
        command = {"protocol": PROTOCOL, "incarnation": self._incarnation}
        self._channel.open(json.dumps(command).encode())
        return greeting

    def send(self, blob: U8, deadline: timedelta) -> None:
        """Sends a request; `receive` its reply within the deadline, in the order of sending."""
        self._channel.send(blob, deadline)

    def receive(self) -> U8:
        return self._channel.receive()

    def settled(self) -> None:
        """Nothing is awaited any more."""
        self._channel.settled()

    def close(self) -> None:
        """Ends the connection; what is still awaited is given up."""
        self._channel.close()

"""One connection to a shard server: actions, and one stream for pulls and pushes, on deadlines.

Everything waits for a bounded time. A stream has no deadline of its own in Flight, so one thread
watches all of them and cancels what is overdue.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import U8, Json
from emberkeep.errors import ProtocolError, SecurityError, ServerError
from emberkeep.runtime.background import Retry, Worker
from emberkeep.wire.protocol import PROTOCOL, check_protocol, error_from, pack_frame, unpack_frame
from emberkeep.wire.security import HEADER, Security, read_pem, split_address

_TICK_SECONDS = 0.05
# A connection attempt that nobody answers ends after this; Flight's default is 20 s.
_CONNECT_MS = 2000
_OPTIONS = [
    ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise a replacement inherits how long its predecessor's address has been failing.
    ("grpc.use_local_subchannel_pool", 1),
]


def blob_of(chunk: Any) -> U8:
    """The message of what a stream has brought, as a view of it; anything else is
    `ProtocolError`."""
    content = chunk.app_metadata
    if chunk.data is not None or content is None:
        raise ProtocolError("a message is bytes, and no record batch")
    blob: U8 = np.frombuffer(content, np.uint8)
    return blob


class Connection:
    """A client's side of one connection. Used by one thread at a time; made again after any
    `ServerError`. Errors that the server itself raised come out as what they are."""

    def __init__(self, address: str, security: Security, incarnation: int = 0) -> None:
        import pyarrow.flight as flight

        scheme, host, port = split_address(address)
        security.check_address(address)
        self.address = address
        self.due: float | None = None
        self._incarnation = incarnation
        headers = [] if security.token is None else [(HEADER.encode(), security.token.encode())]
        self._headers = headers
        options: dict[str, Any] = {"generic_options": _OPTIONS}
        if scheme == "grpc+tls" and security.authority is not None:
            options["tls_root_certs"] = read_pem(security.authority)
        self._client = flight.FlightClient(f"{scheme}://{host}:{port}", **options)
        self._writer: Any = None
        self._reader: Any = None
        _watch(self)

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
        import pyarrow.flight as flight

        content = pack_frame(header or {}, arrays)
        try:
            results = self._client.do_action(
                flight.Action(kind, content), self._call_options(deadline)
            )
            for result in results:
                answer, its = unpack_frame(result.body)
                if "error" in answer:
                    raise error_from(answer)
                yield answer, its
        except flight.FlightError as error:
            raise self._failed(kind, error) from None

    # -- pulls and pushes ------------------------------------------------------------------------

    def open(self, deadline: timedelta) -> Json:
        """Greets the server and opens the stream; returns what it says of itself."""
        import pyarrow.flight as flight

        # The action connects, on its deadline; opening a stream has none.
        greeting, _ = self.act("status", deadline=deadline)
        check_protocol(self.address, greeting)
        command = json.dumps({"protocol": PROTOCOL, "incarnation": self._incarnation}).encode()
        try:
            self._writer, self._reader = self._client.do_exchange(
                flight.FlightDescriptor.for_command(command), self._call_options(None)
            )
        except flight.FlightError as error:
            raise self._failed("opening a stream", error) from None
        return greeting

    def send(self, blob: U8, deadline: timedelta) -> None:
        """Sends a request; `receive` its reply within the deadline, in the order of sending."""
        if self._writer is None:
            raise ServerError(f"{self.address}: there is no stream")
        import pyarrow as pa

        self.due = time.monotonic() + deadline.total_seconds()
        try:
            self._writer.write_metadata(pa.py_buffer(blob))
        except pa.ArrowException as error:
            raise self._failed("sending", error) from None

    def receive(self) -> U8:
        import pyarrow as pa

        try:
            blob = blob_of(self._reader.read_chunk())
        except StopIteration:
            raise ServerError(f"{self.address} has ended the stream") from None
        except pa.ArrowException as error:
            raise self._failed("a request", error) from None
        return blob

    def settled(self) -> None:
        """Nothing is awaited any more."""
        self.due = None

    def cancel(self) -> None:
        """Ends the stream, also for a thread that waits on it; safe from any thread."""
        self.due = None
        if self._reader is not None:
            self._reader.cancel()

    def close(self) -> None:
        """Ends the connection; what is still awaited is given up."""
        import pyarrow as pa

        idle, writer, reader = self.due is None, self._writer, self._reader
        self._writer = self._reader = None
        if writer is not None:
            with suppress(pa.ArrowException):
                if not idle:
                    reader.cancel()
                writer.close()
        with suppress(pa.ArrowException):
            self._client.close()

    def _call_options(self, deadline: timedelta | None) -> Any:
        import pyarrow.flight as flight

        seconds = None if deadline is None else deadline.total_seconds()
        return flight.FlightCallOptions(timeout=seconds, headers=self._headers)

    def _failed(self, what: str, error: Exception) -> ServerError | SecurityError:
        import pyarrow.flight as flight

        reason = str(error).partition(". gRPC client debug context")[0].splitlines()[0]
        reason = reason.partition(". Detail: ")[0]
        if isinstance(error, flight.FlightUnauthenticatedError):
            return SecurityError(
                f"{self.address} refuses: {reason}; give the token that its server was started "
                "with (EMBERKEEP_TOKEN, or a token file)"
            )
        if isinstance(error, flight.FlightCancelledError | flight.FlightTimedOutError):
            return ServerError(f"{self.address} did not answer {what} in time")
        return ServerError(f"{self.address}: {what} failed: {reason}")


_watched: weakref.WeakSet[Connection] = weakref.WeakSet()
_watched_lock = threading.Lock()


def _watch(connection: Connection) -> None:
    with _watched_lock:
        _watched.add(connection)
    _deadlines.wake()


def _cancel_overdue() -> float | None:
    """Cancels what is overdue, as long as there is anything to watch."""
    with _watched_lock:
        connections = list(_watched)
    now, failure = time.monotonic(), None
    for connection in connections:
        due = connection.due
        if due is not None and now > due:
            try:
                connection.cancel()
            except BaseException as error:  # the deadlines of others are kept
                failure = error
    if failure is not None:
        raise failure
    return _TICK_SECONDS if connections else None


def _start_watching() -> None:
    """In a forked child: its connections have deadlines of their own."""
    global _deadlines, _watched_lock
    _deadlines, _watched_lock = _watcher(), threading.Lock()
    _watched.clear()


def _watcher() -> Worker:
    # Without it every call would wait for ever, so it never gives up.
    return Worker("emberkeep-deadlines", _cancel_overdue, retry=Retry(limit=None))


_deadlines = _watcher()
os.register_at_fork(after_in_child=_start_watching)

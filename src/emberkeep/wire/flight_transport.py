"""Messages over Arrow Flight.

Everything waits for a bounded time. A stream has no deadline of its own in Flight, so one thread
watches all of them and cancels what is overdue.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep._types import U8
from emberkeep.errors import ProtocolError, SecurityError, ServerError
from emberkeep.runtime.background import Retry, Worker
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.crew import Crew
from emberkeep.wire.private_socket import SCHEME, own_token
from emberkeep.wire.security import HEADER, Security, read_pem, split_address
from emberkeep.wire.tls_cause import tls_cause
from emberkeep.wire.transport import Transport

# What fails in gRPC comes out as an error of ours; its own lines repeat it, again and again. It
# looks when its first client or server is made.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

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


class FlightTransport:
    """To servers of other processes; deadlines of streams are those of `clock`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock

    def dial(self, address: str, security: Security) -> FlightChannel:
        return FlightChannel(address, security, self._clock)

    def executor(self, most: int, name: str) -> Executor:
        return Crew(most, name, clock=self._clock)


FLIGHT: Transport = FlightTransport()


class FlightChannel:
    """A connection that Flight makes."""

    def __init__(self, address: str, security: Security, clock: Clock) -> None:
        import pyarrow.flight as flight

        scheme, host, port = split_address(address)
        security.check_address(address)
        self._address = address
        self._security = security
        self._clock = clock
        self._due: float | None = None
        # A socket proves whose server it is; to others the user's own token is not shown.
        token = security.token or (own_token() if scheme == SCHEME else None)
        self._headers = [] if token is None else [(HEADER.encode(), token.encode())]
        options: dict[str, Any] = {"generic_options": _OPTIONS}
        if scheme == "grpc+tls":
            options |= _credentials(security)
        where = address if scheme == SCHEME else f"{scheme}://{host}:{port}"
        self._client = flight.FlightClient(where, **options)
        self._writer: Any = None
        self._reader: Any = None
        _watch(self)

    def call(self, kind: str, content: bytes, deadline: timedelta) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.flight as flight

        try:
            for result in self._client.do_action(
                flight.Action(kind, content), self._call_options(deadline)
            ):
                yield result.body
        except pa.ArrowException as error:  # also of a channel that another thread has closed
            raise self._failed(kind, error) from None

    def open(self, command: bytes) -> None:
        import pyarrow as pa
        import pyarrow.flight as flight

        try:
            writer, reader = self._client.do_exchange(
                flight.FlightDescriptor.for_command(command), self._call_options(None)
            )
        except pa.ArrowException as error:
            raise self._failed("opening a stream", error) from None
        # In this order: another thread that closes what it finds can end the wait of this one.
        self._reader, self._writer = reader, writer

    def send(self, blob: U8, deadline: timedelta) -> None:
        import pyarrow as pa

        writer = self._writer
        if writer is None:
            raise ServerError(f"{self._address}: there is no stream")
        self._due = self._clock.monotonic() + deadline.total_seconds()
        try:
            writer.write_metadata(pa.py_buffer(blob))
        except pa.ArrowCapacityError:
            # Nobody is dead, and to send it again would fail again.
            raise ProtocolError(
                f"a message of {blob.size} bytes to {self._address} cannot be sent, as Flight "
                "carries less than 2 GiB; nothing was done: use smaller batches"
            ) from None
        except pa.ArrowException as error:
            raise self._failed("sending", error) from None

    def receive(self) -> U8:
        import pyarrow as pa

        reader = self._reader
        if reader is None or self._due is None:  # closed or cancelled: nobody would end the wait
            raise ServerError(f"{self._address}: nothing is awaited any more")
        try:
            blob = blob_of(reader.read_chunk())
        except StopIteration:
            raise ServerError(f"{self._address} has ended the stream") from None
        except pa.ArrowException as error:
            raise self._failed("a request", error) from None
        return blob

    def settled(self) -> None:
        self._due = None

    def overdue(self) -> bool:
        due = self._due
        return due is not None and self._clock.monotonic() > due

    def cancel(self) -> None:
        """Ends the stream, also for a thread that waits on it; safe from any thread."""
        self._due = None
        reader = self._reader
        if reader is not None:
            reader.cancel()

    def close(self) -> None:
        """Waits for nobody: a stream that ended with its server's consent would never end where
        that one is stopped or cut off."""
        import pyarrow as pa

        writer, reader = self._writer, self._reader
        self._writer = self._reader = self._due = None
        try:
            with suppress(pa.ArrowException):
                if reader is not None:
                    reader.cancel()
                if writer is not None:
                    writer.close()
        finally:
            with suppress(pa.ArrowException):
                self._client.close()

    def __del__(self) -> None:
        """A stream that is dropped, by a run that ends with an error say, is given up: Arrow would
        wait for its server, and print what that comes to."""
        with suppress(BaseException):  # also of an interpreter that is about to end
            self.close()

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
                f"{self._address} refuses: {reason}; give the token that its server was started "
                "with (EMBERKEEP_TOKEN, or a token file)"
            )
        if isinstance(error, flight.FlightUnavailableError):
            cause = tls_cause(self._address, self._security, reason)
            if cause is not None:
                return cause
        if isinstance(error, flight.FlightCancelledError | flight.FlightTimedOutError):
            return ServerError(f"{self._address} did not answer {what} in time")
        return ServerError(f"{self._address}: {what} failed: {reason}")


def _credentials(security: Security) -> dict[str, bytes]:
    """What proves each side to the other over TLS."""
    given = {
        "tls_root_certs": security.authority,
        "cert_chain": security.certificate,
        "private_key": security.key,
    }
    return {name: read_pem(pem) for name, pem in given.items() if pem is not None}


_watched: weakref.WeakSet[FlightChannel] = weakref.WeakSet()
_watched_lock = threading.Lock()


def _watch(channel: FlightChannel) -> None:
    with _watched_lock:
        _watched.add(channel)
    _deadlines.wake()


def _cancel_overdue() -> float | None:
    """Cancels what is overdue, as long as there is anything to watch."""
    with _watched_lock:
        channels = list(_watched)
    failure = None
    for channel in channels:
        try:
            if channel.overdue():
                channel.cancel()
        except BaseException as error:  # the deadlines of others are kept
            failure = error
    if failure is not None:
        raise failure
    return _TICK_SECONDS if channels else None


def _start_watching() -> None:
    """In a forked child: its channels have deadlines of their own."""
    global _deadlines, _watched_lock
    _deadlines, _watched_lock = _watcher(), threading.Lock()
    _watched.clear()


def _watcher() -> Worker:
    # Without it every call would wait for ever, so it never gives up.
    return Worker("emberkeep-deadlines", _cancel_overdue, retry=Retry(limit=None))


_deadlines = _watcher()
os.register_at_fork(after_in_child=_start_watching)

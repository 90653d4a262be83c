"""A served shard behind Arrow Flight: streams for pulls and pushes, actions for the rest.

Back-pressure: each stream has one request in work and reads the next when that one is answered; the
transport holds a sender back meanwhile. So memory is bounded by streams times the size of a
request, and what comes beyond `max_streams` is refused.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from socket import create_server
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from emberkeep._types import U8
from emberkeep.errors import ProtocolError, SecurityError, ServerError
from emberkeep.server.epoch import Session
from emberkeep.server.server_events import ServerEvents
from emberkeep.server.shard_service import ShardService
from emberkeep.wire.flight_transport import blob_of
from emberkeep.wire.private_socket import PrivateSocket
from emberkeep.wire.protocol import check_protocol, refusal
from emberkeep.wire.security import HEADER, Security, read_pem

MAX_STREAMS = 256
MAX_ACTIONS = 64
# Each of these is bounded alone: whatever other actions wait for, leases are renewed and let go,
# and a server that answers is known to be alive.
_OWN_BOUND = ("renew", "status", "release")
_MAX_COMMAND_NBYTES = 4096


class ShardServer(flight.FlightServerBase):  # type: ignore[misc]
    """Listens on a socket of this user, or on `host:port` (0: any free one), for a `ShardService`.

    A malformed message gets an error and ends its stream; nothing that arrives ends the server.
    The token is looked at once gRPC has read the request, whatever its length. So `host:port`
    without TLS is for tests, on the loopback interface.
    """

    def __init__(
        self,
        served: ShardService,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        socket: PrivateSocket | None = None,
        security: Security | None = None,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        security = security or Security()
        if socket is None:
            security.check_listening(host)
        self.served = served
        served.security = security
        self.host = host
        self.tls = security.tls and socket is None
        self._socket = socket
        self._streams = threading.BoundedSemaphore(max_streams)
        self._actions = threading.BoundedSemaphore(MAX_ACTIONS)
        self._urgent = {kind: threading.BoundedSemaphore(MAX_ACTIONS) for kind in _OWN_BOUND}
        at = f"{host}:{port}" if socket is None else str(socket.path)
        scheme = "grpc+tls" if self.tls else "grpc+tcp"
        try:
            super().__init__(
                f"{scheme}://{at}" if socket is None else socket.address,
                middleware={"token": _Door(security, served.events)},
                **(_tls_options(security) if self.tls else {}),
            )
        except pa.ArrowException as error:
            reason = _refused(host, port) if socket is None else None
            if reason is None and self.tls:
                raise SecurityError(
                    "TLS cannot begin with this certificate and key: give a PEM certificate (with "
                    "its chain) and the PEM key that belongs to it"
                ) from None
            reason = reason or str(error).splitlines()[0]
            raise ServerError(
                f"cannot listen on {at}: {reason}; choose another --host or --port, or "
                "end what listens there"
            ) from None

    @property
    def address(self) -> str:
        """What a client is sent."""
        if self._socket is not None:
            return self._socket.address
        return f"{'grpc+tls' if self.tls else 'grpc+tcp'}://{self.host}:{self.port}"

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        if not self._streams.acquire(blocking=False):
            raise flight.FlightUnavailableError("too many streams are open on this server")
        try:
            self._check_greeting(descriptor.command)
            epoch = self.served.epoch
            run = None if epoch is None else epoch.coordinator
            with self.served.events.connected(context.peer(), run):
                self._answer_all(reader, writer)
        finally:
            self._streams.release()

    def _check_greeting(self, command: bytes | None) -> None:
        try:
            greeting = json.loads((command or b"")[:_MAX_COMMAND_NBYTES])
            check_protocol("the client", {"protocol": greeting["protocol"]})
        except ProtocolError as error:
            raise flight.FlightServerError(str(error)) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise flight.FlightServerError("a stream begins with the protocol's number") from None

    def _answer_all(self, reader: Any, writer: Any) -> None:
        session = Session()
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            except pa.ArrowException:
                return  # the client is gone, or never spoke our language
            try:
                reply = self.served.answer(blob_of(chunk), session)
                last = False
            except ProtocolError as error:
                reply, last = refusal(error, 0), True
            except Exception as error:  # a bug must end one request, not the server
                self.served.failed(error)
                reply, last = refusal(error, 0), True
            try:
                _write(writer, reply)
            except pa.ArrowException:
                return  # the client is gone; it will ask again
            if last:
                return

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        actions = self._urgent.get(action.type, self._actions)
        if not actions.acquire(blocking=False):
            raise flight.FlightUnavailableError("too many actions are under way on this server")
        try:
            for frame in self.served.answer_action(action.type, action.body):
                yield flight.Result(frame)
        finally:
            actions.release()


def _write(writer: Any, reply: U8) -> None:
    """Sends a reply; one that Flight cannot carry is refused in its place, not left out: its client
    would take this server for dead, and ask the next one."""
    try:
        writer.write_metadata(pa.py_buffer(reply))
    except pa.ArrowCapacityError as error:
        too_large = ProtocolError(f"a reply of {reply.size} bytes cannot be sent: {error}")
        writer.write_metadata(pa.py_buffer(refusal(too_large, 0)))


def _tls_options(security: Security) -> dict[str, Any]:
    assert security.certificate is not None
    assert security.key is not None
    options: dict[str, Any] = {
        "tls_certificates": [(read_pem(security.certificate), read_pem(security.key))]
    }
    if security.authority is not None:
        # A client without a certificate of its own sends nothing that gRPC would read.
        options |= {"verify_client": True, "root_certificates": read_pem(security.authority)}
    return options


def _refused(host: str, port: int) -> str | None:
    """Why the system lets nobody listen there: Flight itself does not say."""
    try:
        create_server((host, port)).close()
    except OSError as error:
        return error.strerror if error.errno is None else os.strerror(error.errno)
    return None


class _Door(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Lets in who brings the token."""

    def __init__(self, security: Security, events: ServerEvents) -> None:
        super().__init__()
        self._security = security
        self._events = events

    def start_call(self, info: Any, headers: Any) -> None:
        given = headers.get(HEADER) or [None]
        if not self._security.admits(given[0]):
            self._events.refuse_token(str(info.method))
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")

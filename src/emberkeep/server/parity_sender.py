"""One shard's stream on its way to one host, server to server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

from emberkeep.erasure.codes import Placement
from emberkeep.erasure.messages import Message
from emberkeep.erasure.peers import Peer
from emberkeep.erasure.stream_frames import pack_messages
from emberkeep.errors import StreamError
from emberkeep.runtime.background import Retry, Worker
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import error_from, unpack_frame
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

# Messages that wait travel together, up to about so many bytes of rows, and up to so many: one
# without rows still names the state of all tables.
_BATCH_NBYTES = 2**23
_BATCH_MESSAGES = 256
# So often a host that is left out is asked whether it answers.
_PROBE_SECONDS = 1.0
# A message that could not be sent is sent again: a host takes each of them once.
_RETRY = Retry(limit=None, first=timedelta(milliseconds=20), most=timedelta(seconds=1))


class Sender:
    """Sends messages in order, each until the host holds it; a thread of its own.

    `acknowledged(sender, number)` hears what the host holds, `stuck(sender)` that it cannot be
    reached or refuses, or that sending met any other error. A host that is gone is tried until the
    sender is closed, ever more rarely, and whenever there is something new to send: the caller that
    replaces it closes this one.

    A host that is left out (`leave_out`) is sent nothing more, and asked whether it `answers`.
    """

    def __init__(
        self,
        peer: Peer,
        placement: Placement,
        *,
        security: Security,
        deadline: timedelta,
        acknowledged: Callable[[Sender, int], object],
        stuck: Callable[[Sender], object],
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.peer = peer
        self.trouble = ""
        """Why messages do not get through at the moment."""
        self.waiting_nbytes = 0
        self.messages = 0
        self.sent_nbytes = 0
        self.answers = False
        """Whether a host that is left out could be reached again."""
        self._placement = placement
        self._security = security
        self._deadline = deadline
        self._transport = transport
        self._acknowledged = acknowledged
        self._stuck = stuck
        self._queue: deque[Message] = deque()
        self._connection: Connection | None = None
        self._closed = self._left_out = False
        self._clock = clock
        # When something got through last, or the first of what waits was posted.
        self._heard = 0.0
        self._worker = Worker(
            "emberkeep-parity",
            self._send_next,
            on_error=self._failed,
            retry=_RETRY,
            clock=clock,
        )
        self._changed = self._worker.changed

    @property
    def failing_since(self) -> float | None:
        """The time (Unix) since when nothing gets through; None while messages do."""
        return self._worker.failed_since

    @property
    def silent_seconds(self) -> float:
        """For how long the host has held nothing of what waits; 0 if nothing does."""
        with self._changed:
            return self._clock.monotonic() - self._heard if self._queue else 0.0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def post(self, message: Message) -> None:
        """Takes a message; never waits."""
        with self._changed:
            if not self._queue:
                self._heard = self._clock.monotonic()
            self._queue.append(message)
            self.waiting_nbytes += message.body.nbytes
            self.messages += 1
        self._worker.wake()

    def leave_out(self) -> None:
        """Sends nothing more, and finds out when the host answers again."""
        with self._changed:
            self._left_out = True
            self._queue.clear()
            self.waiting_nbytes = 0
        self._worker.wake()

    def close(self) -> None:
        """Sends nothing more; what is being sent ends by its deadline."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self.waiting_nbytes = 0
        if self.messages:
            self._worker.wake()  # the thread closes its connection, and ends

    def _send_next(self) -> float | None:
        if self._closed:
            self._disconnect()
            self._worker.stop()
            return None
        if self._left_out:
            self._disconnect()
            self._connected()
            self.answers, self.trouble = True, ""
            return _PROBE_SECONDS
        batch = self._next()
        if not batch:
            return None
        held = self._send(self._connected(), batch)
        self.trouble = ""
        with self._changed:
            self._heard = self._clock.monotonic()
            while self._queue and self._queue[0].number <= held:
                self.waiting_nbytes -= self._queue.popleft().body.nbytes
        self._acknowledged(self, held)
        return 0

    def _connected(self) -> Connection:
        if self._connection is None:
            connection = Connection(self.peer.address, self._security, transport=self._transport)
            self._connection = connection
            connection.open(self._deadline)
        return self._connection

    def _failed(self, error: BaseException) -> None:
        self._disconnect()
        self.answers = False
        self.trouble = str(error) or type(error).__name__
        self._stuck(self)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _next(self) -> list[Message]:
        """What is to be sent next."""
        with self._changed:
            batch, nbytes = [], 0
            for message in self._queue:
                batch.append(message)
                nbytes += message.body.nbytes
                if nbytes > _BATCH_NBYTES or len(batch) == _BATCH_MESSAGES:
                    break
            return batch

    def _send(self, connection: Connection, batch: list[Message]) -> int:
        blob = pack_messages(
            batch, host=self.peer.index, host_epoch=self.peer.epoch, placement=self._placement
        )
        connection.send(blob, self._deadline)
        reply, _ = unpack_frame(connection.receive())
        connection.settled()
        if "error" in reply:
            raise error_from(reply)
        self.sent_nbytes += blob.nbytes
        held = int(reply["held"])
        if held < batch[0].number - 1:
            raise StreamError(f"{self.peer.address} holds {held} where {batch[0].number} comes")
        return held

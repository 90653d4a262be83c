"""One shard's stream on its way to one host, server to server."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from emberkeep.erasure.codes import Placement
from emberkeep.erasure.messages import Message
from emberkeep.erasure.peers import Peer
from emberkeep.erasure.stream_frames import pack_messages
from emberkeep.errors import EmberkeepError, StreamError
from emberkeep.wire.connection import Connection
from emberkeep.wire.protocol import error_from, unpack_frame
from emberkeep.wire.security import Security

# Messages that wait travel together, up to about so many bytes.
_BATCH_NBYTES = 2**23
# How long a sender waits to try again: twice as long after each failure.
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0


class Sender:
    """Sends messages in order, each until the host holds it; a thread of its own.

    `acknowledged(sender, number)` is told what the host holds, `stuck(sender)` that it cannot be
    reached or refuses. A host that is gone is tried until the sender is closed, ever more rarely,
    and whenever there is something new to send: whoever replaces it closes this one.
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
    ) -> None:
        self.peer = peer
        self.trouble = ""
        """Why messages do not get through at the moment."""
        self.waiting_nbytes = 0
        self.messages = 0
        self.sent_nbytes = 0
        self._placement = placement
        self._security = security
        self._deadline = deadline
        self._acknowledged = acknowledged
        self._stuck = stuck
        self._queue: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._work, name="emberkeep-parity", daemon=True).start()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def post(self, message: Message) -> None:
        """Takes a message; never waits."""
        with self._changed:
            self._queue.append(message)
            self.waiting_nbytes += message.body.nbytes
            self.messages += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queue.clear()
            self.waiting_nbytes = 0
            self._changed.notify_all()

    def _work(self) -> None:
        connection: Connection | None = None
        pause = _PAUSE_SECONDS
        while batch := self._next():
            posted = self.messages
            try:
                if connection is None:
                    connection = Connection(self.peer.address, self._security)
                    connection.open(self._deadline)
                held = self._send(connection, batch)
            except EmberkeepError as error:
                if connection is not None:
                    connection.close()
                connection = None
                self.trouble = str(error) or "no answer"
                self._stuck(self)
                self._wait(pause, posted)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            self.trouble, pause = "", _PAUSE_SECONDS
            with self._changed:
                while self._queue and self._queue[0].number <= held:
                    self.waiting_nbytes -= self._queue.popleft().body.nbytes
            self._acknowledged(self, held)
        if connection is not None:
            connection.close()

    def _wait(self, seconds: float, posted: int) -> None:
        """Until it is time to try again, or more was posted than `posted` messages; never less
        than the shortest pause: who posts all the time must not keep a dead host under fire."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closed, _PAUSE_SECONDS):
                return
            self._changed.wait_for(
                lambda: self._closed or self.messages > posted, seconds - _PAUSE_SECONDS
            )

    def _next(self) -> list[Message]:
        """What is to be sent next; nothing when the sender is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue)
            if self._closed:
                return []
            batch, nbytes = [], 0
            for message in self._queue:
                batch.append(message)
                nbytes += message.body.nbytes
                if nbytes > _BATCH_NBYTES:
                    break
            return batch

    def _send(self, connection: Connection, batch: list[Message]) -> int:
        blob = pack_messages(
            batch, host=self.peer.index, host_epoch=self.peer.epoch, placement=self._placement
        )
        connection.send(blob, self._deadline)
        told, _ = unpack_frame(connection.receive())
        connection.settled()
        if "error" in told:
            raise error_from(told)
        self.sent_nbytes += blob.nbytes
        held = int(told["held"])
        if held < batch[0].number - 1:
            raise StreamError(f"{self.peer.address} holds {held} where {batch[0].number} comes")
        return held

"""Messages between the shards of one process: a queue for each receiver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from emberkeep.erasure.messages import Message

Letter: TypeAlias = tuple[int, Message]
"""A message and who is to receive it."""


class Mail:
    """Carries messages in the order in which each sender posts them.

    `deliver` has everything received that was posted before it, by calls of `receive` with the
    messages of many. With `start`, a thread of its own does so all the time, and `wait_for_room`
    holds senders while more than `window_nbytes` are under way.
    """

    def __init__(
        self, receivers: int, receive: Callable[[Sequence[Letter]], object], *, window_nbytes: int
    ) -> None:
        self.messages = 0
        self.sent_nbytes = 0
        self._receive = receive
        self._window_nbytes = window_nbytes
        self._queues: list[deque[Message]] = [deque() for _ in range(receivers)]
        self._delivering = threading.Lock()
        self._waiting_nbytes = 0
        self._counting = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False

    @property
    def waiting(self) -> int:
        """How many messages are on their way."""
        return sum(len(queue) for queue in self._queues)

    def post(self, receiver: int, message: Message) -> None:
        """Takes a message; never waits."""
        with self._counting:
            self._queues[receiver].append(message)
            self.messages += 1
            self.sent_nbytes += message.body.nbytes
            self._waiting_nbytes += message.body.nbytes
            if self._thread is not None:
                self._counting.notify_all()

    def deliver(self) -> None:
        """Has everything received that was posted before."""
        with self._delivering:  # what others have taken from a queue is received, too
            while any(self._queues):
                letters = self._take()
                self._receive(letters)
                with self._counting:
                    self._waiting_nbytes -= sum(message.body.nbytes for _, message in letters)
                    self._counting.notify_all()

    def _take(self) -> list[Letter]:
        """Empties all queues."""
        letters: list[Letter] = []
        with self._counting:
            for receiver, queue in enumerate(self._queues):
                letters += [(receiver, message) for message in queue]
                queue.clear()
        return letters

    def drop(self, shards: Collection[int]) -> None:
        """Loses what is on its way from and to shards that are gone."""
        with self._delivering, self._counting:
            for receiver, queue in enumerate(self._queues):
                kept = [m for m in queue if receiver not in shards and m.source not in shards]
                gone = sum(m.body.nbytes for m in queue) - sum(m.body.nbytes for m in kept)
                self._waiting_nbytes -= gone
                queue.clear()
                queue.extend(kept)
            self._counting.notify_all()

    def start(self) -> None:
        """Begins to deliver in the background."""
        self._thread = threading.Thread(target=self._work, name="emberkeep-parity", daemon=True)
        self._thread.start()

    def wait_for_room(self) -> None:
        """Holds a sender while the window is full."""
        with self._counting:
            self._counting.wait_for(
                lambda: self._waiting_nbytes <= self._window_nbytes or self._ended
            )

    def close(self) -> None:
        """Ends the thread, if there is one."""
        with self._counting:
            self._ended = True
            self._counting.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._counting:
                self._counting.wait_for(lambda: self._ended or any(self._queues))
                if self._ended:
                    return
            self.deliver()

"""Messages between the shards of one process: a queue for each receiver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TypeAlias

from emberkeep.erasure.messages import Message
from emberkeep.errors import StoppedError
from emberkeep.runtime.background import Worker, end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

Letter: TypeAlias = tuple[int, Message]
"""A message and who is to receive it."""

# A window is delivered in milliseconds; a longer wait is for something that hangs.
_PATIENCE = timedelta(minutes=5)


class Mail:
    """Carries messages in the order in which each sender posts them.

    `deliver` has everything received that was posted before it, by calls of `receive` with the
    messages of many. With `start`, a thread of its own does so all the time, and `wait_for_room`
    holds senders while more than `window_nbytes` are under way.

    A delivery that fails, in whichever thread, is the last one: some receivers have taken in what
    others have not, and to deliver it again could add it twice. `failed_since` says when that was,
    and `check`, `deliver` and `close` raise it.
    """

    def __init__(
        self, receivers: int, receive: Callable[[Sequence[Letter]], object], *, window_nbytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.messages = 0
        self.sent_nbytes = 0
        self._receive = receive
        self._clock = clock
        self._window_nbytes = window_nbytes
        self._queues: list[deque[Message]] = [deque() for _ in range(receivers)]
        self._delivering = threading.Lock()
        self._waiting_nbytes = 0
        self.failed_since: float | None = None
        self._failure: BaseException | None = None
        # Not repeated, for the same reason.
        self._worker = Worker("emberkeep-parity", self._deliver_and_rest, clock=clock)
        self._counting = self._worker.changed
        self._starts = False

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
        if self._starts:
            self._worker.wake()

    def check(self) -> None:
        """Raises what has ended delivery."""
        if self._failure is not None:
            raise StoppedError(
                "messages to parity hosts are not delivered any more since one could not be: "
                f"{type(self._failure).__name__}: {self._failure}; rows are not protected, but "
                "those in memory are right: save a version, and start again"
            ) from self._failure

    def deliver(self) -> None:
        """Has everything received that was posted before."""
        with self._delivering:  # what others have taken from a queue is received, too
            self.check()
            while any(self._queues):
                try:
                    letters = self._take()
                    self._receive(letters)
                except BaseException as error:
                    self.fail(error)
                    raise
                with self._counting:
                    self._waiting_nbytes -= sum(message.body.nbytes for _, message in letters)
                    self._counting.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more is delivered: parity is not what the rows are."""
        with self._counting:
            if self._failure is None:
                self._failure, self.failed_since = error, self._clock.now().timestamp()
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
        self._starts = True

    def wait_for_room(self) -> None:
        """Holds a sender while the window is full and messages are delivered."""
        if self._waiting_nbytes > self._window_nbytes:
            self._worker.wait(
                lambda: self._waiting_nbytes <= self._window_nbytes or self._failure is not None,
                "room for messages to parity hosts", _PATIENCE,
            )  # fmt: skip

    def close(self) -> None:
        """Ends the thread, if there is one, and raises what had ended delivery."""
        end_all(self._worker.stop, self._worker.join, self.check)

    def _deliver_and_rest(self) -> None:
        self.deliver()

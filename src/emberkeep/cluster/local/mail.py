"""Messages between the shards of one process: a queue for each receiver."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeAlias

from emberkeep.erasure.messages import Message
from emberkeep.errors import StoppedError
from emberkeep.runtime.background import Retry, Worker, end_all
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

    Receivers change while nothing is delivered (`held`): what is on its way is received by those
    that it is meant for, or dropped, and is never the reason why a delivery fails.

    A delivery that fails, in whichever thread, ends delivery: some receivers have taken in what
    others have not, and to deliver it again could add it twice. `failed_since` says when that was,
    `on_failure` is called, and `check` and `deliver` raise it. Nothing is kept from then on. What
    the receivers have is void: `start_over` goes on with receivers that have started over, too.
    """

    def __init__(
        self, receivers: int, receive: Callable[[Sequence[Letter]], object], *, window_nbytes: int,
        on_failure: Callable[[], object] = lambda: None, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.messages = 0
        self.sent_nbytes = 0
        self._receive = receive
        self._on_failure = on_failure
        self._clock = clock
        self._window_nbytes = window_nbytes
        self._queues: list[deque[Message]] = [deque() for _ in range(receivers)]
        self._delivering = threading.Lock()
        self._waiting_nbytes = 0
        self.failed_since: float | None = None
        self.failure: BaseException | None = None
        # A delivery that failed is not repeated; the thread goes on with what follows `start_over`.
        self._worker = Worker(
            "emberkeep-parity", self._deliver_and_rest, retry=Retry(limit=None), clock=clock
        )
        self._counting = self._worker.changed
        self._starts = False

    @property
    def waiting(self) -> int:
        """How many messages are on their way."""
        return sum(len(queue) for queue in self._queues)

    def post(self, receiver: int, message: Message) -> None:
        """Takes a message; never waits. After a failure it is dropped."""
        with self._counting:
            if self.failure is not None:
                return
            self._queues[receiver].append(message)
            self.messages += 1
            self.sent_nbytes += message.body.nbytes
            self._waiting_nbytes += message.body.nbytes
        if self._starts:
            self._worker.wake()

    def check(self) -> None:
        """Raises what has ended delivery."""
        if self.failure is not None:
            raise StoppedError(
                "messages to parity hosts are not delivered since one could not be: "
                f"{type(self.failure).__name__}: {self.failure}; rows are not protected until "
                "their parity is filled again, but those in memory are right"
            ) from self.failure

    def deliver(self) -> None:
        """Has everything received that was posted before."""
        with self._delivering:  # what others have taken from a queue is received, too
            self.check()
            self._deliver_all()

    def _deliver_all(self) -> None:
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
            if self.failure is None:
                self.failure, self.failed_since = error, self._clock.now().timestamp()
            self._clear()
        self._on_failure()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is delivered meanwhile; what is being delivered has been."""
        with self._delivering:
            yield

    def start_over(self) -> None:
        """After a failure: delivers again what is posted from here on. While it is `held`."""
        with self._counting:
            self.failure = self.failed_since = None
            self._clear()

    def _clear(self) -> None:
        for queue in self._queues:
            queue.clear()
        self._waiting_nbytes = 0
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
        """Loses what is on its way from and to shards that are gone. While it is `held`."""
        with self._counting:
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
                lambda: self._waiting_nbytes <= self._window_nbytes or self.failure is not None,
                "room for messages to parity hosts", _PATIENCE,
            )  # fmt: skip

    def close(self) -> None:
        """Ends the thread, if there is one."""
        end_all(self._worker.stop, self._worker.join)

    def _deliver_and_rest(self) -> None:
        with self._delivering:
            if self.failure is None:
                self._deliver_all()

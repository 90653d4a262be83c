"""The sending side of a stream: numbers what a shard says, and knows who holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from emberkeep.erasure.messages import Differences, Fill, Message, Point, Values


class Source:
    """The stream of one shard in one epoch.

    Changing rows and numbering the change happen under one lock, the shard's; hosts may
    acknowledge at any time from any thread.
    """

    def __init__(
        self, index: int, epoch: int, hosts: Iterable[int], *, number: int = 0, point: Point
    ) -> None:
        self.index = index
        self.epoch = epoch
        self.number = number
        self.ledger = dict(point.ledger)
        self.state = point.state
        self._lock = threading.Lock()
        self._held = dict.fromkeys(hosts, number)

    @property
    def hosts(self) -> list[int]:
        """The live hosts: each message goes to all of them."""
        with self._lock:
            return sorted(self._held)

    @property
    def settled(self) -> int:
        """Up to here every live host holds the stream: no single loss can take it away."""
        with self._lock:
            return min(self._held.values(), default=self.number)

    def message(self, body: Differences | Values | Fill) -> Message:
        """The next message of the stream."""
        settled = self.settled
        self.number += 1
        if isinstance(body, Differences):
            self.state = body.state
            if body.push is not None:
                worker, number = body.push
                self.ledger[worker] = number
        return Message(self.index, self.epoch, self.number, settled, body)

    def acknowledge(self, host: int, number: int) -> None:
        """A host holds everything up to `number`."""
        with self._lock:
            if host in self._held:
                self._held[host] = max(self._held[host], number)

    def attach(self, host: int) -> tuple[int, Point]:
        """A new host takes part from the next message on; where the stream stands before it."""
        with self._lock:
            self._held[host] = self.number
            return self.number, Point(dict(self.ledger), self.state)

    def detach(self, host: int) -> None:
        """A host is gone: what it held no longer counts."""
        with self._lock:
            self._held.pop(host, None)

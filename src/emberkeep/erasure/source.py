"""The sending side of a stream: numbers what a shard says, and knows who holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from emberkeep.erasure.messages import Differences, Fill, Message, Point, Values


class Source:
    """The stream of one shard in one epoch.

    Changing rows and numbering the change happen under one lock, the shard's; hosts may
    acknowledge at any time from any thread.

    A host that holds nothing can be left out (`leave_out`). What it lacks is settled once every
    other host holds a message that says so, and not before: if this shard is lost, the others
    know that the stream went on without it. Where there is no other, it is settled once the
    coordinator knows (`known_left_out`): until then, that host would be taken for one that is
    whole, and what it lacks would have to be sent again.
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
        # Hosts that are left out, by the number of the first message that says so.
        self._leaving: dict[int, int] = {}
        self._known: set[int] = set()
        # Messages that the next one goes on with the write of: what is undone is undone whole.
        self._more: set[int] = set()

    @property
    def hosts(self) -> list[int]:
        """The live hosts: each message goes to all of them."""
        with self._lock:
            return sorted(self._held.keys() - self._leaving.keys())

    @property
    def settled(self) -> int:
        """Up to here every live host holds the stream: no single loss can take it away. A write is
        settled when all its messages are."""
        with self._lock:
            number = min(self._held.values(), default=self.number)
            if self._more:
                while number in self._more:
                    number -= 1
                self._more = {later for later in self._more if later > number}
            return number

    def message(self, body: Differences | Values | Fill) -> Message:
        """The next message of the stream."""
        settled = self.settled
        if isinstance(body, Differences) and body.more:
            with self._lock:
                self._more.add(self.number + 1)
        self.number += 1
        if isinstance(body, Differences):
            self.state = body.state
            if body.push is not None:
                worker, number = body.push
                self.ledger[worker] = number
        return Message(self.index, self.epoch, self.number, settled, body, tuple(self.hosts))

    def acknowledge(self, host: int, number: int) -> None:
        """A host holds everything up to `number`."""
        with self._lock:
            if host in self._held:
                self._held[host] = max(self._held[host], number)
                self._let_leave()

    def leave_out(self, host: int) -> None:
        """Goes on without a host. The caller sends a message next, with the shard's lock held
        since before this call: it is the one that says so."""
        with self._lock:
            if host in self._held:
                self._leaving.setdefault(host, self.number + 1)
                self._let_leave()

    def _let_leave(self) -> None:
        """Forgets hosts that all others, or the coordinator, know to be left out."""
        others = [held for host, held in self._held.items() if host not in self._leaving]
        for host, number in list(self._leaving.items()):
            heard = bool(others) and all(held >= number for held in others)
            if heard or host in self._known:
                del self._leaving[host], self._held[host]

    def known_left_out(self, hosts: Iterable[int]) -> None:
        """The coordinator does not count on these for what was said since they were left out."""
        with self._lock:
            self._known = set(hosts)
            self._let_leave()

    def attach(self, host: int) -> tuple[int, Point]:
        """A new host takes part from the next message on; where the stream stands before it."""
        with self._lock:
            self._leaving.pop(host, None)
            self._known.discard(host)
            self._held[host] = self.number
            return self.number, Point(dict(self.ledger), self.state)

    def detach(self, host: int) -> None:
        """A host is gone: what it held no longer counts."""
        with self._lock:
            self._held.pop(host, None)
            self._leaving.pop(host, None)
            self._let_leave()

"""Requests that were given up change nothing when they arrive late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from emberkeep._types import Json
from emberkeep.errors import EpochError


class _Way:
    """Requests of one client, one after the other."""

    def __init__(self) -> None:
        self.last = 0
        self.lock = threading.Lock()


class RequestOrder:
    """The order of requests that change a shard other than by pushes, which have numbers.

    No client of the present epoch is forgotten: there are a few for each worker, and one for each
    life of another server. What is meant for an earlier epoch is refused for that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: dict[tuple[int, str], _Way] = {}

    def begin(self, epoch: int) -> None:
        """Forgets the clients of earlier epochs."""
        with self._lock:
            self._ways = {key: way for key, way in self._ways.items() if key[0] >= epoch}

    @contextmanager
    def of(self, header: Json) -> Iterator[None]:
        """Refuses what a client has given up since: it sent something else that changes the shard,
        and relies on that. One at a time: one that was slow has ended by then."""
        order = header.get("order")
        if order is None:
            yield
            return
        client, number = (int(header["epoch"]), str(order[0])), int(order[1])
        with self._lock:
            way = self._ways.setdefault(client, _Way())
        with way.lock:
            if number <= way.last:
                raise EpochError("a later request of this client has arrived before: this is late")
            way.last = number
            yield

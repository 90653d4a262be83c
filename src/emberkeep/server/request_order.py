"""Requests that were given up change nothing when they arrive late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from emberkeep._types import Json
from emberkeep.errors import EpochError

# So many clients are remembered with what they have sent last.
_CLIENTS = 256


@dataclass(slots=True, eq=False)
class _Way:
    """Requests of one client, one after the other."""

    last: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class RequestOrder:
    """The order of requests that change a shard other than by pushes, which have numbers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: dict[str, _Way] = {}

    @contextmanager
    def of(self, header: Json) -> Iterator[None]:
        """Refuses what a client has given up since: it sent something else that changes the shard,
        and relies on that. One at a time: one that was slow has ended by then."""
        order = header.get("order")
        if order is None:
            yield
            return
        client, number = str(order[0]), int(order[1])
        with self._lock:
            way = self._ways.pop(client, None) or _Way()
            self._ways[client] = way
            if len(self._ways) > _CLIENTS:
                del self._ways[next(iter(self._ways))]
        with way.lock:
            if number <= way.last:
                raise EpochError("a later request of this client has arrived before: this is late")
            way.last = number
            yield

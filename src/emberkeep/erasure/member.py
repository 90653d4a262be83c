"""The parity side of one shard: it sends others what its rows do, and holds parity of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from emberkeep._types import I64, Bools, Words
from emberkeep.erasure.codes import Placement
from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.messages import (
    LAYERS,
    Changed,
    Differences,
    Fill,
    Layer,
    Message,
    Point,
    PushNumber,
    Standing,
    State,
    Values,
    Wanted,
    of_write,
)
from emberkeep.erasure.source import Source
from emberkeep.errors import ShardLostError

Post = Callable[[int, Message], object]


class Rows(Protocol):
    """The rows of one shard, as they are coded. Rows beyond the end of a slab are zeros."""

    def values(self, slab: int, layer: Layer, rows: I64) -> Words:
        """The records or the marks of rows; zeros for those that are not trained."""
        ...

    def unknown(self, slab: int, layer: Layer, rows: I64) -> Bools:
        """Which of the rows were lost and are not back."""
        ...

    def lost(self, slot: int | None = None) -> bool:
        """Whether anything is not back, in one slot or in any."""
        ...

    def trained(self, slab: int, slot: int, start: int, stop: int) -> I64:
        """The stripes from start to stop whose row of that slot is trained."""
        ...

    def install(self, slab: int, layer: Layer, rows: I64, values: Words) -> None:
        """Brings rows back; those that are not unknown any more are left alone."""
        ...

    def reveal(self) -> None:
        """All marks are back: which rows are trained is known, and they are what is lost."""
        ...


class ParityMember:
    """One shard's stream, its parity of others, and its rows.

    `lock` is the shard's: rows change and messages are numbered under it. `post` sends a message
    to a host; it is called under the lock, so it must not wait for another shard. `unsaid` hears,
    under the lock too, that rows have changed by what cannot be said any more: parity is not what
    they are.

    When its shard is lost, be it half-way through a write, the stream `end`s: nothing is said
    of rows that are not there, and no message follows that hosts would take for the end of the
    write.
    """

    def __init__(
        self,
        *,
        source: Source,
        host: ParityHost,
        rows: Rows,
        placement: Placement,
        lock: AbstractContextManager[Any],
        post: Post,
        unsaid: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self.source = source
        self.host = host
        self.rows = rows
        self.placement = placement
        self.lock = lock
        self.unsaid = unsaid
        self._post = post
        self._ended = False

    @property
    def index(self) -> int:
        return self.source.index

    def record(self, parts: Sequence[Changed], push: PushNumber | None, state: State) -> int:
        """Sends what a write changed; returns the number of its last message. The caller holds the
        lock."""
        said = of_write(parts, push, state)  # all of it first: a write that began also ends
        return [self._send(body) for body in said][-1]

    def end(self) -> None:
        """The shard is lost: says nothing any more. With the lock held."""
        self._ended = True

    def _must_live(self) -> None:
        if self._ended:
            raise ShardLostError((self.index,))

    def _send(self, body: Differences | Values | Fill) -> int:
        self._must_live()
        message = self.source.message(body)
        for host in self.source.hosts:
            self._post(host, message)
        return message.number

    def attach(self, host: int) -> tuple[int, Point]:
        """Begins to send to a new host; where the stream stands."""
        with self.lock:
            return self.source.attach(host)

    def leave_out(self, host: int) -> None:
        """Sends nothing more to a host that holds nothing, and says so to the others."""
        with self.lock:
            if self._ended:
                return
            self.source.leave_out(host)
            self._send(Differences((), None, self.source.state))

    def standing(self) -> Standing:
        """What is not back yet."""
        with self.lock:
            slots = tuple(self.rows.lost(slot) for slot in range(self.placement.k))
            blind = bool(self.rows.unknown(0, "marks", np.zeros(1, np.int64))[0])
            goes_to = {**self.host.goes_to, self.index: tuple(self.source.hosts)}
        return Standing(slots, blind, self.host.complete, self.host.streams, goes_to)

    def send_values(self, wanted: Sequence[Wanted]) -> None:
        """Says what this shard has of the rows of decodes."""
        for decode in wanted:
            self._send_values(decode)

    def _send_values(self, wanted: Wanted) -> None:
        slot = self.placement.slot(self.index, wanted.group)
        rows = wanted.stripes * self.placement.k + slot
        with self.lock:
            self._must_live()
            unknown = self.rows.unknown(wanted.slab, wanted.layer, rows)
            if unknown.all():
                self._send(Values(wanted.number, slot, None, unknown))
                return
            values = self.rows.values(wanted.slab, wanted.layer, rows)
            if unknown.any():
                values[unknown] = 0
            self._send(Values(wanted.number, slot, values, unknown))

    def send_fill(self, host: int, p: int, slab: int, start: int, stop: int) -> bool:
        """Sends all rows of a range of stripes to a new host; False while some are not back, and
        to a host that is left out."""
        slot = self.placement.slot(self.index, self.placement.group_on(host, p))
        with self.lock:
            self._must_live()
            if host not in self.source.hosts:
                return False
            every = np.arange(start, stop) * self.placement.k + slot
            if any(self.rows.unknown(slab, layer, every).any() for layer in LAYERS):
                return False
            most = self.host.shapes[slab].message_rows
            for first in range(start, stop, most):
                last = min(first + most, stop)
                stripes = self.rows.trained(slab, slot, first, last)
                rows = stripes * self.placement.k + slot
                records, marks = (self.rows.values(slab, layer, rows) for layer in LAYERS)
                self._send(Fill(host, p, slab, slot, first, last, stripes, records, marks))
            return True

    def install(self, slab: int, layer: Layer, rows: I64, values: Words) -> None:
        with self.lock:
            self.rows.install(slab, layer, rows, values)

    def unknown(self, slab: int, layer: Layer, rows: I64) -> Bools:
        with self.lock:
            return self.rows.unknown(slab, layer, rows)

    def reveal(self) -> None:
        with self.lock:
            self.rows.reveal()


def begin(members: Iterable[ParityMember]) -> None:
    """Starts the streams of shards that have recorded nothing yet."""
    by_index = {member.index: member for member in members}
    for member in by_index.values():
        for host in member.source.hosts:
            number, point = member.attach(host)
            by_index[host].host.follow(member.index, member.source.epoch, number, point)

"""The parity side of a shard behind a wire, as its cluster and the other servers see it."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, Bools, Json, Words
from emberkeep.erasure.messages import Layer, Point, Shape, Standing, Syndrome, Wanted
from emberkeep.erasure.stream_frames import pack_point, pack_wanted, unpack_point, unpack_syndromes
from emberkeep.errors import ServerError, ShardLostError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Arrays = Mapping[str, npt.NDArray[Any]]

# Asked at any time, and as often as one likes: these change nothing, or what they change they find
# done when they come again. All others are served in the order in which they were sent.
_ANY_TIME = frozenset(("standing", "syndromes", "unknown", "send_fill", "flush", "hurry"))


# A server that is asked by way of another is looked at so often, and for so long at most.
_DEADLINES_BETWEEN_LOOKS = 3
_LOOK = timedelta(seconds=1)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a shard is in one of its epochs."""

    index: int
    address: str
    epoch: int

    def to_json(self) -> list[Any]:
        return [self.index, self.address, self.epoch]

    @classmethod
    def from_json(cls, document: Any) -> Peer:
        index, address, epoch = document
        return cls(int(index), str(address), int(epoch))


class PeerMember:
    """`ParityMember` of a server. A server that does not answer, or has another epoch by now, is
    `ShardLostError`; what it refuses comes out as it is.

    What changes something is asked one after the other. If it was given up and arrives after the
    next, it is refused by the server: a host that was attached meanwhile is not detached, say.

    A server that cannot be reached is asked by way of another, the next one of `through` each time,
    until that one does not reach it either, or it can be reached again, which is tried every few
    deadlines. A question that arrives both ways is taken once.
    """

    def __init__(
        self, peer: Peer, security: Security, deadline: timedelta, stripes: Sequence[int], *,
        transport: Transport = FLIGHT, through: Callable[[], Sequence[PeerMember]] = lambda: (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.host = PeerHost(self, stripes)
        self.source = PeerSource(self)
        self.trained = False
        """Whether the shard had trained rows when a host was last attached."""
        self.hosts: dict[int, Peer] = {}
        """Where the hosts that may be attached are."""
        self.attached: dict[int, int] = {}
        """The number after which each host was last attached to the stream."""
        self._security = security
        self._deadline = deadline
        self._transport = transport
        self._through = through
        self._relay: PeerMember | None = None
        self._relays_tried = 0
        self._clock = clock
        self._tried_at = 0.0
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        self._client = f"{secrets.token_hex(8)} parity"
        self._orders = itertools.count(1)

    @property
    def index(self) -> int:
        return self.peer.index

    def ask(
        self, what: str, header: Json | None = None, arrays: Arrays | None = None
    ) -> tuple[Json, dict[str, npt.NDArray[Any]]]:
        """One question to the server's member."""
        header = {**(header or {}), "epoch": self.peer.epoch, "ask": what}
        if what in _ANY_TIME:
            return self._reach(header, arrays)
        with self._in_turn:
            header["order"] = [self._client, next(self._orders)]
            return self._reach(header, arrays)

    def _reach(
        self, header: Json, arrays: Arrays | None
    ) -> tuple[Json, dict[str, npt.NDArray[Any]]]:
        """Asks straight or, where that was in vain, by way of the server that served last."""
        relay = self._relay
        if relay is not None and self._within_reach():
            relay = self._relay = None
        if relay is None:
            self._tried_at = self._clock.monotonic()
            try:
                return self.pass_on(header, arrays)
            except ShardLostError:
                others = [m for m in self._through() if m.index != self.index]
                if not others:
                    raise
                relay = others[self._relays_tried % len(others)]
                self._relays_tried += 1
        question = {"ask": "relay", "to": self.peer.to_json(), "question": header}
        try:
            reply = relay.pass_on({**question, "epoch": relay.peer.epoch}, arrays, hops=2)
        except ShardLostError:
            self._relay = None
            raise ShardLostError((self.index,)) from None
        self._relay = relay
        return reply

    def _within_reach(self) -> bool:
        """Whether a server that is asked by way of another answers again, looked at now and then: a
        relay takes two ways, and the time of a server that may have rows to bring back itself."""
        now = self._clock.monotonic()
        if now - self._tried_at < _DEADLINES_BETWEEN_LOOKS * self._deadline.total_seconds():
            return False
        self._tried_at = now
        look = Connection(self.peer.address, self._security, transport=self._transport)
        try:
            look.act("status", deadline=min(self._deadline, _LOOK))
        except ServerError:
            return False
        finally:
            look.close()
        return True

    def pass_on(
        self, header: Json, arrays: Arrays | None, *, hops: int = 1
    ) -> tuple[Json, dict[str, npt.NDArray[Any]]]:
        """Asks straight."""
        try:
            with self._lock:
                if self._connection is None:
                    self._connection = Connection(
                        self.peer.address, self._security, transport=self._transport
                    )
                connection = self._connection
            return connection.act("member", header, arrays, deadline=hops * self._deadline)
        except ServerError:
            self.close()
            raise ShardLostError((self.index,)) from None

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def standing(self) -> Standing:
        reply, _ = self.ask("standing")
        return Standing(
            tuple(map(bool, reply["lost"])), bool(reply["blind"]), bool(reply["complete"]),
            {int(source): (int(base), int(last)) for source, base, last in reply["streams"]},
            {int(source): tuple(map(int, hosts)) for source, hosts in reply["goes_to"]},
        )  # fmt: skip

    def attach(self, host: int) -> tuple[int, Point]:
        reply, _ = self.ask("attach", {"host": self.hosts[host].to_json()})
        self.trained = bool(reply["trained"])
        self.attached[host] = int(reply["number"])
        return self.attached[host], unpack_point(reply)

    def send_values(self, wanted: Sequence[Wanted]) -> None:
        self.ask("values", *pack_wanted(wanted))

    def send_fill(self, host: int, p: int, slab: int, start: int, stop: int) -> bool:
        reply, _ = self.ask(
            "send_fill", {"host": host, "p": p, "slab": slab, "start": start, "stop": stop}
        )
        return bool(reply["sent"])

    def install(self, slab: int, layer: Layer, rows: I64, values: Words) -> None:
        self.ask("install", {"slab": slab, "layer": layer}, {"rows": rows, "values": values})

    def unknown(self, slab: int, layer: Layer, rows: I64) -> Bools:
        _, arrays = self.ask("unknown", {"slab": slab, "layer": layer}, {"rows": rows})
        return arrays["unknown"].view(np.bool_)

    def reveal(self) -> None:
        self.ask("reveal")


class PeerHost:
    """`ParityHost` of a server."""

    def __init__(self, member: PeerMember, stripes: Sequence[int]) -> None:
        self.stripes = list(stripes)
        self._member = member

    @property
    def shapes(self) -> Sequence[Shape]:
        raise NotImplementedError("a server brings its own rows back")

    def seal(self, source: int) -> int:
        return int(self._member.ask("seal", {"source": source})[0]["last"])

    def roll(self, source: int, number: int) -> Point:
        reply, _ = self._member.ask("roll", {"source": source, "number": number})
        return unpack_point(reply)

    def follow(self, source: int, epoch: int, number: int, point: Point) -> None:
        about = {"source": source, "of": epoch, "number": number, **pack_point(point)}
        self._member.ask("follow", about)

    def refill(self, source: int) -> None:
        self._member.ask("refill", {"source": source})

    def to_fill(self) -> list[tuple[int, int, int, int]]:
        raise NotImplementedError("a server has its own parity filled")

    def begin(self, wanted: Sequence[Wanted]) -> None:
        self._member.ask("begin", *pack_wanted(wanted))

    def syndromes(self, numbers: Sequence[int]) -> list[Syndrome | None]:
        return unpack_syndromes(*self._member.ask("syndromes", {"numbers": list(numbers)}))

    def drop(self, numbers: Sequence[int] | None = None) -> None:
        self._member.ask("drop", {"numbers": None if numbers is None else list(numbers)})


class PeerSource:
    """`Source` of a server."""

    def __init__(self, member: PeerMember) -> None:
        self._member = member

    @property
    def epoch(self) -> int:
        return self._member.peer.epoch

    def detach(self, host: int) -> None:
        self._member.ask("detach", {"host": host})

"""A served shard's stream to the hosts of its parity: who gets it, and who is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

from emberkeep._types import Json
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.messages import Message, Point
from emberkeep.erasure.peers import Peer
from emberkeep.erasure.source import Source
from emberkeep.erasure.status import earliest
from emberkeep.errors import PeerError
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.pool import ForkLock
from emberkeep.server.parity_sender import Sender
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Tell = Callable[[str, Json], object]

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A host that the stream goes on without."""

    sender: Sender
    since: float
    """The time (Unix) since when it holds nothing."""
    number: int
    """Of the first message of the stream that does not go to it."""


class ParityStreams:
    """Sends the stream of one shard to its hosts, each by a sender of its own.

    A host that holds nothing for the deadline is left out by `leave_out`, unless the run shall stop
    then: training does not wait for it, and what waits to be sent does not grow without bound.
    What it would hold is unprotected; `tell` hears of it, and the status says since when. The
    cluster attaches it again when it answers. Rows that are to come back from hosts (`needs_hosts`)
    may need this one: it is left out if the others are enough (`spares`), which they are asked.

    `lock` is the shard's: messages are posted, and hosts attached and left out, with it held.
    """

    def __init__(
        self,
        source: Source,
        spec: Parity,
        placement: Placement,
        *,
        lock: ForkLock,
        leave_out: Callable[[int], object],
        needs_hosts: Callable[[], bool] = lambda: False,
        spares: Callable[[Collection[int]], bool] = lambda _: False,
        security: Security,
        deadline: timedelta,
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
        tell: Tell = lambda _event, _details: None,
    ) -> None:
        self._source = source
        self._spec = spec
        self._placement = placement
        self._lock = lock
        self._leave_out = leave_out
        self._needs_hosts = needs_hosts
        self._spares = spares
        self._security = security
        self._deadline = deadline
        self._transport = transport
        self._clock = clock
        self._tell = tell
        self._moved = threading.Condition()
        self._closed = False
        self._senders: dict[int, Sender] = {}
        self._left_out: dict[int, LeftOut] = {}
        # What senders that ended had sent.
        self._ended_messages = self._ended_nbytes = 0

    def post(self, host: int, message: Message) -> None:
        sender = self._senders.get(host)
        if sender is not None:
            sender.post(message)

    def attach(self, peer: Peer) -> tuple[int, Point]:
        """Begins to send to a host, also to one that was left out; where the stream stands. With
        the lock held."""
        sender = Sender(
            peer, self._placement, security=self._security, deadline=self._deadline,
            acknowledged=self._acknowledged, stuck=self._stuck, transport=self._transport,
            clock=self._clock,
        )  # fmt: skip
        with self._moved:
            self._end_sender(peer.index)
            self._senders[peer.index] = sender
            return self._source.attach(peer.index)

    def detach(self, host: int) -> None:
        """Sends nothing more to a host that is gone."""
        with self._moved:
            self._end_sender(host)
            self._source.detach(host)
            self._moved.notify_all()

    def _end_sender(self, host: int) -> None:
        out = self._left_out.pop(host, None)
        sender = self._senders.pop(host, None) if out is None else out.sender
        if sender is not None:
            sender.close()
            self._ended_messages += sender.messages
            self._ended_nbytes += sender.sent_nbytes

    def close(self) -> None:
        """Ends all senders; who waits for hosts waits no more."""
        with self._moved:
            self._closed = True
            senders = self._all()
            self._senders.clear()
            self._left_out.clear()
            self._moved.notify_all()
        end_all(*(sender.close for sender in senders))

    def _all(self) -> list[Sender]:
        return [*self._senders.values(), *(out.sender for out in self._left_out.values())]

    # -- who holds what --------------------------------------------------------------------------

    def settle(self, number: int | None = None) -> bool:
        """After a push: whether every live host holds the stream up to `number`, else all that was
        applied before, or, in the background, soon will.

        False where a host does not answer: the push must be sent again, until that host is replaced
        or left out. If all are left out, training goes on; what it does is not settled before the
        coordinator knows that nobody holds it.
        """
        number = self._source.number if number is None else number
        if self._spec.background:
            return self._await(
                lambda: self._waiting_nbytes() <= self._spec.window_nbytes and not self._silent()
            )
        return self._await(lambda: self._source.settled >= number or not self._source.hosts)

    def known_left_out(self, known: Mapping[int, int]) -> dict[int, int]:
        """Hears which hosts the coordinator knows to be left out, since which number; returns
        which are."""
        with self._moved:
            left_out = {host: out.number for host, out in self._left_out.items()}
            self._source.known_left_out(dict(left_out.items() & known.items()))
            self._moved.notify_all()
            return left_out

    def make_room(self) -> None:
        """Before a write that is not a push: returns when no more than the window waits for hosts.
        A host that takes nothing is left out by then, or the write is refused; one that is slow is
        waited for."""
        patience = 2 * self._deadline.total_seconds()
        while not self._await(
            lambda: self._closed or self._waiting_nbytes() <= self._spec.window_nbytes
        ):
            if self._silent_seconds() > patience:
                raise PeerError(
                    f"shard {self._source.index} wrote nothing: more than window_nbytes wait for a "
                    f"host of its parity: {self._trouble() or 'it does not answer'}"
                )
            self._clock.sleep(_POLL_SECONDS)

    def flush(self) -> None:
        """Returns when every live host holds everything that was said before."""
        number = self._source.number
        if not self._await(lambda: self._source.settled >= number):
            raise PeerError(
                f"shard {self._source.index} cannot tell a host of its parity: "
                f"{self._trouble() or 'it does not answer'}"
            )

    def _await(self, enough: Callable[[], bool]) -> bool:
        """Until hosts hold enough, one of them is in trouble, or half of the deadline has passed;
        whether they do."""
        self._leave_out_silent()
        with self._moved:
            self._clock.wait_for(
                self._moved, lambda: self._closed or enough() or bool(self._trouble()),
                self._deadline.total_seconds() / 2,
            )  # fmt: skip
            return enough()

    def _waiting_nbytes(self) -> int:
        return sum(sender.waiting_nbytes for sender in list(self._senders.values()))

    def _trouble(self) -> str:
        return next((s.trouble for s in list(self._senders.values()) if s.trouble), "")

    def _acknowledged(self, sender: Sender, held: int) -> None:
        with self._moved:
            # Of a host that was replaced or left out meanwhile nothing counts.
            if self._senders.get(sender.peer.index) is sender:
                self._source.acknowledge(sender.peer.index, held)
                self._moved.notify_all()

    def _stuck(self, sender: Sender) -> None:
        self._leave_out_silent(asking=True)
        with self._moved:
            self._moved.notify_all()

    def _silent_seconds(self) -> float:
        """For how long a host has held nothing of what waits for it."""
        return max((s.silent_seconds for s in list(self._senders.values())), default=0.0)

    def _silent(self) -> list[Sender]:
        """The senders whose hosts hold nothing for the deadline. One that has met no trouble is not
        to blame: this process may have been stopped meanwhile, and the answer be there."""
        deadline = self._deadline.total_seconds()
        senders = list(self._senders.values())
        return [s for s in senders if s.trouble and s.silent_seconds > deadline]

    def _leave_out_silent(self, *, asking: bool = False) -> None:
        """Goes on without hosts that hold nothing for the deadline. With no lock held, and
        `asking` others by a thread for which nobody waits."""
        silent = [] if self._spec.unprotected == "stop" else self._silent()
        if silent and self._needs_hosts():
            # All that are in trouble: each of two might be left out for the sake of the other.
            troubled = [*silent, *(s for s in list(self._senders.values()) if s.trouble)]
            if not asking or not self._spares({sender.peer.index for sender in troubled}):
                return
        for sender in silent:
            host, cause = sender.peer.index, sender.trouble or "it does not answer"
            since = self._clock.now().timestamp() - sender.silent_seconds
            with self._lock:
                with self._moved:
                    if self._senders.get(host) is not sender:
                        continue  # left out, replaced or closed meanwhile
                    del self._senders[host]
                    self._left_out[host] = LeftOut(sender, since, self._source.number + 1)
                self._leave_out(host)
            sender.leave_out()
            with self._moved:
                self._moved.notify_all()
            self._tell(
                "unprotected",
                {"shard": self._source.index, "host": host, "address": sender.peer.address,
                 "since": since, "cause": cause},
            )  # fmt: skip

    # -- status ----------------------------------------------------------------------------------

    @property
    def unprotected_since(self) -> float | None:
        """The time (Unix) since when a host holds nothing of what it is sent."""
        failing = (sender.failing_since for sender in list(self._senders.values()))
        return earliest(*failing, *(out.since for out in list(self._left_out.values())))

    def status(self) -> Json:
        """What the status of a server says of its stream."""
        with self._moved:
            senders, left_out = self._all(), sorted(self._left_out.items())
            lag = max((sender.waiting for sender in self._senders.values()), default=0)
        return {
            "lag": lag,
            "silent_seconds": self._silent_seconds(),
            "messages": self._ended_messages + sum(sender.messages for sender in senders),
            "sent_nbytes": self._ended_nbytes + sum(sender.sent_nbytes for sender in senders),
            "left_out_hosts": len(left_out),
            "left_out": [[host, out.since, out.sender.answers] for host, out in left_out],
        }

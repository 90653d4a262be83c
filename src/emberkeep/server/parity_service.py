"""The parity side of a served shard: streams to its peers, parity of theirs, and coming back.

A server brings itself back: it asks its peers for what it lacks, rows that somebody waits for
first, then the others, then the parity that it held. Its cluster only decides which servers take
part, and where their streams begin.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from emberkeep._types import I64, U8, Json
from emberkeep.cluster.shard import Shard
from emberkeep.erasure.coded_slabs import SlabRows, load_state, shapes_on, state_of
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.member import ParityMember
from emberkeep.erasure.messages import Message, Point
from emberkeep.erasure.peers import Peer, PeerMember
from emberkeep.erasure.rebuilder import Calls, MemberSide, Rebuilder
from emberkeep.erasure.source import Source
from emberkeep.erasure.status import earliest
from emberkeep.erasure.stream_frames import (
    layer_of,
    pack_point,
    pack_syndromes,
    unpack_messages,
    unpack_point,
    unpack_wanted,
)
from emberkeep.errors import (
    EpochError,
    PeerError,
    ProtocolError,
    ServerError,
    ShardLostError,
    StreamError,
)
from emberkeep.runtime.background import Retry, Worker, end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.metrics import Sample
from emberkeep.server.parity_sender import Sender
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.protocol import pack_frame, unpack_frame
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Arrays = Mapping[str, npt.NDArray[Any]]
Answer = tuple[Json, Arrays]

_NICE = 10
_RETRY_SECONDS = 0.1
_NONE: dict[str, npt.NDArray[Any]] = {}


class ParityService:
    """The parity member of one epoch of a served shard.

    `lost` says that all rows are to come back, from where the stream of the shard before ended.
    """

    def __init__(
        self,
        shard: Shard,
        spec: Parity,
        shards: int,
        *,
        security: Security,
        deadline: timedelta,
        start: tuple[int, Point] | None = None,
        lost: bool = False,
        complete: bool = True,
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.spec = spec
        self.placement = Placement(shards, spec.k, spec.r)
        self.degraded_reads = 0
        self.from_parity = lost
        """Whether this shard goes on where the one before it was lost."""
        self._shard = shard
        self._security = security
        self._deadline = deadline
        self._transport = transport
        self._clock = clock
        self._senders: dict[int, Sender] = {}
        self._ended: list[Sender] = []
        self._moved = threading.Condition()
        self._closed = False
        self._pushes: deque[tuple[int, str, int]] = deque()
        if start is not None:
            load_state(shard.slabs, start[1].state)
        number, point = start or (0, Point({}, state_of(shard.slabs)))
        # What all hosts were found to hold is settled.
        self._settled_pushes = dict(point.ledger)
        self._rows = SlabRows(shard.slabs, self.placement, lost=lost)
        self._host = ParityHost(
            shard.index, self.placement, shapes_on(shard.slabs, shards), complete=complete
        )
        self._source = Source(shard.index, shard.epoch, (), number=number, point=point)
        self.member = ParityMember(
            source=self._source,
            host=self._host,
            rows=self._rows,
            placement=self.placement,
            lock=shard.lock,
            post=self._post,
        )
        self._threads = transport.executor(max(1, shards - 1), "emberkeep-peer")
        self._rebuilder: Rebuilder[MemberSide] | None = None
        self._numbers = _numbers()
        self._hurry = False
        # Peers are asked again for what they did not send, whatever was the reason.
        self._rebuilds = Worker(
            "emberkeep-rebuild", self._rebuild_and_rest, nice=_NICE, retry=Retry(), clock=clock
        )
        self._asks: dict[str, Callable[[Json, Arrays], Answer]] = {
            "directory": self._directory,
            "standing": self._standing,
            "attach": self._attach,
            "detach": self._detach,
            "seal": self._seal,
            "roll": self._roll,
            "follow": self._follow,
            "refill": self._refill,
            "begin": self._begin,
            "values": self._values,
            "syndromes": self._syndromes,
            "drop": self._drop,
            "send_fill": self._send_fill,
            "install": self._install,
            "unknown": self._unknown,
            "reveal": self._reveal,
            "flush": self._flush_all,
            "hurry": self._hurry_up,
        }
        shard.protect(self.member)
        if lost:
            shard.bring_back = self._bring_back

    @property
    def ledger(self) -> Mapping[str, int]:
        """The last push of each worker that was applied, as the stream knows it."""
        return dict(self._source.ledger)

    def close(self) -> None:
        """Ends all streams and threads."""
        with self._moved:
            self._closed = True
            senders = list(self._senders.values())
            self._senders.clear()
            self._moved.notify_all()
        end_all(
            *(sender.close for sender in senders),
            self._rebuilds.stop,
            partial(self._threads.shutdown, wait=False),
        )

    # -- streams ---------------------------------------------------------------------------------

    def _post(self, host: int, message: Message) -> None:
        sender = self._senders.get(host)
        if sender is not None:
            sender.post(message)

    def _acknowledged(self, sender: Sender, held: int) -> None:
        with self._moved:
            # Of a host that was replaced meanwhile nothing counts.
            if self._senders.get(sender.peer.index) is sender:
                self._source.acknowledge(sender.peer.index, held)
                self._moved.notify_all()

    def _stuck(self, sender: Sender) -> None:
        with self._moved:
            self._moved.notify_all()

    def _trouble(self) -> str:
        return next((s.trouble for s in self._senders.values() if s.trouble), "")

    def receive(self, blob: U8, epoch: int) -> U8:
        """Messages of another shard's stream, and the answer to them."""
        header, arrays = unpack_frame(blob)
        try:
            if int(header["host_epoch"]) != epoch:
                raise EpochError(
                    f"shard {self._shard.index} has epoch {epoch}, messages are for "
                    f"{header['host_epoch']}"
                )
            held = 0
            for message in unpack_messages(header, arrays):
                held = self._host.receive(message)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"messages are not complete: {error!r}") from error
        return np.frombuffer(pack_frame({"held": held}), np.uint8)

    # -- pushes ----------------------------------------------------------------------------------

    def note(self, worker: str, push: int, number: int) -> None:
        """A push was applied and sent under a number of the stream."""
        with self._moved:
            self._pushes.append((number, worker, push))

    def settle(self) -> bool:
        """After a push: whether every host holds all that was applied before, or soon will.

        False where a host does not answer: the push must be sent again once it is replaced.
        """
        number = self._source.number
        with self._moved:
            if self.spec.background:
                self._await(lambda: self._waiting_nbytes() <= self.spec.window_nbytes)
                return True
            self._await(lambda: self._source.settled >= number)
            return self._source.settled >= number

    def settled_push(self, worker: str) -> int:
        """The last push of a worker that no loss can undo any more."""
        settled = self._source.settled
        with self._moved:
            while self._pushes and self._pushes[0][0] <= settled:
                _, who, push = self._pushes.popleft()
                self._settled_pushes[who] = push
            return self._settled_pushes.get(worker, 0)

    def _flush(self) -> None:
        """Returns when every host holds everything that was said before."""
        number = self._source.number
        with self._moved:
            self._await(lambda: self._source.settled >= number)
            if self._source.settled < number:
                raise PeerError(
                    f"shard {self._shard.index} cannot tell a host of its parity: "
                    f"{self._trouble() or 'it does not answer'}"
                )

    def _await(self, enough: Callable[[], bool]) -> None:
        """Until hosts hold enough, one of them is in trouble, or half of the deadline has passed.
        Called with `_moved` held."""
        self._clock.wait_for(
            self._moved, lambda: self._closed or enough() or bool(self._trouble()),
            self._deadline.total_seconds() / 2,
        )  # fmt: skip

    def _waiting_nbytes(self) -> int:
        return sum(sender.waiting_nbytes for sender in self._senders.values())

    # -- coming back -----------------------------------------------------------------------------

    def _bring_back(self, slab: int, rows: I64) -> None:
        """A degraded read: decodes what a call needs and is not back yet."""
        if not self.member.unknown(slab, "records", rows).any():
            return
        self.degraded_reads += 1
        for start in range(0, rows.size, self.spec.chunk_rows):
            self._decode(slab, rows[start : start + self.spec.chunk_rows])

    def _decode(self, slab: int, rows: I64) -> None:
        rebuilder = self._rebuilder
        if rebuilder is None:
            raise PeerError(f"shard {self._shard.index} does not know its peers yet: ask again")
        try:
            rebuilder.recover_rows(self._shard.index, slab, rows)
        except (StreamError, ServerError, ShardLostError) as error:
            raise PeerError(f"rows of shard {self._shard.index} are not back: {error}") from None

    def _rebuild_chunk(self) -> bool:
        """Brings the next rows back, or else the next parity; False when all is whole."""
        with self.member.lock:
            chunk = self._rows.next_missing(self.spec.chunk_rows)
            if chunk is None and not self._rows.lost():
                self._shard.bring_back = None
        if chunk is not None:
            self._decode(*chunk)
            return True
        rebuilder = self._rebuilder
        if rebuilder is None or self._rows.lost() or self._host.complete:
            return False
        try:
            stripes = -(-self.spec.chunk_rows // self.spec.k)
            if rebuilder.fill(stripes, {self._shard.index}):
                return True
        except (StreamError, ServerError, ShardLostError) as error:
            raise PeerError(str(error)) from None
        raise PeerError("others have yet to get the rows back that they are to send")

    def _rebuild_and_rest(self) -> float | None:
        start = self._clock.monotonic()
        try:
            more = self._rebuild_chunk()
        except PeerError:
            return _RETRY_SECONDS
        if not more:
            self._hurry = False
            return None
        taken = self._clock.monotonic() - start
        return 0 if self._hurry else taken * (1 / self.spec.rebuild_share - 1)

    # -- what is asked of it ---------------------------------------------------------------------

    def ask(self, header: Json, arrays: Arrays) -> Answer:
        asked = self._asks.get(str(header["ask"]))
        if asked is None:
            raise ProtocolError(f"a member of parity is not asked for {header['ask']!r}"[:100])
        return asked(header, arrays)

    def _directory(self, header: Json, arrays: Arrays) -> Answer:
        """Where all shards are: from here on rows can be decoded."""
        peers = [Peer.from_json(peer) for peer in header["peers"]]
        before = self._rebuilder
        known: dict[Peer, PeerMember] = {}
        for member in () if before is None else before.members:
            if isinstance(member, PeerMember):
                known[member.peer] = member
        members: list[MemberSide] = []
        for peer in sorted(peers, key=lambda peer: peer.index):
            if peer.index == self._shard.index:
                members.append(self.member)
            else:
                made_before = known.pop(peer, None)
                members.append(made_before or self._peer_member(peer))
        made = Rebuilder(
            self.placement, members, self._flush, each=self._each,
            numbers=self._numbers,
        )  # fmt: skip
        if before is not None:
            made.decoded_rows, made.decoded_nbytes = before.decoded_rows, before.decoded_nbytes
        self._rebuilder = made
        for replaced in known.values():
            replaced.close()
        self._rebuilds.wake()
        return {}, _NONE

    def _peer_member(self, peer: Peer) -> PeerMember:
        return PeerMember(
            peer, self._security, self._deadline, self._host.stripes, transport=self._transport
        )

    def _each(self, calls: Calls) -> list[Any]:
        """Makes all calls, each in a thread; raises the first error once all have ended."""
        futures = [self._threads.submit(call) for call in calls[1:]]
        try:
            first = [call() for call in calls[:1]]
        finally:
            wait(futures)
        return first + [future.result() for future in futures]

    def _standing(self, header: Json, arrays: Arrays) -> Answer:
        standing = self.member.standing()
        streams = [[source, *numbers] for source, numbers in standing.streams.items()]
        reply = {
            "lost": list(standing.lost_K), "blind": standing.blind, "complete": standing.complete,
            "streams": streams,
        }  # fmt: skip
        return reply, _NONE

    def _attach(self, header: Json, arrays: Arrays) -> Answer:
        peer = Peer.from_json(header["host"])
        sender = Sender(
            peer, self.placement, security=self._security, deadline=self._deadline,
            acknowledged=self._acknowledged, stuck=self._stuck, transport=self._transport,
            clock=self._clock,
        )  # fmt: skip
        with self._shard.lock:
            trained = any(bool(slab.touched.any()) for slab in self._shard.slabs)
            with self._moved:
                before = self._senders.get(peer.index)
                self._senders[peer.index] = sender
                number, point = self._source.attach(peer.index)
        if before is not None:
            before.close()
        return {"number": number, "trained": trained, **pack_point(point)}, _NONE

    def _detach(self, header: Json, arrays: Arrays) -> Answer:
        host = int(header["host"])
        with self._moved:
            sender = self._senders.pop(host, None)
            self._source.detach(host)
            self._moved.notify_all()
        if sender is not None:
            sender.close()
            self._ended.append(sender)
        return {}, _NONE

    def _seal(self, header: Json, arrays: Arrays) -> Answer:
        return {"last": self._host.seal(int(header["source"]))}, _NONE

    def _roll(self, header: Json, arrays: Arrays) -> Answer:
        return pack_point(self._host.roll(int(header["source"]), int(header["number"]))), _NONE

    def _follow(self, header: Json, arrays: Arrays) -> Answer:
        self._host.follow(
            int(header["source"]), int(header["of"]), int(header["number"]), unpack_point(header)
        )
        return {}, _NONE

    def _refill(self, header: Json, arrays: Arrays) -> Answer:
        self._host.refill(int(header["source"]))
        self._rebuilds.wake()
        return {}, _NONE

    def _begin(self, header: Json, arrays: Arrays) -> Answer:
        self._host.begin(unpack_wanted(header, arrays))
        return {}, _NONE

    def _values(self, header: Json, arrays: Arrays) -> Answer:
        """Says what this shard has of some rows; returns when its hosts have heard it."""
        self.member.send_values(unpack_wanted(header, arrays))
        self._flush()
        return {}, _NONE

    def _syndromes(self, header: Json, arrays: Arrays) -> Answer:
        return pack_syndromes(self._host.syndromes([int(n) for n in header["numbers"]]))

    def _drop(self, header: Json, arrays: Arrays) -> Answer:
        numbers = header["numbers"]
        self._host.drop(None if numbers is None else [int(n) for n in numbers])
        return {}, _NONE

    def _send_fill(self, header: Json, arrays: Arrays) -> Answer:
        about = (int(header[name]) for name in ("host", "p", "slab", "start", "stop"))
        sent = self.member.send_fill(*about)
        if sent:
            self._flush()
        return {"sent": sent}, _NONE

    def _install(self, header: Json, arrays: Arrays) -> Answer:
        layer = layer_of(header["layer"])
        self.member.install(int(header["slab"]), layer, arrays["rows"], arrays["values"])
        return {}, _NONE

    def _unknown(self, header: Json, arrays: Arrays) -> Answer:
        layer = layer_of(header["layer"])
        unknown = self.member.unknown(int(header["slab"]), layer, arrays["rows"])
        return {}, {"unknown": unknown.view(np.uint8)}

    def _reveal(self, header: Json, arrays: Arrays) -> Answer:
        self.member.reveal()
        self._rebuilds.wake()
        return {}, _NONE

    def _flush_all(self, header: Json, arrays: Arrays) -> Answer:
        self._flush()
        return {}, _NONE

    def _hurry_up(self, header: Json, arrays: Arrays) -> Answer:
        """Somebody waits for all to be back: no pauses until then."""
        self._rebuilds.check()
        self._hurry = True
        self._rebuilds.wake()
        return {}, _NONE

    def samples(self) -> list[Sample]:
        """The same as `status` for Prometheus."""
        status = self.status()
        return [(name, kind, text, status[key]) for key, name, kind, text in _SAMPLES]

    def status(self) -> Json:
        """What `ParityStatus` is made of."""
        rebuilder, senders = self._rebuilder, [*self._senders.values(), *self._ended]
        return {
            "lag": max((sender.waiting for sender in self._senders.values()), default=0),
            "unprotected_stripes": self._host.unprotected_stripes,
            "missing_rows": self._rows.missing_rows,
            "rebuilt_rows": rebuilder.decoded_rows if rebuilder else 0,
            "rebuilt_nbytes": rebuilder.decoded_nbytes if rebuilder else 0,
            "degraded_reads": self.degraded_reads,
            "messages": sum(sender.messages for sender in senders),
            "sent_nbytes": sum(sender.sent_nbytes for sender in senders),
            "updates": self._host.updates,
            "unprotected_since": self._unprotected_since() or 0.0,
        }

    def _unprotected_since(self) -> float | None:
        senders = self._senders.values()
        return earliest(self._rebuilds.failed_since, *(s.failing_since for s in senders))


_SAMPLES = (
    ("lag", "parity_lag_messages", "gauge", "messages that its hosts have yet to hold"),
    ("unprotected_stripes", "parity_unprotected_stripes", "gauge", "parity rows yet to be filled"),
    (
        "unprotected_since",
        "parity_unprotected_since_seconds",
        "gauge",
        "Unix time since when a thread that protects rows has failed, 0 if none has",
    ),
    ("missing_rows", "parity_missing_rows", "gauge", "rows yet to come back"),
    ("rebuilt_rows", "parity_rebuilt_rows_total", "counter", "rows that came back"),
    ("degraded_reads", "parity_degraded_reads_total", "counter", "calls that waited for rows"),
    ("messages", "parity_messages_total", "counter", "messages to parity hosts"),
    ("sent_nbytes", "parity_sent_bytes_total", "counter", "bytes of them"),
)


def _numbers() -> Iterator[int]:
    """Names for decodes that no other coordinator, nor an earlier life of this one, has used."""
    return itertools.count(secrets.randbits(42) << 20)


def parity_service_from(
    header: Json, shard: Shard, shards: int, *, security: Security, transport: Transport,
    clock: Clock,
) -> ParityService:  # fmt: skip
    """What a cluster's request to protect a shard asks for."""
    start = header.get("start")
    return ParityService(
        shard,
        Parity(**header["parity"]),
        shards,
        security=security,
        deadline=timedelta(seconds=float(header["deadline_seconds"])),
        start=None if start is None else (int(start["number"]), unpack_point(start)),
        lost=bool(header["lost"]),
        complete=bool(header["complete"]),
        transport=transport,
        clock=clock,
    )

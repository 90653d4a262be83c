"""The parity side of a served shard: streams to its peers, parity of theirs, and coming back.

A server brings itself back: it asks its peers for what it lacks, rows that somebody waits for
first, then the others, then the parity that it held. Its cluster only decides which servers take
part, and where their streams begin.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from contextlib import suppress
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
from emberkeep.erasure.messages import Point, decode_numbers
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
    EmberkeepError,
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
from emberkeep.server.parity_streams import ParityStreams, Tell
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
        tell: Tell = lambda _event, _details: None,
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
        self._lock = threading.Lock()
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
        self._streams = ParityStreams(
            self._source, spec, self.placement, lock=shard.lock,
            leave_out=lambda host: self.member.leave_out(host), needs_hosts=self._rows.lost,
            spares=self._spares, security=security, deadline=deadline, transport=transport,
            clock=clock, tell=tell,
        )  # fmt: skip
        self.member = ParityMember(
            source=self._source,
            host=self._host,
            rows=self._rows,
            placement=self.placement,
            lock=shard.lock,
            post=self._streams.post,
        )
        self._threads = transport.executor(max(1, shards - 1), "emberkeep-peer")
        self._rebuilder: Rebuilder[MemberSide] | None = None
        self._numbers = decode_numbers()
        self._hurry = False
        self._rebuilds = self._new_rebuilds()
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
            "relay": self._relay,
            "reveal": self._reveal,
            "flush": self._flush_all,
            "hurry": self._hurry_up,
        }
        shard.protect(self.member)
        shard.make_room = self._streams.make_room
        if lost:
            shard.bring_back = self._bring_back

    @property
    def ledger(self) -> Mapping[str, int]:
        """The last push of each worker that was applied, as the stream knows it."""
        return dict(self._source.ledger)

    def close(self) -> None:
        """Ends all streams and threads."""
        with self._lock:
            self._closed = True
        end_all(
            self._streams.close,
            self._rebuilds.stop,
            partial(self._threads.shutdown, wait=False),
        )

    # -- streams ---------------------------------------------------------------------------------

    def receive(self, blob: U8, epoch: int) -> U8:
        """Messages of another shard's stream, and the answer to them. If one fails that may have
        been added in part, what it codes is not whole, and is filled again."""
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
        except EmberkeepError:
            raise
        except Exception as error:
            self._sweep()
            if isinstance(error, KeyError | TypeError | ValueError | IndexError):
                raise ProtocolError(f"messages are not complete: {error!r}") from error
            raise
        return np.frombuffer(pack_frame({"held": held}), np.uint8)

    # -- pushes ----------------------------------------------------------------------------------

    def note(self, worker: str, push: int, number: int) -> None:
        """A push was applied and sent under a number of the stream."""
        with self._lock:
            self._pushes.append((number, worker, push))

    def settle(self, worker: str, push: int) -> bool:
        """After a push of a worker: see `ParityStreams.settle`. It does not wait for those of
        others that came after it: with many of them, that would have no end."""
        with self._lock:
            numbers = [n for n, who, last in self._pushes if (who, last) == (worker, push)]
        return self._streams.settle(max(numbers, default=None))

    def known_left_out(self, known: Mapping[int, int]) -> dict[int, int]:
        """See `ParityStreams.known_left_out`."""
        return self._streams.known_left_out(known)

    def flush(self) -> None:
        """After a write that is no push: see `ParityStreams.flush`."""
        self._streams.flush()

    def start_after(self, pushes: Mapping[str, int]) -> None:
        """Pushes that rows held before the stream began are settled."""
        with self._lock:
            self._settled_pushes = {**pushes, **self._settled_pushes}

    def settled_push(self, worker: str) -> int:
        """The last push of a worker that no loss can undo any more."""
        settled = self._source.settled
        with self._lock:
            while self._pushes and self._pushes[0][0] <= settled:
                _, who, push = self._pushes.popleft()
                self._settled_pushes[who] = push
            return self._settled_pushes.get(worker, 0)

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

    def _sweep(self) -> None:
        """Has the thread look at what is not back; starts another if it has given up."""
        with self._lock:
            if self._closed:
                return
            if self._rebuilds.stopped:
                self._rebuilds.stop()  # it is not counted as stopped any more
                self._rebuilds = self._new_rebuilds()
        self._rebuilds.wake()

    def _new_rebuilds(self) -> Worker:
        """Peers are asked again for what they did not send, whatever was the reason."""
        return Worker(
            "emberkeep-rebuild", self._rebuild_and_rest, nice=_NICE, retry=Retry(),
            clock=self._clock,
        )  # fmt: skip

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
            self.placement, members, self._streams.flush, each=self._each,
            numbers=self._numbers,
        )  # fmt: skip
        if before is not None:
            made.decoded_rows, made.decoded_nbytes = before.decoded_rows, before.decoded_nbytes
        self._rebuilder = made
        for replaced in known.values():
            replaced.close()
        self._sweep()
        return {}, _NONE

    def _peer_member(self, peer: Peer) -> PeerMember:
        return PeerMember(
            peer, self._security, self._deadline, self._host.stripes, transport=self._transport,
            through=self._peers, clock=self._clock,
        )  # fmt: skip

    def _peers(self) -> list[PeerMember]:
        members = () if self._rebuilder is None else self._rebuilder.members
        return [member for member in members if isinstance(member, PeerMember)]

    def _spares(self, hosts: Collection[int]) -> bool:
        """Whether the rows that are lost come back without some hosts."""
        rebuilder = self._rebuilder
        if rebuilder is None:
            return False
        with suppress(EmberkeepError, RuntimeError):  # or this service is being closed
            return rebuilder.spares(self._shard.index, hosts)
        return False

    def _relay(self, header: Json, arrays: Arrays) -> Answer:
        """A question to a server that the one who asks cannot reach, and its answer."""
        to = Peer.from_json(header["to"])
        for member in self._peers():
            if member.peer == to:
                return member.pass_on(header["question"], arrays)
        raise ServerError(f"shard {self._shard.index} does not know where shard {to.index} is")

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
            "streams": streams, "goes_to": list(standing.goes_to.items()),
        }  # fmt: skip
        return reply, _NONE

    def _attach(self, header: Json, arrays: Arrays) -> Answer:
        with self._shard.lock:
            trained = any(bool(slab.touched.any()) for slab in self._shard.slabs)
            number, point = self._streams.attach(Peer.from_json(header["host"]))
        return {"number": number, "trained": trained, **pack_point(point)}, _NONE

    def _detach(self, header: Json, arrays: Arrays) -> Answer:
        self._streams.detach(int(header["host"]))
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
        self._sweep()
        return {}, _NONE

    def _begin(self, header: Json, arrays: Arrays) -> Answer:
        wanted = unpack_wanted(header, arrays)
        if wanted:
            self._host.end_earlier(min(decode.number for decode in wanted))
        self._host.begin(wanted)
        return {}, _NONE

    def _values(self, header: Json, arrays: Arrays) -> Answer:
        """Says what this shard has of some rows; returns when its hosts have heard it."""
        self.member.send_values(unpack_wanted(header, arrays))
        self._streams.flush()
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
            self._streams.flush()
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
        self._sweep()
        return {}, _NONE

    def _flush_all(self, header: Json, arrays: Arrays) -> Answer:
        self._streams.flush()
        return {}, _NONE

    def _hurry_up(self, header: Json, arrays: Arrays) -> Answer:
        """Somebody waits for all to be back: no pauses until then. Where the thread had given up,
        that is said once, and it tries again."""
        rebuilds = self._rebuilds
        self._hurry = True
        self._sweep()
        rebuilds.check()
        return {}, _NONE

    def samples(self) -> list[Sample]:
        """The same as `status` for Prometheus."""
        status = self.status()
        return [(name, kind, text, status[key]) for key, name, kind, text in _SAMPLES]

    def status(self) -> Json:
        """What `ParityStatus` is made of."""
        rebuilder = self._rebuilder
        return {
            **self._streams.status(),
            "unprotected_stripes": self._host.unprotected_stripes,
            "missing_rows": self._rows.missing_rows,
            "rebuilt_rows": rebuilder.decoded_rows if rebuilder else 0,
            "rebuilt_nbytes": rebuilder.decoded_nbytes if rebuilder else 0,
            "degraded_reads": self.degraded_reads,
            "updates": self._host.updates,
            "unprotected_since": earliest(
                self._rebuilds.failed_since, self._streams.unprotected_since
            )
            or 0.0,
        }


_SAMPLES = (
    ("lag", "parity_lag_messages", "gauge", "messages that its hosts have yet to hold"),
    ("unprotected_stripes", "parity_unprotected_stripes", "gauge", "parity rows yet to be filled"),
    (
        "unprotected_since",
        "parity_unprotected_since_seconds",
        "gauge",
        "Unix time since when a host holds nothing or a thread has failed, 0 if all is well",
    ),
    ("left_out_hosts", "parity_left_out_hosts", "gauge", "hosts that hold nothing of its rows"),
    ("missing_rows", "parity_missing_rows", "gauge", "rows yet to come back"),
    ("rebuilt_rows", "parity_rebuilt_rows_total", "counter", "rows that came back"),
    ("degraded_reads", "parity_degraded_reads_total", "counter", "calls that waited for rows"),
    ("messages", "parity_messages_total", "counter", "messages to parity hosts"),
    ("sent_nbytes", "parity_sent_bytes_total", "counter", "bytes of them"),
)


def parity_service_from(
    header: Json, shard: Shard, shards: int, *, security: Security, transport: Transport,
    clock: Clock, tell: Tell,
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
        tell=tell,
    )

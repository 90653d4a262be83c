"""Parity over shard servers, as the process that coordinates them sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from emberkeep.cluster.outage import UnsettledError
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.messages import Point, decode_numbers
from emberkeep.erasure.peers import Peer, PeerMember
from emberkeep.erasure.rebuilder import Calls, Rebuilder
from emberkeep.erasure.status import ParityStatus, earliest
from emberkeep.erasure.stream_frames import pack_point
from emberkeep.errors import (
    DeadlineError,
    EmberkeepError,
    PeerError,
    ShardLostError,
    StreamError,
)
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, Progress
from emberkeep.runtime.stopping import Stop
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport

Renew = Callable[[int], object]

_POLL_SECONDS = 0.02
# Rows that are missing for so many deadlines, and of which not one comes back, are lost, as for a
# pull: a host of their parity is out of reach, or has nothing of theirs any more.
_DEADLINES_WITHOUT_A_ROW = 4


class RemoteParity:
    """The parity of a cluster of servers: who takes part, and what is done when some are lost.

    Servers talk to each other; what goes through this process are decisions, and the marks of
    lost rows. A call that raises `ShardLostError` may be repeated with more shards lost.

    A server leaves a host out that holds nothing of its stream (`ParityStreams`). Whenever the
    status is asked for, and by `mend`, hosts that answer again are attached again, and their parity
    is filled again.
    """

    def __init__(
        self,
        spec: Parity,
        shards: Sequence[RemoteShard],
        *,
        security: Security,
        timing: Timing,
        stripes: Sequence[int],
        each: Callable[[Calls], list[Any]],
        left_out: Callable[[int], Mapping[int, int]],
        give_up: Callable[[Sequence[int]], object],
        stop: Stop,
        transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.spec = spec
        self.placement = Placement(len(shards), spec.k, spec.r)
        self.recoveries = 0
        self._shards = shards
        self._security = security
        self._timing = timing
        self._stripes = stripes
        self._each = each
        self._left_out = left_out
        self._give_up = give_up
        self._stop = stop
        self._transport = transport
        self._clock = clock
        self._peers: dict[int, Peer] = {}
        # What replaced servers had counted.
        self._counted: dict[str, int] = {}
        self._known: dict[int, dict[str, Any]] = {}
        self._look_at = clock.monotonic()
        members = [self._protect(shard.index) for shard in shards]
        self.rebuilder: Rebuilder[PeerMember] = Rebuilder(
            self.placement, members, lambda: None, each=each,
            numbers=decode_numbers(),
        )  # fmt: skip
        trained = set()
        for member in members:
            for host in self.placement.hosts(member.index):
                number, point = member.attach(host)
                members[host].host.follow(member.index, member.source.epoch, number, point)
                if member.trained:
                    trained.add(member.index)
        for source in trained:
            for host in self.placement.hosts(source):
                members[host].host.refill(source)
        self._send_directory()

    def _protect(
        self, index: int, start: tuple[int, Point] | None = None, *, lost: bool = False,
        complete: bool = True,
    ) -> PeerMember:  # fmt: skip
        shard = self._shards[index]
        shard.ask(
            "protect",
            {
                "parity": asdict(self.spec),
                "start": start and {"number": start[0], **pack_point(start[1])},
                "lost": lost,
                "since": shard.rows_since,
                "pushes": shard.began_with,
                "complete": complete,
                "deadline_seconds": self._timing.deadline.total_seconds(),
            },
        )
        peer = self._peers[index] = Peer(index, shard.address, shard.epoch)
        member = PeerMember(
            peer, self._security, self._timing.deadline, self._stripes,
            transport=self._transport, clock=self._clock,
        )  # fmt: skip
        member.hosts = self._peers
        return member

    def _send_directory(self) -> None:
        peers = [peer.to_json() for peer in self._peers.values()]
        self._each([partial(g.ask, "directory", {"peers": peers}) for g in self.rebuilder.members])

    # -- losses ----------------------------------------------------------------------------------

    def recover(self, lost: Collection[int], renew: Renew) -> None:
        """Puts replacements in the place of lost shards, which know their rows then and may serve.

        `renew` begins an epoch of a shard on an empty server. Raises `ParityLossError`, with
        nothing changed, where parity cannot bring them back.
        """

        def replace(index: int, number: int, point: Point) -> PeerMember:
            self._put_aside(index)
            renew(index)
            return self._protect(index, (number, point), lost=True, complete=False)

        for index in lost:
            attached = self.rebuilder.members[index].attached
            self.rebuilder.left_out.setdefault(index, set()).update(
                host
                for host, number in self._left_out(index).items()
                if number > attached.get(host, -1)  # and was not attached again since
            )
        self.rebuilder.recover(lost, replace)
        self._send_directory()
        self._recover_marks()
        self.recoveries += len(lost)

    def _recover_marks(self) -> None:
        """A host that a replacement cannot reach is left out after a deadline, and one more to find
        out whether the other hosts are enough: until then, what fails is asked for again. Each part
        that has come back gives the next all that time."""
        deadlines = 2 * self.spec.r  # the only host of some rows is not left out
        patience = deadlines * self._timing.deadline.total_seconds()
        done: set[object] = set()
        parts, since = 0, self._clock.monotonic()
        while True:
            try:
                self.rebuilder.recover_marks(done)
                return
            except (PeerError, StreamError) as error:
                now = self._clock.monotonic()
                if len(done) > parts:
                    parts, since = len(done), now
                if now - since > patience:
                    raise PeerError(f"marks of lost rows are not back: {error}") from None
            self._stop.pause(_POLL_SECONDS, "marks of lost rows to come back from parity")

    def start_over(self, shards: Collection[int], renew: Renew) -> None:
        """Puts empty shards in the place of others; their rows will come from a repository."""

        def replace(index: int, number: int, point: Point) -> PeerMember:
            self._put_aside(index)
            renew(index)
            return self._protect(index, complete=False)

        self.rebuilder.start_over(shards, replace)
        self._send_directory()

    def _put_aside(self, index: int) -> None:
        self.rebuilder.members[index].close()
        self.rebuilder.left_out.pop(index, None)
        for name, value in self._known.pop(index, {}).items():
            if name in ("rebuilt_rows", "rebuilt_nbytes", "degraded_reads", "messages",
                        "sent_nbytes"):  # fmt: skip
                self._counted[name] = self._counted.get(name, 0) + value

    # -- hosts that were left out ----------------------------------------------------------------

    def mend(self) -> None:
        """Attaches hosts again that were left out and answer. For the path of training: servers are
        asked twice in a lease at most, and what fails is left to the next call."""
        if self._clock.monotonic() >= self._look_at:
            with suppress(EmberkeepError):
                self.status()

    def _attach_again(self, sources: Collection[int]) -> None:
        """What was not done because a server does not answer is done at the next look."""
        self._look_at = self._clock.monotonic() + self._timing.lease.total_seconds() / 2
        for source in sources:
            out = self._known[source]["left_out"]
            self.rebuilder.left_out[source] = {int(host) for host, _, _ in out}
            for host in [int(host) for host, _, answers in out if answers]:
                with suppress(EmberkeepError), self.rebuilder.lock:
                    members = self.rebuilder.members
                    # First: what was sent before it was left out may yet arrive, and from here on
                    # nobody asks this host, whose parity is behind.
                    members[host].host.seal(source)
                    members[host].host.refill(source)
                    number, point = members[source].attach(host)
                    members[host].host.follow(source, members[source].source.epoch, number, point)
                    self.rebuilder.left_out[source].discard(host)

    def _open_stripes(self) -> int:
        """Parity rows of hosts that are left out."""
        open_units = {
            (int(host), p)
            for source, known in self._known.items()
            for host, _, _ in known["left_out"]
            for p, _ in self.placement.slots_on(source, int(host))
        }
        return len(open_units) * sum(self._stripes)

    # -- waiting ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """After a write that nobody would send again: every live host holds it now."""
        try:
            self._each([partial(member.ask, "flush") for member in self.rebuilder.members])
        except PeerError as error:
            raise UnsettledError(str(error)) from error

    def rebuild(self) -> None:
        """Returns when all rows and all parity are back, or a shard was lost."""
        self.flush()
        self.wait(lambda status: status.protected or status.lost_shards > 0)

    def wait(self, enough: Callable[[ParityStatus], bool]) -> None:
        """Returns when servers have brought enough back, which they hurry to do; `DeadlineError`
        if they bring nothing back for as long as `bulk`. Rows that do not come back are lost:
        `ShardLostError`, and nobody takes their servers back."""
        pause = _POLL_SECONDS
        progress = Progress(self._timing.bulk, self._clock)
        rows = Progress(_DEADLINES_WITHOUT_A_ROW * self._timing.deadline, self._clock)
        while True:  # asking again finds out that a server has given up
            self._each([partial(member.ask, "hurry") for member in self.rebuilder.members])
            status = self.status()
            if enough(status):
                return
            try:
                rows.require(
                    (status.missing_rows, status.rebuilt_rows) if status.missing_rows else object(),
                    lambda: f"rows of {self._incomplete()}",
                )
            except DeadlineError as error:
                lost = [index for index, known in self._known.items() if known["missing_rows"]]
                self._give_up(lost)
                raise ShardLostError(lost) from error
            progress.require(
                (
                    status.missing_rows,
                    status.rebuilt_rows,
                    status.unprotected_stripes,
                    status.lag,
                    status.left_out_hosts,
                ),
                lambda: f"what {self._incomplete()} have yet to bring back",
            )
            self._stop.pause(pause, "rows or parity that servers have yet to bring back")
            pause = min(0.2, pause * 1.2)

    def _incomplete(self) -> str:
        names = ("missing_rows", "unprotected_stripes", "lag", "left_out_hosts")
        return ", ".join(
            f"shard {index} at {self._shards[index].address}"
            for index, known in sorted(self._known.items())
            if any(known[name] for name in names)
        )

    def close(self) -> None:
        end_all(*(member.close for member in self.rebuilder.members))

    def status(self) -> ParityStatus:
        """As reported by the servers that are not known to be lost. Hosts that they had left out
        and that answer are attached again."""
        serving = [shard for shard in self._shards if shard.state != "lost"]
        replies = self._each([shard.status for shard in serving])
        known_now = [
            (shard.index, status["parity"])
            for shard, status in zip(serving, replies, strict=True)
            if "parity" in status
        ]
        self._known.update(known_now)

        left_out = [known["left_out"] for known in self._known.values()]
        open_stripes = self._open_stripes()
        self._attach_again([index for index, _ in known_now])

        def total(name: str) -> int:
            counts = (int(known[name]) for known in self._known.values())
            return self._counted.get(name, 0) + sum(counts)

        return ParityStatus(
            k=self.spec.k,
            r=self.spec.r,
            lag=total("lag"),
            unprotected_stripes=total("unprotected_stripes") + open_stripes,
            missing_rows=total("missing_rows"),
            rebuilt_rows=total("rebuilt_rows"),
            rebuilt_nbytes=total("rebuilt_nbytes"),
            degraded_reads=total("degraded_reads"),
            recoveries=self.recoveries,
            messages=total("messages"),
            sent_nbytes=total("sent_nbytes"),
            updates=tuple(
                self._known.get(shard.index, {}).get("updates", 0) for shard in self._shards
            ),
            lost_shards=sum(shard.state != "serving" for shard in self._shards),
            unprotected_since=earliest(
                *(parity.get("unprotected_since") for parity in self._known.values())
            ),
            left_out_hosts=sum(map(len, left_out)),
        )


def not_from_parity(lost: Sequence[int], error: Exception, attempts: int) -> str:
    """Says that lost shards do not come back from parity, and why."""
    if isinstance(error, ShardLostError | PeerError):
        return (
            f"shards were lost {attempts} times while parity brought others back (the last: "
            f"{error}): recover from the repository, and look at what the servers say"
        )
    return (
        f"parity cannot bring shards {', '.join(map(str, lost))} back "
        f"({type(error).__name__}: {error}): recover from the repository, and report this"
    )


def missing_rows(shards: Sequence[RemoteShard]) -> list[int]:
    """How many rows of each shard have yet to come back from parity."""
    statuses = [shard.status() for shard in shards]
    return [int(status.get("parity", {}).get("missing_rows", 0)) for status in statuses]


def stuck_shards(
    shards: Sequence[RemoteShard], error: PeerError, deadline: timedelta, clock: Clock
) -> list[int]:
    """The shards whose rows do not come back; none as long as what was in vain for three deadlines
    is worth asking for again. Raises `error` where it is not, and no rows are missing."""
    if isinstance(error, UnsettledError) and streams_move(shards, 3 * deadline):
        return []
    if not any(missing_rows(shards)):
        raise error
    return not_rebuilding(shards, deadline, clock)


def streams_move(shards: Sequence[RemoteShard], patience: timedelta) -> bool:
    """Whether each host that has yet to hold what shards have said has taken something within the
    time: what is not settled is slow, and goes on, or was settled since it was asked for."""
    known = [status["parity"] for shard in shards if "parity" in (status := shard.status())]
    return (
        any(parity["lag"] for parity in known) or not any(parity["left_out"] for parity in known)
    ) and all(parity["silent_seconds"] <= patience.total_seconds() for parity in known)


def not_rebuilding(shards: Sequence[RemoteShard], deadline: timedelta, clock: Clock) -> list[int]:
    """The shards that wait for rows, and have got none of them after a deadline."""
    before = now = missing_rows(shards)
    until = clock.monotonic() + deadline.total_seconds()
    while clock.monotonic() < until:
        clock.sleep(0.1)
        now = missing_rows(shards)
        if all(rows < then for rows, then in zip(now, before, strict=True) if then):
            return []
    return [i for i, then in enumerate(before) if then and now[i] >= then]

"""The leases of servers: a server that has not heard from its coordinator for a while is silent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from emberkeep._types import Json
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.cluster.remote.timing import Timing
from emberkeep.runtime.background import Retry, Worker, end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.wire.connection import Connection
from emberkeep.wire.flight_transport import FLIGHT
from emberkeep.wire.security import Security
from emberkeep.wire.transport import Transport


class Leases:
    """Keeps the leases of all servers alive, one thread for each; knows nothing of the cluster, so
    that it can end.

    With each renewal a server says which hosts of its parity it has left out, and hears that this
    is known: a stream that nobody holds must not pass for settled before.

    A renewal that fails, whatever the error, is tried again for as long as the lease is wanted: if
    it stays without one, the next pull or push finds out, and has the shard replaced. Until then
    `say`, a method whose object it does not keep alive, hears "unheard" of a server that has not
    answered for half of its lease, and "returned" if it does again.
    """

    def __init__(
        self, coordinator: str, shards: Sequence[RemoteShard], security: Security, timing: Timing,
        *, say: Callable[..., None] | None = None, transport: Transport = FLIGHT,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.run: dict[str, float | str] = {}
        self.coordinator = coordinator
        dial = partial(Connection, security=security, transport=transport)
        self._clock = clock
        method = None if say is None else weakref.WeakMethod(say)
        self._renewals = {
            shard.index: _Renewal(
                coordinator, self.run, dial, timing.lease, clock, partial(_tell, method, shard)
            )
            for shard in shards
        }
        for shard in shards:
            self.keep(shard)

    def keep(self, shard: RemoteShard) -> None:
        """Keeps this server's lease from now on."""
        self._renewals[shard.index].keep(shard.address, shard.epoch)

    def keep_lost(self, shard: RemoteShard) -> None:
        """Keeps the lease of a server that may return, unless another thread has given it up."""
        with shard.deciding:
            if shard.newly_lost:
                self.keep(shard)

    def tell(self, run: Mapping[str, float | str], *, now: bool) -> None:
        """What servers hear of the run with the next renewal, or `now`."""
        self.run.update(run)
        for renewal in self._renewals.values() if now else ():
            renewal.worker.wake()

    def rest(self, index: int) -> None:
        """Lets a shard's lease run out: its server is about to be replaced."""
        self._renewals[index].meant = None

    def left_out(self, index: int) -> dict[int, int]:
        """The hosts that a shard's stream was last known to go on without, each with the number of
        the first message that does not go to it."""
        return self._renewals[index].left_out

    def silent_seconds(self, index: int, since: float) -> float:
        """For how long a server has answered no renewal; at least `since`, a moment of the clock,
        when something else was not answered."""
        answered = self._renewals[index].answered_at
        return self._clock.monotonic() - (since if answered is None else min(since, answered))

    def stop(self) -> None:
        for renewal in self._renewals.values():
            renewal.meant, renewal.over = None, True
            renewal.worker.wake()


def _tell(
    method: weakref.WeakMethod[Callable[..., None]] | None, shard: RemoteShard, event: str,
    **details: float | str,
) -> None:  # fmt: skip
    """What a renewal has found out; once a call has found the server lost, that call tells."""
    say = None if method is None else method()
    if say is not None and shard.state == "serving":
        say(event, shard=shard.index, address=shard.address, **details)


class _Renewal:
    """Renews the lease of one server, four times while it lasts."""

    def __init__(
        self, coordinator: str, run: dict[str, float | str], dial: Callable[[str], Connection],
        lease: timedelta, clock: Clock, tell: Callable[..., None],
    ) -> None:  # fmt: skip
        pause = lease / 4
        # Its address, its epoch, and when it was admitted.
        self.meant: tuple[str, int, float] | None = None
        self.over = False
        self.left_out: dict[int, int] = {}
        self._header: Json = {"coordinator": coordinator, "run": run}
        self._dial = dial
        self._pause = pause
        self._lease_seconds = lease.total_seconds()
        self._clock = clock
        self._tell = tell
        self._answered_at = 0.0
        self._failures = 0
        self._unheard = False
        self._connection: Connection | None = None
        # What the server's clock said in its last answer: the lease runs from there, so that a
        # renewal which is read late renews nothing.
        self._known: tuple[str, int, float] | None = None
        self._heard = 0.0
        self.worker = Worker(
            "emberkeep-lease", self._renew, on_error=self._failed,
            retry=Retry(limit=None, first=pause / 8, most=pause), clock=clock,
        )  # fmt: skip

    def keep(self, address: str, epoch: int) -> None:
        meant = self.meant
        if meant is None or meant[:2] != (address, epoch):
            self.meant = (address, epoch, self._clock.monotonic())
        self.worker.wake()

    @property
    def answered_at(self) -> float | None:
        """When the server last answered a renewal, or was admitted: also if the thread that renews
        has not had its turn since."""
        meant = self.meant
        if meant is None:
            return None
        return self._answered_at if meant == self._known else meant[2]

    def _renew(self) -> float | None:
        meant = self.meant
        if meant != self._known:
            self._disconnect()
            self._answered_at = 0.0 if meant is None else meant[2]
            self._known, self._heard = meant, 0.0
            self.left_out = {}
            self._failures, self._unheard = 0, False
        if meant is None:
            if self.over:
                self.worker.stop()
            return None
        address, epoch, _ = meant
        if self._connection is None:
            self._connection = self._dial(address)
        known = self.left_out
        header = {
            **self._header, "epoch": epoch, "clock": self._heard, "left_out": [*known.items()]
        }  # fmt: skip
        reply, _ = self._connection.act(
            "renew", header, deadline=max(self._pause, timedelta(seconds=1))
        )
        before, self._heard = self._heard, float(reply["clock"])
        self._answered_at, self._failures = self._clock.monotonic(), 0
        self.left_out = {int(host): int(number) for host, number in reply.get("left_out", ())}
        if self.left_out.items() - known.items():
            return 0  # it shall hear soon that this is known
        pause = self._pause.total_seconds()
        if self._heard - before > 2 * pause:
            # After a silence the lease still runs from before it: the next message renews it.
            return 0
        if self._unheard:
            self._unheard = False
            self._tell("returned")
        return pause

    def _failed(self, error: BaseException) -> None:
        self._disconnect()
        if self.meant is None or self.meant != self._known:
            return
        self._failures += 1
        seconds = self._clock.monotonic() - self._answered_at
        # Twice: the first attempt of a coordinator that was stopped for so long proves nothing.
        if seconds > self._lease_seconds / 2 and self._failures > 1 and not self._unheard:
            self._unheard = True
            self._tell("unheard", seconds=seconds, error=str(error))

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def let_go(leases: Leases, shards: Sequence[RemoteShard], stay: bool = False) -> None:
    """Ends a run on the servers that can be reached: the next coordinator need not wait. Rows may
    `stay` for it."""
    release = [partial(shard.release, leases.coordinator, stay=stay) for shard in shards]
    end_all(leases.stop, *release)

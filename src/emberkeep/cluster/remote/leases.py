"""The leases of servers: a server that has not heard from its coordinator for a while is silent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from emberkeep._types import Json
from emberkeep.cluster.remote.remote_shard import RemoteShard, Timing
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
    it stays without one, the next pull or push finds out, and has the shard replaced.
    """

    def __init__(
        self, coordinator: str, shards: Sequence[RemoteShard], security: Security, timing: Timing,
        *, transport: Transport = FLIGHT, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self.run: dict[str, float | str] = {}
        self.coordinator = coordinator
        dial = partial(Connection, security=security, transport=transport)
        self._renewals = {
            shard.index: _Renewal(coordinator, self.run, dial, timing.lease / 4, clock)
            for shard in shards
        }
        for shard in shards:
            self.keep(shard)

    def keep(self, shard: RemoteShard) -> None:
        """Keeps this server's lease from now on."""
        renewal = self._renewals[shard.index]
        renewal.meant = (shard.address, shard.epoch)
        renewal.worker.wake()

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

    def stop(self) -> None:
        for renewal in self._renewals.values():
            renewal.meant, renewal.over = None, True
            renewal.worker.wake()


class _Renewal:
    """Renews the lease of one server, four times while it lasts."""

    def __init__(
        self, coordinator: str, run: dict[str, float | str], dial: Callable[[str], Connection],
        pause: timedelta, clock: Clock,
    ) -> None:  # fmt: skip
        self.meant: tuple[str, int] | None = None
        self.over = False
        self.left_out: dict[int, int] = {}
        self._header: Json = {"coordinator": coordinator, "run": run}
        self._dial = dial
        self._pause = pause
        self._connection: Connection | None = None
        # What the server's clock said in its last answer: the lease runs from there, so that a
        # renewal which is read late renews nothing.
        self._known: tuple[str, int] | None = None
        self._heard = 0.0
        self.worker = Worker(
            "emberkeep-lease", self._renew, on_error=self._failed,
            retry=Retry(limit=None, first=pause / 8, most=pause), clock=clock,
        )  # fmt: skip

    def _renew(self) -> float | None:
        meant = self.meant
        if meant != self._known:
            self._disconnect()
            self._known, self._heard = meant, 0.0
            self.left_out = {}
        if meant is None:
            if self.over:
                self.worker.stop()
            return None
        address, epoch = meant
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
        self.left_out = {int(host): int(number) for host, number in reply.get("left_out", ())}
        if self.left_out.items() - known.items():
            return 0  # it shall hear soon that this is known
        pause = self._pause.total_seconds()
        # After a silence the lease still runs from before it: it is renewed by the next message.
        return 0 if self._heard - before > 2 * pause else pause

    def _failed(self, _: BaseException) -> None:
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def let_go(leases: Leases, shards: Sequence[RemoteShard], stay: bool = False) -> None:
    """Ends a run on the servers that can be reached: the next coordinator need not wait. Rows may
    `stay` for it."""
    release = [partial(shard.release, leases.coordinator, stay=stay) for shard in shards]
    end_all(leases.stop, *release)

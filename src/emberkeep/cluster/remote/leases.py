"""The leases of servers: a server that has not heard from its coordinator for a while is silent."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from emberkeep.cluster.remote.remote_shard import RemoteShard, Timing
from emberkeep.errors import EmberkeepError
from emberkeep.wire.connection import Connection
from emberkeep.wire.security import Security


class Leases:
    """Keeps the leases of all servers alive, one thread for each; knows nothing of the cluster, so
    that it can end."""

    def __init__(
        self, coordinator: str, shards: Sequence[RemoteShard], security: Security, timing: Timing
    ) -> None:
        self.run: dict[str, float] = {}
        self.coordinator = coordinator
        self._security = security
        self._pause = timing.lease.total_seconds() / 4
        self._deadline = max(timedelta(seconds=self._pause), timedelta(seconds=1))
        self._stopped = threading.Event()
        self._epochs: dict[int, tuple[str, int]] = {}
        for shard in shards:
            self.keep(shard)
            threading.Thread(
                target=self._renew, args=(shard.index,), name="emberkeep-lease", daemon=True
            ).start()

    def keep(self, shard: RemoteShard) -> None:
        """Keeps this server's lease from now on."""
        self._epochs[shard.index] = (shard.address, shard.epoch)

    def rest(self, index: int) -> None:
        """Lets a shard's lease run out: whoever has it is about to be replaced."""
        self._epochs.pop(index, None)

    def stop(self) -> None:
        self._stopped.set()

    def _renew(self, index: int) -> None:
        connection: Connection | None = None
        # What the server's clock said in its last answer: the lease runs from there, so that a
        # renewal which is read late renews nothing.
        known, clock = ("", 0), 0.0
        while not self._stopped.wait(self._pause):
            address, epoch = self._epochs.get(index, ("", 0))
            if not address:
                continue
            if known != (address, epoch):
                known, clock = (address, epoch), 0.0
            try:
                if connection is not None and connection.address != address:
                    connection.close()
                    connection = None
                if connection is None:
                    connection = Connection(address, self._security)
                header = {
                    "epoch": epoch,
                    "coordinator": self.coordinator,
                    "clock": clock,
                    "run": self.run,
                }
                answer, _ = connection.act("renew", header, deadline=self._deadline)
                clock = float(answer["clock"])
            except EmberkeepError:
                # Whoever pulls or pushes next finds out, and has the shard replaced.
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()


def let_go(leases: Leases, shards: Sequence[RemoteShard]) -> None:
    """Ends a run on the servers that can be reached: the next coordinator need not wait."""
    leases.stop()
    for shard in shards:
        shard.release(leases.coordinator)

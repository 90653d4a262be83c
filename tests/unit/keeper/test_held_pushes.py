"""What pushes wait for while a version is read is in its costs, wherever rows are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Optimizer, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers

TIMING = Timing(deadline=timedelta(seconds=20), lease=timedelta(seconds=60))


class Servers:
    """`cluster=` on servers of this process."""

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        network = LocalNetwork(SYSTEM_CLOCK)
        return FlightCluster(
            tables, optimizer, LocalServers(network, 2, lease=TIMING.lease), seed=seed,
            pool=Pool(1), timing=TIMING, transport=network.transport(), clock=SYSTEM_CLOCK,
        )  # fmt: skip


class Waits(MemoryStore):
    """Keeps a save open until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()

    def put(self, name: str, data: Any) -> int:
        self.go.wait(30)
        return super().put(name, data)


@pytest.mark.parametrize("cluster", [lambda: ek.local(shards=2), Servers], ids=["local", "servers"])
def test_a_push_into_an_open_snapshot_is_counted(cluster: Any) -> None:
    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1), cluster=cluster()
    )
    store = Waits()
    keeper = ek.Keeper(store, bags, bags.optimizer, strategy=ek.incremental(every=1000))

    def step() -> None:
        bags({"item": torch.arange(64)}).sum().backward()
        bags.optimizer.step()
        keeper.step()

    step()
    keeper.save()
    keeper.wait()
    store.go.clear()
    keeper.save()
    step()
    store.go.set()
    keeper.wait()
    costs = keeper.costs()
    keeper.close(save=False)
    quiet, held = costs.each
    assert quiet.held_ms == 0
    assert held.held_ms > 0
    assert costs.held_seconds == pytest.approx(held.held_ms / 1e3)
    assert costs.stall_seconds > costs.held_seconds
    assert "emberkeep_held_seconds_total" in keeper.metrics()

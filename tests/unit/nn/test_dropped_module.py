"""A module that nobody holds any more lets its rows go, and its servers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch

from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.nn import EmbeddingBags
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad, Optimizer, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock

TABLES = [Table("a", rows=100, dim=4)]


def trained(bags: EmbeddingBags) -> EmbeddingBags:
    bags({"a": torch.tensor([[1, 2], [3, 4]])}).sum().backward()
    bags.optimizer.step()
    return bags


def test_the_rows_of_a_dropped_module_are_freed() -> None:
    bags = trained(EmbeddingBags(TABLES, optimizer=Adagrad(lr=0.1)))
    slab = weakref.ref(bags.cluster.handles[0].slabs[0])  # type: ignore[attr-defined]
    del bags
    gc.collect()
    assert slab() is None


def test_the_servers_of_a_dropped_module_are_released() -> None:
    network = LocalNetwork(VirtualClock())

    class OnNetwork:
        def open(
            self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int
        ) -> FlightCluster:
            return FlightCluster(
                tables, optimizer, LocalServers(network, 2), seed=seed, pool=Pool(1),
                transport=network.transport(), clock=network.clock,
            )  # fmt: skip

    bags = trained(EmbeddingBags(TABLES, optimizer=Adagrad(lr=0.1), cluster=OnNetwork()))
    del bags
    gc.collect()
    released = {event.server for event in network.events if event.kind == "release"}
    assert released == {"server-0", "server-1"}

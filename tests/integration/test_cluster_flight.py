"""The contracts of the engine and of clusters on shard servers, and what is theirs alone."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.runtime import pool
from emberkeep.tables import Optimizer, Table
from tests.contracts.cluster import ClusterContract
from tests.contracts.engine import OPTIMIZERS, EngineContract, Reference
from tests.servers import Farm, FarmLauncher

QUICK = ("adagrad", "adam by row")


class Clusters:
    """Opens clusters over servers that are used again: those of the cluster opened longest ago."""

    def __init__(self, farm: Farm) -> None:
        self.farm = farm
        self._free: dict[tuple[int, int], list[FarmLauncher]] = {}
        self._open: deque[tuple[FlightCluster, FarmLauncher]] = deque()

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0,
        threads: int = 1,
    ) -> FlightCluster:  # fmt: skip
        while len(self._open) >= 3:
            cluster, hosts = self._open.popleft()
            cluster.close()
            self._free.setdefault((hosts.count, hosts.threads), []).append(hosts)
        free = self._free.get((shards, threads))
        hosts = free.pop() if free else FarmLauncher(self.farm, shards, threads)
        cluster = FlightCluster(tables, optimizer, hosts, seed=seed, pool=pool.Pool(1))
        self._open.append((cluster, hosts))
        return cluster

    def close(self) -> None:
        for cluster, _ in self._open:
            cluster.close()
        in_use = [hosts for _, hosts in self._open]
        for hosts in itertools.chain(in_use, *self._free.values()):
            hosts.end()


@pytest.fixture(scope="module")
def clusters(farm: Farm) -> Iterator[Clusters]:
    opened = Clusters(farm)
    yield opened
    opened.close()


class OnServers:
    @pytest.fixture(autouse=True)
    def _clusters(self, clusters: Clusters) -> None:
        type(self).clusters = clusters

    clusters: Clusters


class _InProcess(EngineContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> Any:
        return local(threads=1).open(tables, optimizer, seed=seed)


class TestOneServer(OnServers, EngineContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> FlightCluster:
        return self.clusters.open(tables, optimizer, shards=1, seed=seed, threads=threads)

    @pytest.mark.parametrize(
        "optimizer",
        [
            pytest.param(spec, id=name, marks=() if name in QUICK else pytest.mark.soak)
            for name, spec in OPTIMIZERS.items()
        ],
    )
    def test_any_history_equals_the_reference_bit_for_bit(self, optimizer: Optimizer) -> None:
        """Unchanged; most of the optimizers are left to the long tests."""
        super().test_any_history_equals_the_reference_bit_for_bit(optimizer=optimizer)

    def reference(self, cluster: Any) -> Reference:
        """Initial values are asked in process: they are the same, and this is quicker."""
        return _InProcess().reference(cluster)


class TestServers(OnServers, ClusterContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0
    ) -> FlightCluster:
        return self.clusters.open(tables, optimizer, shards=shards, seed=seed)

    def kill(self, cluster: FlightCluster, *shards: int) -> None:
        for shard in shards:
            cluster.launcher.kill(shard)

"""The contracts of the engine and of clusters on shard servers: suites to inherit from, in a module
with a fixture `clusters`."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import ServerError
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
        self._free: dict[tuple[Any, ...], list[FarmLauncher]] = {}
        self._open: deque[tuple[FlightCluster, FarmLauncher, tuple[Any, ...]]] = deque()

    def launcher(self, shards: int, threads: int = 1, **more: Any) -> FarmLauncher:
        """Servers of a kind."""
        return FarmLauncher(self.farm, shards, threads, **more)

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0,
        threads: int = 1, **more: Any,
    ) -> FlightCluster:  # fmt: skip
        """`more` says of which kind its servers are."""
        while len(self._open) >= 3:
            cluster, hosts, kind = self._open.popleft()
            cluster.close()
            self._free.setdefault(kind, []).append(hosts)
        kind = (shards, threads, *sorted(more.items()))
        free = self._free.get(kind)
        hosts = free.pop() if free else self.launcher(shards, threads, **more)
        for shard in range(hosts.count):  # a port that one has left may be somebody else's by now
            if hosts.gone(shard, ""):
                hosts.replace(shard, "")

        def opened() -> FlightCluster:
            return FlightCluster(tables, optimizer, hosts, seed=seed, pool=pool.Pool(1))

        try:
            cluster = opened()
        except ServerError as refused:
            if "serves another run" not in str(refused):
                raise
            hosts.end()  # one has not heard in time that the run before is over: its lease lasts
            hosts = self.launcher(shards, threads, **more)
            cluster = opened()
        self._open.append((cluster, hosts, kind))
        return cluster

    def close(self) -> None:
        for cluster, _, _ in self._open:
            cluster.close()
        in_use = [hosts for _, hosts, _ in self._open]
        for hosts in itertools.chain(in_use, *self._free.values()):
            hosts.end()


class _OnServers:
    @pytest.fixture(autouse=True)
    def _clusters(self, clusters: Clusters) -> None:
        type(self).clusters = clusters

    clusters: Clusters


class _InProcess(EngineContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> Any:
        return local(threads=1).open(tables, optimizer, seed=seed)


class OneServerContract(_OnServers, EngineContract):
    """The engine's, on a cluster of one server."""

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


class ServersContract(_OnServers, ClusterContract):
    """That of clusters."""

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0
    ) -> FlightCluster:
        return self.clusters.open(tables, optimizer, shards=shards, seed=seed)

    def kill(self, cluster: FlightCluster, *shards: int) -> None:
        for shard in shards:
            cluster.launcher.kill(shard)

"""Parity over shard servers: the contract of parity, with processes that are really killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.flight import FlightCluster
from emberkeep.cluster.local import local
from emberkeep.erasure.codes import Parity
from emberkeep.tables import Optimizer, Table
from tests.contracts.engine import OPTIMIZERS
from tests.contracts.parity import SIZES, ParityContract
from tests.servers import Farm
from tests.unit.test_cluster_flight import Clusters

# Every optimizer once, every size once or more; all of them are for the long tests.
QUICK = {
    ("adagrad", (3, 2, 1, 1)), ("adam by row", (6, 4, 2, 2)), ("momentum", (3, 2, 1, 1)),
}  # fmt: skip


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    opened = Clusters(Farm())
    yield opened
    opened.close()


class TestServers(ParityContract):
    clusters: Clusters

    @pytest.fixture(autouse=True)
    def _clusters(self, clusters: Clusters) -> None:
        type(self).clusters = clusters

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, parity: Parity | None
    ) -> Any:
        cluster = self.clusters.open(tables, optimizer, shards=shards, seed=5)
        if parity is not None:
            cluster.protect(parity)
        return cluster

    def kill(self, cluster: FlightCluster, *shards: int) -> None:
        for shard in shards:
            cluster.hosts.kill(shard)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.soak)
            for name in OPTIMIZERS
            for size in SIZES
        ],
    )
    def test_losses_leave_no_trace(self, name: str, size: tuple[int, int, int, int]) -> None:
        """Unchanged, against a run in process: it is the same, and quicker."""
        spec = OPTIMIZERS[name]
        expected = _InProcess().run(spec, size, seed=3, losses=False)
        assert self.run(spec, size, seed=3, losses=True) == expected


class _InProcess(ParityContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, parity: Parity | None
    ) -> Any:
        return local(shards=shards, threads=1, parity=parity).open(tables, optimizer, seed=5)

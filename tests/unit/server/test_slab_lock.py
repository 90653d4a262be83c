"""What a server reads of its slabs is of one instant: it holds the shard's lock meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.shard import Shard
from emberkeep.erasure.codes import Parity
from emberkeep.rows.slab import Slab
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import wanted_of

TABLES = [
    Table("dynamic", rows=None, capacity=12, dim=2, on_full="evict_oldest"),
    Table("fixed", rows=20, dim=2),
]
READS = (
    "resolve", "pull", "read", "touched_ids", "dirty_rows", "check_push", "push", "install",
    "delete", "clear",
)  # fmt: skip


class Workers:
    """Two workers that push as they come, on one network."""

    def __init__(self) -> None:
        self.network = LocalNetwork(VirtualClock())
        self.hosts = LocalServers(self.network, 3)
        self.first = self._join(coordinate=True, parity=Parity(k=2, r=1))
        self.second = self._join(coordinate=False)

    def _join(self, **more: Any) -> FlightCluster:
        return FlightCluster(
            TABLES, Adagrad(lr=0.1), self.hosts, seed=3, pool=Pool(1),
            timing=Timing(deadline=timedelta(seconds=10), lease=timedelta(seconds=15)),
            transport=self.network.transport(), clock=self.network.clock, **more,
        )  # fmt: skip


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.second.close()
    made.first.close()


def push(cluster: Any, ids: dict[str, list[int]]) -> None:
    wanted = wanted_of(cluster, {"dynamic": [], "fixed": [], **ids})
    cluster.push(wanted, [np.ones((w.ids.size, 2), np.float32) for w in wanted], lr=0.1)


def test_no_slab_is_looked_at_without_the_lock(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [service._epoch.shard for service in workers.network.servers.values()]  # type: ignore[union-attr]
    locks = {id(slab): shard.lock for shard in shards for slab in shard.slabs}
    unlocked: list[str] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(slab: Slab, *args: Any, **kwargs: Any) -> Any:
            lock = locks.get(id(slab))
            if lock is not None and lock._owner != threading.get_ident():
                unlocked.append(name)
            return method(slab, *args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(Slab, name, watched(name, getattr(Slab, name)))
    first, second = workers.first, workers.second
    for step in range(3):
        ids = {"dynamic": [step, step + 1, step + 7], "fixed": [step, 3]}
        wanted = wanted_of(first, ids)
        first.prefetch(wanted)
        push(second, {"dynamic": [step + 2, 50 + step]})
        push(first, ids)
        first.pull(wanted)
    first.delete("dynamic", np.array([1]))
    first.install("fixed", np.array([1]), first.read("fixed", np.array([2])))
    first.read_all("dynamic")
    for service in workers.network.servers.values():
        service.page.text()
    assert first.parity is not None
    first.clear()
    assert unlocked == []


def test_a_prefetched_row_that_another_worker_has_inserted_since_is_completed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after its rows were read, and before anything else was found out about them."""
    ids: dict[str, list[int]] = {"dynamic": [4, 5, 6], "fixed": []}
    left = [True]

    def then_push(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(shard: Shard, wanted: list[RowIds], out: Any) -> Any:
            result = honest(shard, wanted, out)
            if left and wanted[0].ids.size:
                left.clear()
                push(workers.second, ids)
            return result

        return call

    wanted = wanted_of(workers.first, ids)
    monkeypatch.setattr(Shard, "pull", then_push(Shard.pull))
    monkeypatch.setattr(Shard, "pull_placed", then_push(Shard.pull_placed))
    workers.first.prefetch(wanted)
    push(workers.first, {"fixed": [1]})
    (rows,) = workers.first.pull(wanted)
    assert not left
    expected = workers.second.read("dynamic", np.array(ids["dynamic"]))["weight"]
    assert np.array_equal(rows, expected)

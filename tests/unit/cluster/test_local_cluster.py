"""The engine's contract on in-process shards, and what is theirs alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import ConfigError
from emberkeep.tables import SGD, Adagrad, Optimizer, Table
from tests.contracts.cluster import ClusterContract
from tests.contracts.engine import EngineContract, grads_of, state, tables, wanted_of


class TestOneShard(EngineContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> LocalCluster:
        return local(threads=threads).open(tables, optimizer, seed=seed)


class TestShards(ClusterContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0
    ) -> LocalCluster:
        return local(shards=shards, threads=2).open(tables, optimizer, seed=seed)

    def kill(self, cluster: LocalCluster, *shards: int) -> None:
        cluster.kill(*shards)


def test_the_memory_of_a_killed_shard_is_gone() -> None:
    cluster = local(shards=2, threads=2).open(tables(), Adagrad(lr=0.1), seed=0)
    cluster.track()
    cluster.push(*_some_push(cluster), lr=0.1)
    frozen = cluster.freeze(None, 1 << 20)  # a copy under way does not keep it either
    planes = [weakref.ref(p) for slab in cluster.shards[0].slabs for p in slab.planes.values()]
    assert all(plane() is not None for plane in planes)
    cluster.kill(0)
    gc.collect()
    assert all(plane() is None for plane in planes)
    for rows in (rows for shard in frozen for rows in shard):
        rows.close(())


def _some_push(cluster: LocalCluster) -> tuple[list[RowIds], list[np.ndarray]]:
    batch = {"fixed": [1, 2, 3], "dynamic": [5, 6], "wide": [4]}
    dims = {table.name: table.dim for table in cluster.tables}
    grads = {name: np.ones((len(ids), dims[name])) for name, ids in batch.items()}
    return wanted_of(cluster, batch), grads_of(cluster, grads)


def _train(cluster: LocalCluster, steps: int = 8) -> dict[str, object]:
    random = np.random.default_rng(5)
    for _ in range(steps):
        batch = {
            "fixed": random.choice(40, 20, replace=False).tolist(),
            "dynamic": random.choice(50, 12, replace=False).tolist(),
            "wide": random.choice(30, 9, replace=False).tolist(),
        }
        by_name = {t.name: t for t in cluster.tables}
        grads = {n: random.standard_normal((len(i), by_name[n].dim)) for n, i in batch.items()}
        cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
    return state(cluster)


def test_every_number_of_shards_gives_the_same_bits() -> None:
    plain = [table for table in tables() if table.on_full == "error"]
    one = _train(local(threads=2).open(plain, Adagrad(lr=0.1), seed=4))
    for shards in (2, 3, 7):
        many = local(shards=shards, threads=2).open(plain, Adagrad(lr=0.1), seed=4)
        assert _train(many) == one
        assert _pulled(many) == _pulled(local(threads=1).open(plain, Adagrad(lr=0.1), seed=4), many)


def _pulled(cluster: LocalCluster, copy_of: LocalCluster | None = None) -> list[bytes]:
    if copy_of is not None:
        for table in cluster.tables:
            cluster.install(table.name, *copy_of.read_all(table.name))
    batch = {"fixed": [39, 0, 7, 8], "dynamic": [49, -5, 3], "wide": [1, 29, 2]}
    return [rows.tobytes() for rows in cluster.pull(wanted_of(cluster, batch))]


def test_another_seed_gives_other_initial_values() -> None:
    first, second = (local().open(tables(), SGD(lr=0.1), seed=seed) for seed in (0, 1))
    ids = np.arange(10)
    assert not np.array_equal(
        first.read("fixed", ids)["weight"], second.read("fixed", ids)["weight"]
    )


def test_several_threads_may_push_and_pull_at_once() -> None:
    cluster = local(shards=2, threads=2).open([Table("t", rows=4000, dim=8)], SGD(lr=1.0), seed=0)
    initial = cluster.read("t", np.arange(4000))["weight"]
    errors: list[BaseException] = []

    def work(first: int) -> None:
        ids = list(range(first, 4000, 4))
        try:
            for _ in range(20):
                cluster.push(
                    wanted_of(cluster, {"t": ids}), [np.ones((len(ids), 8), np.float32)], lr=0.5
                )
                cluster.pull(wanted_of(cluster, {"t": ids}))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    expected = initial.copy()
    for _ in range(20):
        expected -= np.float32(0.5) * np.float32(1.0)
    assert cluster.read("t", np.arange(4000))["weight"].tobytes() == expected.tobytes()


def test_a_huge_table_costs_memory_only_where_it_is_touched() -> None:
    before = _resident()
    cluster = local().open([Table("t", rows=200_000_000, dim=16)], Adagrad(lr=0.1), seed=0)
    ids = list(range(0, 200_000_000, 2_000_000))
    cluster.push(wanted_of(cluster, {"t": ids}), [np.ones((len(ids), 16), np.float32)], lr=0.1)
    assert cluster.touched_ids("t").tolist() == ids
    assert _resident() - before < 300 * 2**20  # 25.6 GB of planes, were they touched


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("settings", [{"shards": 0}, {"threads": 0}])
def test_impossible_clusters_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        local(**settings)

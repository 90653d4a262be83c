"""What every layout of versions must do, whatever it saves when: a suite to inherit from.

A layout is tested by a subclass of three lines with a fixture `layout`. When it takes a new
baseline is its own to test, as `tests/unit/repository/test_policies.py` does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.checkpoint import Checkpointer, Extras, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.repository import KeepAll, KeepLast, Repository, verify
from emberkeep.repository.policies import ENDLESS, LAYOUTS, Layout, needs_baseline
from emberkeep.tables import Adam, Table
from tests.contracts.engine import grads_of, state, wanted_of

TABLES = [
    Table("fixed", rows=900, dim=6),
    Table("dynamic", rows=None, capacity=700, dim=6),
    Table("wide", rows=100, dim=9),
]
EVICTING = [*TABLES, Table("evicting", rows=None, capacity=150, dim=6, on_full="evict_oldest")]
KEEP = SaveSettings(retention=KeepAll(), grace=timedelta(0))


def opened(tables: list[Table] = TABLES, *, shards: int = 1) -> LocalCluster:
    return local(shards=shards, threads=2).open(tables, Adam(lr=0.05), seed=3)


def train(cluster: LocalCluster, random: np.random.Generator, steps: int = 2) -> None:
    for _ in range(steps):
        if random.random() < 0.3:
            table = cluster.tables[random.integers(0, len(cluster.tables))]
            ids = random.integers(0, table.rows or 600, 20)
            cluster.delete(table.name, ids)
        batch = {
            table.name: np.unique(random.integers(0, table.rows or 600, 40)).tolist()
            for table in cluster.tables
        }
        dims = {table.name: table.dim for table in cluster.tables}
        grads = {name: random.standard_normal((len(i), dims[name])) for name, i in batch.items()}
        cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.05)


def started(cluster: LocalCluster, store: BlobStore | None = None, **settings: Any) -> Checkpointer:
    store = store or MemoryStore()
    if not Repository.exists(store):
        Repository.create(store, schema=cluster.schema())
    return Checkpointer(Repository.open(store), cluster, **{"settings": KEEP, **settings})


class LayoutContract:
    """The guarantees of a layout, as tests."""

    def test_its_name_is_known(self, layout: Layout) -> None:
        assert layout in LAYOUTS
        assert VersionSpec(layout=layout).layout == layout

    def test_its_chains_end_or_list_nothing(self, layout: Layout) -> None:
        """However little changes: manifests list the size of each increment of a chain."""
        assert layout in ENDLESS or needs_baseline(layout, [1e-9] * 10_000)

    @pytest.mark.parametrize("seed", range(2))
    def test_every_version_comes_back_bit_for_bit(self, layout: Layout, seed: int) -> None:
        random = np.random.default_rng(seed)
        cluster = opened(EVICTING)
        keeper = started(cluster, spec=VersionSpec(layout=layout))
        states = {}
        for step in range(1, 9):
            train(cluster, random)
            before = state(cluster)
            keeper.save(step, Extras(user={"step": step}))
            train(cluster, random)  # beside the save
            manifest = keeper.wait()
            assert manifest is not None
            states[manifest.version.number] = before
        for number, expected in states.items():
            fresh = opened(EVICTING)
            restored = started(fresh, keeper.repository.store).restore(number)
            assert restored is not None
            assert restored.manifest.user == {"step": restored.manifest.step}
            assert state(fresh) == expected

    def test_a_run_that_goes_on_from_a_version_equals_the_uninterrupted_one(
        self, layout: Layout
    ) -> None:
        """Also its later versions: after a restore, increments still hold what they must."""
        random, twin_random = (np.random.default_rng(5) for _ in range(2))
        cluster, twin = opened(EVICTING), opened(EVICTING)
        store = MemoryStore()
        keeper = started(cluster, store, spec=VersionSpec(layout=layout))
        for step in range(1, 12):
            train(cluster, random)
            train(twin, twin_random)
            keeper.save(step)
            keeper.wait()
            if step % 3 == 0:  # the process ends, another one takes over
                cluster = opened(EVICTING)
                keeper = started(cluster, store, spec=VersionSpec(layout=layout))
                restored = keeper.restore()
                assert restored is not None
                assert restored.manifest.step == step
            assert state(cluster) == state(twin)

    def test_rows_that_were_deleted_stay_deleted_through_restores(self, layout: Layout) -> None:
        store = MemoryStore()
        cluster = opened()
        keeper = started(cluster, store, spec=VersionSpec(layout=layout))
        random = np.random.default_rng(8)
        train(cluster, random, steps=6)
        keeper.save(1)
        keeper.wait()
        for step in range(2, 7):
            for table in cluster.tables:
                cluster.delete(table.name, random.choice(cluster.touched_ids(table.name), 7))
            expected = state(cluster)
            keeper.save(step)
            keeper.wait()
            cluster = opened()
            keeper = started(cluster, store, spec=VersionSpec(layout=layout))
            keeper.restore()
            assert state(cluster) == expected

    def test_deleting_ids_that_are_not_there_writes_nothing(self, layout: Layout) -> None:
        store = MemoryStore()
        cluster = opened(EVICTING)
        keeper = started(cluster, store, spec=VersionSpec(layout=layout))
        train(cluster, np.random.default_rng(8))
        keeper.save(1)
        keeper.wait()
        expected = state(cluster)
        for step in (2, 3):
            for table in cluster.tables:
                untrained = np.setdiff1d(
                    np.arange(table.rows or 5000), cluster.touched_ids(table.name)
                )
                assert cluster.delete(table.name, untrained) == 0
            keeper.save(step)
            manifest = keeper.wait()
            assert manifest is not None
            assert manifest.files == () or layout == "full"
        keeper.settle()
        fresh = opened(EVICTING)
        started(fresh, store, spec=VersionSpec(layout=layout)).restore()
        assert state(fresh) == expected

    @pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
    def test_versions_move_to_another_number_of_shards(
        self, layout: Layout, before: int, after: int
    ) -> None:
        random, cluster = np.random.default_rng(1), opened(shards=before)
        keeper = started(cluster, spec=VersionSpec(layout=layout))
        for step in range(1, 4):
            train(cluster, random)
            keeper.save(step)
            keeper.wait()
        fresh = opened(shards=after)
        started(fresh, keeper.repository.store).restore()
        assert state(fresh) == state(cluster)

    def test_what_retention_lets_go_is_not_missed(self, layout: Layout) -> None:
        """Versions that are kept still have all that they build on."""
        random, cluster = np.random.default_rng(4), opened(EVICTING)
        settings = SaveSettings(retention=KeepLast(n=2), grace=timedelta(0))
        keeper = started(cluster, spec=VersionSpec(layout=layout), settings=settings)
        states = {}
        for step in range(1, 9):
            train(cluster, random)
            keeper.save(step)
            manifest = keeper.wait()
            assert manifest is not None
            states[manifest.version.number] = state(cluster)
        keeper.settle()
        repository = keeper.repository
        kept = [version.number for version in repository.versions()]
        assert kept[-2:] == sorted(states)[-2:]
        assert verify(repository).ok
        for number in kept[-2:]:
            fresh = opened(EVICTING)
            started(fresh, repository.store).restore(number)
            assert state(fresh) == states[number]

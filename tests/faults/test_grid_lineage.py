"""One old version continued twice, commits whose answer is lost: whose rows are in which grid."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError, NoVersionError, SaveError
from emberkeep.inspect import summary
from emberkeep.repository import (
    Collector,
    KeepAll,
    KeepLast,
    KeepNamed,
    Repository,
    Writer,
    fork,
    names,
    verify,
)
from emberkeep.repository.grid.catalog import grid_of
from emberkeep.repository.policies import LAYOUTS, Grid
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Table
from emberkeep.testing import Fault, FaultStore
from tests.contracts.engine import grads_of, state, wanted_of

TABLES = [Table("fixed", rows=60, dim=4), Table("dynamic", rows=None, capacity=90, dim=4)]
NOW = timedelta(0)


RULES = Grid(resets=False, ratio=0.05)


class Life:
    """A process that resumes a version, trains and saves, beside a copy of every version."""

    def __init__(
        self, store: BlobStore, states: dict[int, Any], seed: int, layout: Any = "grid",
        retention: Any = None,
    ) -> None:  # fmt: skip
        self.cluster: LocalCluster = local(shards=1, threads=1).open(TABLES, SGD(lr=0.1), seed=3)
        if not Repository.exists(store):
            Repository.create(store, schema=self.cluster.schema())
        self.states = states
        self.random = np.random.default_rng(seed)
        self.checkpointer = Checkpointer(
            Repository.open(store),
            self.cluster,
            # Without resets, which depend on how long things took. Little is passed over, because
            # the rows are so few and short that hardly any would be moved.
            spec=VersionSpec(layout=layout, grid=RULES if layout == "grid" else None),
            settings=SaveSettings(retention=retention or KeepAll(), grace=NOW),
        )

    def resume(self, version: int | None = None) -> None:
        restored = self.checkpointer.restore(version)
        assert restored is not None
        assert state(self.cluster) == self.states[restored.manifest.version.number]

    def train(self) -> None:
        batch = {
            "fixed": np.unique(self.random.integers(0, 60, 9)).tolist(),
            "dynamic": np.unique(self.random.integers(0, 80, 9)).tolist(),
        }
        grads = {name: self.random.standard_normal((len(i), 4)) for name, i in batch.items()}
        self.cluster.push(wanted_of(self.cluster, batch), grads_of(self.cluster, grads), lr=0.1)

    def save(self, versions: int = 1) -> None:
        for _ in range(versions):
            self.train()
            self.checkpointer.save(1)
            manifest = self.checkpointer.wait()
            assert manifest is not None
            self.states[manifest.version.number] = state(self.cluster)
        self.checkpointer.settle()

    def failed_save(self) -> None:
        self.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.checkpointer.save(1)
            with pytest.raises(SaveError):
                self.checkpointer.wait()


def check(store: BlobStore, states: dict[int, Any]) -> None:
    """Every version that stands is what it was, and verify agrees."""
    repository = Repository.open(store)
    assert verify(repository).ok
    assert summary.check(repository, pool=Pool(1)).damages == ()
    for version in repository.versions():
        cluster = local(shards=1, threads=1).open(TABLES, SGD(lr=0.1), seed=3)
        copy = MemoryStore()
        for info in store.list():
            copy.put(info.name, store.get(info.name))
        Checkpointer(Repository.open(copy), cluster).restore(version.number)
        assert state(cluster) == states[version.number], version


def test_a_version_that_is_continued_twice_starts_a_second_grid() -> None:
    store, states = MemoryStore(), dict[int, Any]()
    first = Life(store, states, 1)
    first.save(3)
    first.checkpointer.repository.tag("old", 3)
    first.save(2)
    for seed in (2, 3, 4):
        # Retention removes the versions that went on from the tagged one, not the tagged one.
        life = Life(store, states, seed, retention=KeepLast(n=2) | KeepNamed())
        life.resume(3)
        life.save(4)
        check(store, states)
    repository = Repository.open(store)
    grids = {grid_of(repository.manifest(version)) for version in repository.versions()}
    assert len(grids) == 2


@pytest.mark.parametrize("how", ["discarded", "deleted"])
def test_a_version_that_gets_the_number_of_one_that_went_is_not_taken_for_it(how: str) -> None:
    """The catalog covers the number, and has rows of the one that went."""
    store, states = MemoryStore(), dict[int, Any]()
    Life(store, states, 1).save(4)
    repository = Repository.open(store)
    newest = repository.versions()[-1]
    if how == "discarded":
        store.put(newest.manifest_name, b"garbage")
        repository.discard(newest)
    else:
        store.delete([newest.manifest_name])
    life = Life(store, states, 2, retention=KeepLast(n=2))
    life.resume()
    life.save(2)
    assert [version.number for version in Repository.open(store).versions()][-2:] == [4, 5]
    check(store, states)


def test_a_tag_does_not_pass_to_a_version_that_gets_the_number() -> None:
    store, states = MemoryStore(), dict[int, Any]()
    Life(store, states, 1).save(2)
    repository = Repository.open(store)
    repository.tag("best", 2)
    store.delete([repository.versions()[-1].manifest_name])
    life = Life(store, states, 2)
    life.resume()
    life.save()
    repository = Repository.open(store)
    assert repository.versions()[-1].number == 2
    with pytest.raises(NoVersionError, match="'best' names"):
        repository.named("best")


def test_a_healthy_grid_whose_files_are_read_in_part_is_not_called_damaged() -> None:
    store, states = MemoryStore(), dict[int, Any]()
    life = Life(store, states, 1, retention=KeepLast(n=4))
    life.save(12)
    check(store, states)


def test_a_grid_goes_on_from_its_newest_version_after_lives_that_saved_nothing() -> None:
    store, states = MemoryStore(), dict[int, Any]()
    Life(store, states, 1).save(3)
    for seed in (2, 3):
        Life(store, states, seed).resume()
    last = Life(store, states, 4)
    last.resume()
    last.save(2)
    repository = Repository.open(store)
    assert len({grid_of(repository.manifest(v)) for v in repository.versions()}) == 1
    check(store, states)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_commit_that_was_reported_as_failed_but_took_place_is_built_on(layout: Any) -> None:
    memory, states = MemoryStore(), dict[int, Any]()
    store = FaultStore(memory)
    life = Life(store, states, 1, layout)
    life.save(2)

    def lose(number: int, method: str, name: str) -> None:
        if method == "put_if_absent" and name.startswith("versions/"):
            store.before = None  # all attempts of one commit, and no operation after it
            store.faults[number] = Fault.LOSE
            store.faults[number + 1] = store.faults[number + 2] = Fault.FAIL

    store.before = lose
    life.failed_save()
    states[3] = state(life.cluster)
    life.save(2)
    assert [v.number for v in Repository.open(memory).versions()] == [1, 2, 3, 4, 5]
    check(memory, states)


def test_gc_removes_nothing_where_the_only_catalog_of_a_grid_is_damaged() -> None:
    """It names files that hold the only copy of rows; a backup of the catalog must bring them back.
    A fork has one catalog, the first of its grid."""
    store, states, copy = MemoryStore(), dict[int, Any](), MemoryStore()
    Life(store, states, 1).save(5)
    fork(Repository.open(store), 1, copy)
    (name,) = (info.name for info in copy.list("grid") if info.name.endswith(".json"))
    catalog, objects = copy.get(name), {info.name for info in copy.list()}
    assert any(names.parse_bundle(each) for each in objects)  # not all rows stand where they did
    damaged = bytearray(catalog)
    damaged[len(damaged) // 2] ^= 1
    copy.put(name, bytes(damaged))
    writer = Writer.open(Repository.open(copy))
    with pytest.raises(DamageError, match=name):
        Collector(writer, policy=KeepAll(), grace=timedelta(0)).collect()
    assert objects <= {info.name for info in copy.list()}
    copy.put(name, catalog)
    assert verify(Repository.open(copy)).ok
    check(copy, states)


@pytest.mark.parametrize("resumed", [2, 4])
@pytest.mark.parametrize("layout", ["consecutive", "grid"])
def test_the_version_that_a_run_goes_on_from_outlasts_gc_until_the_next_one(
    layout: str, resumed: int
) -> None:
    """The retention of the new process lets the resumed version go."""
    store, states = MemoryStore(), dict[int, Any]()
    Life(store, states, 1, layout).save(4)
    life = Life(store, states, 2, layout, retention=KeepLast(n=1))
    life.resume(resumed)
    life.checkpointer._collect()
    life.save(1)
    check(store, states)


def test_a_repository_in_which_a_grid_was_continued_twice_is_damaged_not_wrong() -> None:
    """As earlier releases wrote it: the catalog covers a version that is none of its past."""
    store, states = MemoryStore(), dict[int, Any]()
    first = Life(store, states, 1)
    first.save(4)
    second = Life(store, states, 2)
    second.resume(2)
    second.checkpointer._chain.baseline = grid_of(Repository.open(store).manifest(2))
    second.checkpointer._chain.newest = Repository.open(store).version(2)
    second.checkpointer._chain.grid = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.save(1)
    repository = Repository.open(store)
    assert not verify(repository).ok
    with pytest.raises(DamageError, match="continued"):
        Life(store, states, 3).checkpointer.restore(5)
    fallen = Life(store, states, 3).checkpointer.restore(fall_back=True)
    assert fallen is not None
    assert fallen.manifest.version.number == 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_manifest_is_damage_and_earlier_versions_serve(layout: Any) -> None:
    store, states = MemoryStore(), dict[int, Any]()
    Life(store, states, 1, layout).save(5)
    repository = Repository.open(store)
    store.delete([repository.version(4).manifest_name])
    fallen = Life(store, states, 3, layout).checkpointer.restore(fall_back=True)
    assert fallen is not None
    assert fallen.manifest.version.number == (3 if fallen.lost else 5)
    assert "missing" in {damage.problem for damage in verify(repository).damages}


def test_gc_removes_nothing_where_versions_are_not_to_be_seen() -> None:
    """`versions/` is a mount of its own that is not there."""
    store, states = MemoryStore(), dict[int, Any]()
    Life(store, states, 1, "consecutive").save(3)
    life = Life(store, states, 2, "consecutive", retention=KeepLast(n=1))
    hidden = {info.name: store.get(info.name) for info in store.list("versions")}
    store.delete(hidden)
    before = {info.name for info in store.list("data")}
    with pytest.warns(UserWarning, match="missing"):
        life.checkpointer._collect()
    assert {info.name for info in store.list("data")} == before
    for name, content in hidden.items():
        store.put(name, content)
    check(store, states)


def test_gc_spares_the_files_of_a_grid_whose_catalog_is_gone() -> None:
    store, states = MemoryStore(), dict[int, Any]()
    life = Life(store, states, 1)
    life.save(6)
    catalogs = {i.name: store.get(i.name) for i in store.list("grid") if i.name.endswith("json")}
    assert catalogs
    store.delete(catalogs)
    before = {info.name for info in store.list("moved")}
    assert before
    life.checkpointer.repository.catalogs.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life.checkpointer._collect()
        Life(store, states, 2).checkpointer._collect()
    assert {info.name for info in store.list("moved")} >= before
    for name, content in catalogs.items():
        store.put(name, content)
    check(store, states)

"""A follower beside a run: every refresh is the version bit for bit, and reads what is new."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.checkpoint import Checkpointer, Extras, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import (
    ConfigError,
    DamageError,
    IdError,
    NoRepositoryError,
    StateError,
    StorageError,
)
from emberkeep.inference import Follower, View
from emberkeep.repository import KeepAll, KeepLast, Repository, Writer, fork
from emberkeep.repository.policies import LAYOUTS
from emberkeep.tables import Normal, RowWiseAdagrad, Table
from emberkeep.testing.stores import RecordingStore
from tests.contracts.engine import grads_of, wanted_of
from tests.nightly import checkered

TABLES = [
    Table("fixed", rows=500, dim=6),
    Table("dynamic", rows=None, capacity=400, dim=6, init=Normal(0.1, 0.2)),
    Table("evicting", rows=None, capacity=60, dim=6, on_full="evict_oldest"),
    Table("wide", rows=80, dim=9),
]
KEEP = SaveSettings(retention=KeepAll(), grace=timedelta(0))


def opened(shards: int = 1) -> LocalCluster:
    return local(shards=shards, threads=1).open(TABLES, RowWiseAdagrad(lr=0.05), seed=3)


def train(cluster: LocalCluster, random: np.random.Generator, steps: int = 2) -> None:
    for _ in range(steps):
        tables = cluster.tables
        table = tables[random.integers(0, len(tables))]
        cluster.delete(table.name, random.integers(0, table.rows or 300, 15))
        batch = {t.name: np.unique(random.integers(0, t.rows or 300, 25)).tolist() for t in tables}
        dims = {t.name: t.dim for t in tables}
        grads = {name: random.standard_normal((len(i), dims[name])) for name, i in batch.items()}
        cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.05)


def started(cluster: LocalCluster, store: BlobStore, **settings: Any) -> Checkpointer:
    if not Repository.exists(store):
        Repository.create(store, schema=cluster.schema())
    return Checkpointer(Repository.open(store), cluster, **{"settings": KEEP, **settings})


def save(keeper: Checkpointer, step: int) -> int:
    dense = safetensors.numpy.save({"bias": np.full(3, step, np.float32)})
    keeper.save(step, Extras(dense=dense, user={"step": step}))
    manifest = keeper.wait()
    assert manifest is not None
    return manifest.version.number


def weights(source: Any) -> dict[str, bytes]:
    """Every row of every table, trained or not, as bytes."""
    read = (lambda name, ids: source.read(name, ids)["weight"]) if hasattr(source, "read") else (
        source.lookup
    )  # fmt: skip
    return {t.name: read(t.name, np.arange(t.rows or 320)).tobytes() for t in TABLES}


@pytest.mark.parametrize(("layout", "shards"), checkered(LAYOUTS, [1, 3]))
@pytest.mark.long
def test_every_refresh_is_the_newest_version(layout: Any, shards: int) -> None:
    random = np.random.default_rng(shards)
    store, cluster = MemoryStore(), opened(shards)
    keeper = started(cluster, store, spec=VersionSpec(layout=layout))
    follower = Follower(store)
    assert follower.refresh() is None
    with pytest.raises(StateError, match=r"call refresh\(\) first"):
        follower.lookup("fixed", [1])
    for step in range(1, 16):
        train(cluster, random)
        expected = weights(cluster)
        counts = {table.name: cluster.touched_ids(table.name).size for table in TABLES}
        number = save(keeper, step)
        train(cluster, random)
        if step % 3:  # sometimes several versions at once
            assert follower.refresh() == number == follower.version
            assert follower.refresh() is None
            assert weights(follower) == expected
            assert follower.dense()["bias"].tolist() == [step] * 3
            assert follower.view().manifest.user == {"step": step}
            for name, trained in counts.items():
                assert follower.view().trained_rows(name) == trained


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_quantized_versions_are_served_as_they_restore(bits: int) -> None:
    random = np.random.default_rng(bits)
    store, cluster = MemoryStore(), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout="consecutive", bits=bits))
    follower = Follower(store)
    for step in range(1, 5):
        train(cluster, random)
        save(keeper, step)
        follower.refresh()
    restored = opened()
    started(restored, store).restore()
    assert weights(follower) == weights(restored)


def test_a_refresh_reads_the_new_increment_alone() -> None:
    random = np.random.default_rng(0)
    store, cluster = RecordingStore(MemoryStore()), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout="consecutive"))
    follower = Follower(store)
    for step in range(1, 8):
        train(cluster, random)
        number = save(keeper, step)
        store.operations.clear()
        follower.refresh()
        files = {file.name for file in keeper.repository.manifest(number).files}
        read = {name for method, name in store.operations if method.startswith("get")}
        assert {name for name in read if name.startswith("data/")} == files
        assert sum(name.startswith("versions/") for name in read) == 1
    store.operations.clear()
    assert follower.refresh() is None
    assert not [name for _, name in store.operations if name.startswith(("data", "pins"))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.long
def test_a_run_that_is_taken_back_is_followed_back(layout: Any) -> None:
    """Rows that only the abandoned versions changed must not stay as those versions left them."""
    random = np.random.default_rng(4)
    store, cluster = MemoryStore(), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout=layout))
    follower = Follower(store)
    for step in range(1, 20):
        train(cluster, random, steps=1)
        if step % 4 == 0:
            back = int(random.integers(max(1, step // 2), keeper.repository.latest().number + 1))  # type: ignore[union-attr]
            keeper.restore(back)
        expected = weights(cluster)
        save(keeper, step)
        follower.refresh()
        assert weights(follower) == expected


def test_gc_and_a_fenced_writer_do_not_disturb() -> None:
    random = np.random.default_rng(5)
    store, cluster = MemoryStore(), opened()
    settings = SaveSettings(retention=KeepLast(n=1), grace=timedelta(0))
    spec = VersionSpec(layout="intermittent")
    keeper = started(cluster, store, spec=spec, settings=settings)
    follower = Follower(store)
    for step in range(1, 25):
        train(cluster, random)
        save(keeper, step)
        if step % 5 == 0:
            Writer.open(Repository.open(store))  # another process takes over and dies
            keeper = started(cluster, store, spec=spec, settings=settings)
            keeper.restore()
        if step % 4 == 0:
            expected = weights(cluster)
            assert follower.refresh() is not None
            assert weights(follower) == expected
    assert not list(store.list("pins"))


class Interfering(WrapperStore):
    """Lets something else happen before a chosen read of a data file."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.before_data: Any = None
        self.read_only = False

    def put(self, name: str, data: Any) -> int:
        if self.read_only:
            raise StorageError("read-only")
        return super().put(name, data)

    def delete(self, names: Iterable[str]) -> None:
        assert not self.read_only
        super().delete(names)

    def get(self, name: str) -> bytes:
        if name.startswith("data/") and self.before_data is not None:
            act, self.before_data = self.before_data, None
            act()
        return super().get(name)


@pytest.mark.parametrize("read_only", [False, True])
def test_gc_in_the_middle_of_a_refresh(read_only: bool) -> None:
    """A reader that may write pins; one that may not plans again."""
    random = np.random.default_rng(6)
    inner, cluster = MemoryStore(), opened()
    settings = SaveSettings(retention=KeepLast(n=1), grace=timedelta(0))
    keeper = started(cluster, inner, spec=VersionSpec(layout="full"), settings=settings)
    train(cluster, random)
    save(keeper, 1)
    store = Interfering(inner)
    store.read_only = read_only
    follower = Follower(store)

    def newer() -> None:
        train(cluster, random)
        save(keeper, 2)

    pinned = weights(cluster)
    store.before_data = newer
    assert follower.refresh() == (2 if read_only else 1)
    assert weights(follower) == (weights(cluster) if read_only else pinned)


def test_damage_leaves_what_is_served() -> None:
    random = np.random.default_rng(7)
    store, cluster = MemoryStore(), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout="consecutive"))
    follower = Follower(store)
    train(cluster, random)
    save(keeper, 1)
    follower.refresh()
    before, view = weights(follower), follower.view()
    train(cluster, random)
    rows, dense = keeper.repository.manifest(save(keeper, 2)).files
    for file in (rows, dense):
        content = store.get(file.name)
        store.put(file.name, content[:-1] + bytes([content[-1] ^ 1]))
        for _ in range(3):
            with pytest.raises(DamageError, match=file.name):
                follower.refresh()
            assert (follower.version, weights(follower)) == (1, before)
        store.delete([file.name])
        with pytest.raises(DamageError, match=file.name):
            follower.refresh()
        store.put(file.name, content)
    assert follower.refresh() == 2
    assert weights(follower) == weights(cluster)
    assert weights(view) == before


def test_views_stay_as_they_are_and_memory_does_not_grow() -> None:
    random = np.random.default_rng(8)
    store, cluster = MemoryStore(), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout="consecutive"))
    follower = Follower(store)
    train(cluster, random, steps=30)
    save(keeper, 1)
    follower.refresh()
    held: list[tuple[View, dict[str, bytes]]] = []
    slots = []
    for step in range(2, 40):
        if step < 20 and step % 4 == 0:
            held.append((follower.view(), weights(follower)))
        if step == 20:
            held.clear()
        train(cluster, random, steps=1)
        save(keeper, step)
        follower.refresh()
        assert all(weights(view) == expected for view, expected in held)
        slots.append(sum(arena._fresh for arena in follower._arenas.values()))
    # Once nobody holds an old view, slots are used again.
    assert slots[-1] == slots[20]


@pytest.mark.long
def test_readers_in_threads_see_whole_versions() -> None:
    """Every version sets all rows of both tables to one number; no lookup may see two."""
    tables = [Table("a", rows=3000, dim=4), Table("b", rows=None, capacity=3000, dim=4)]
    cluster = local(threads=1).open(tables, RowWiseAdagrad(lr=0.1), seed=0)
    store = MemoryStore()
    keeper = started(cluster, store, spec=VersionSpec(layout="consecutive"))
    ids = np.arange(3000)

    def write(value: int) -> None:
        for table in tables:
            planes = {name: v * 0 + value for name, v in cluster.read(table.name, ids).items()}
            cluster.install(table.name, ids, planes)
        save(keeper, value)

    write(1)
    follower = Follower(store)
    follower.refresh()
    stop, failures = threading.Event(), []

    def look() -> None:
        latest = 0.0
        while not stop.is_set():
            view = follower.view()
            seen = {float(v) for name in "ab" for v in np.unique(view.lookup(name, ids))}
            if len(seen) != 1 or min(seen) < latest:
                failures.append(seen)
            latest = max(seen)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for value in range(2, 16):
        write(value)
        assert follower.refresh() == value
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_forks_and_replaced_repositories() -> None:
    random = np.random.default_rng(9)
    store, other, cluster = MemoryStore(), MemoryStore(), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout="one_shot"))
    for step in (1, 2):
        train(cluster, random)
        save(keeper, step)
    fork(keeper.repository, 2, other)
    follower, first = Follower(other), Follower(store)
    assert (follower.refresh(), first.refresh()) == (2, 2)
    assert weights(follower) == weights(cluster) == weights(first)
    branch = opened()
    second = started(branch, other, spec=VersionSpec(layout="one_shot"))
    second.restore()
    train(branch, random)
    save(second, 3)
    assert follower.refresh() == 3
    assert weights(follower) == weights(branch)
    assert first.refresh() is None
    store.delete([info.name for info in store.list()])
    with pytest.raises(NoRepositoryError):
        first.refresh()
    started(opened(), store)
    with pytest.raises(StateError, match="another repository"):
        first.refresh()
    assert weights(first) == weights(cluster)


def test_lookups_check_what_they_are_asked() -> None:
    store, cluster = MemoryStore(), opened()
    keeper = started(cluster, store)
    train(cluster, np.random.default_rng(0))
    save(keeper, 1)
    follower = Follower(store)
    follower.refresh()
    assert follower.lookup("fixed", [[1, 2], [3, 4], [1, 1]]).shape == (3, 2, 6)
    assert follower.lookup("fixed", 7).shape == (6,)
    assert follower.lookup("fixed", []).shape == (0, 6)
    assert follower.view().tables == tuple(t.name for t in TABLES)
    with pytest.raises(IdError, match=r"rows 0\.\.499, id 500"):
        follower.lookup("fixed", [1, 500])
    with pytest.raises(ConfigError, match="integers"):
        follower.lookup("fixed", [1.5])
    with pytest.raises(ConfigError, match="no table 'fixd'; there are fixed"):
        follower.lookup("fixd", [1])
    with pytest.raises(ValueError, match="read-only"):
        follower.dense()["bias"][0] = 1
    with pytest.raises(NoRepositoryError):
        Follower(MemoryStore())


def test_rows_that_were_never_stored_are_refused_where_nothing_says_how_they_begin() -> None:
    """Tables of plain torch modules: every row is stored, none is computed."""
    cluster, store = opened(), MemoryStore()
    schema = cluster.schema()
    for table in schema["tables"].values():
        table["origin"] = "stored"
    repository = Repository.create(store, schema=schema)
    cluster.schema = lambda: schema  # type: ignore[method-assign]
    keeper = Checkpointer(repository, cluster, settings=KEEP)
    cluster.push(
        wanted_of(cluster, {"wide": [3]}), grads_of(cluster, {"wide": np.ones((1, 9))}), lr=1
    )
    save(keeper, 1)
    follower = Follower(store)
    follower.refresh()
    assert follower.lookup("wide", [3]).tobytes() == cluster.read("wide", np.array([3]))[
        "weight"
    ].tobytes()  # fmt: skip
    with pytest.raises(IdError, match="no row 4"):
        follower.lookup("wide", [3, 4])

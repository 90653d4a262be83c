"""How versions are read when they are brought back: many reads at once, few requests, bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from emberkeep.blobs import BlobStore, Buffer, LocalStore, MemoryStore, Part, Reading, read_into
from emberkeep.blobs.direct_file import is_aligned
from emberkeep.blobs.wrapper import WrapperStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import ConfigError
from emberkeep.repository.grid import bundle_reader, version_rows
from emberkeep.repository.policies import Grid, Layout
from emberkeep.tables import Table
from tests.contracts.engine import state
from tests.contracts.layout import opened, started, train

ROWS = (".arrow", ".grid")


class Watched(WrapperStore):
    """Counts requests by name, and notices how many reads of rows are under way at once: each waits
    for another one, unless none comes."""

    reads_at_once = 8

    def __init__(self, inner: BlobStore, together: int = 1) -> None:
        super().__init__(inner)
        self.requests: list[str] = []
        self.most = self.most_nbytes = 0
        self._now = self._nbytes = 0
        self._together = together
        self._changed = threading.Condition()

    def get(self, name: str) -> bytes:
        with self._read(name, 0):
            return self.inner.get(name)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        with self._read(name, length):
            return self.inner.get_range(name, start, length)

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        with self._read(name, len(into)):
            return read_into(self.inner, name, start, into)

    @contextmanager
    def _read(self, name: str, nbytes: int) -> Iterator[None]:
        self.requests.append(name)
        if not name.endswith(ROWS):  # catalogs, which are read before anything else can be
            yield
            return
        with self._changed:
            self._now += 1
            self._nbytes += nbytes
            self.most = max(self.most, self._now)
            self.most_nbytes = max(self.most_nbytes, self._nbytes)
            self._changed.notify_all()
            if self.most < self._together:
                self._changed.wait_for(lambda: self.most >= self._together, timeout=20)
        try:
            yield
        finally:
            with self._changed:
                self._now -= 1
                self._nbytes -= nbytes


def history(store: BlobStore, layout: Layout, versions: int = 6) -> LocalCluster:
    """A run whose versions are all kept."""
    cluster, random = opened(), np.random.default_rng(0)
    grid = Grid(resets=False) if layout == "grid" else None
    keeper = started(cluster, store, spec=VersionSpec(layout=layout, grid=grid))
    train(cluster, random, steps=20)
    for step in range(1, versions + 1):
        train(cluster, random, steps=1)
        keeper.save(step)
        keeper.wait()
    keeper.close()
    return cluster


@pytest.mark.parametrize("layout", ["consecutive", "grid"])
def test_rows_of_many_files_are_read_at_once(layout: Layout, tmp_path: Path) -> None:
    cluster = history(LocalStore(tmp_path), layout)
    store, fresh = Watched(LocalStore(tmp_path), together=4), opened()
    started(fresh, store).restore()
    assert store.most >= 4
    assert state(fresh) == state(cluster)


@pytest.mark.parametrize("layout", ["full", "consecutive", "grid"])
def test_any_depth_and_budget_bring_the_same_rows(layout: Layout, tmp_path: Path) -> None:
    cluster = history(LocalStore(tmp_path), layout)
    for depth, nbytes in ((1, 1), (2, 5000), (50, 2**20)):
        store, fresh = Watched(LocalStore(tmp_path)), opened()
        keeper = Checkpointer(
            started(opened(), store).repository, fresh,
            settings=SaveSettings(read_depth=depth, read_nbytes=nbytes),
        )  # fmt: skip
        keeper.restore()
        assert store.most <= depth
        assert state(fresh) == state(cluster)


@pytest.mark.parametrize("batch_nbytes", [1, 6000, 15_000])
def test_rows_of_a_grid_are_the_same_however_many_batches_they_are_looked_at_in(
    batch_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them is the shortest, and comes first."""
    cluster = history(LocalStore(tmp_path), "grid")
    monkeypatch.setattr(version_rows, "_BATCH_NBYTES", batch_nbytes)
    for store in (LocalStore(tmp_path), Watched(LocalStore(tmp_path))):
        fresh = opened()
        started(fresh, store).restore()
        assert state(fresh) == state(cluster)


def test_the_shortest_batch_comes_first_and_the_others_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(version_rows, "_BATCH_NBYTES", 1)
    lengths = [50_000, 30_000, 10_000, 20_000]
    runs = [
        version_rows._Run("of one file", np.arange(length // 1000), 0, length, 0)
        for length in lengths
    ]
    batches = version_rows._batches(runs)
    assert [run.length for [run] in batches] == [10_000, 50_000, 30_000, 20_000]


class Together(Watched):
    """Reads whole blocks of any number of parts at once."""

    reads_together = True

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner)
        self.calls_of_blocks = self.calls_of_others = 0

    def read_parts(self, parts: Sequence[Part]) -> list[int]:
        whole = [is_aligned(part.start, part.into) for part in parts]
        self.calls_of_blocks += any(whole)
        self.calls_of_others += not all(whole)
        return [self.read_into(*part) for part in parts]


def test_what_does_not_begin_where_rows_can_be_used_is_read_by_many_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies of some widths end at any byte: those after them are not read as whole blocks, and
    a store that reads blocks together reads these one after the other."""
    monkeypatch.setattr(bundle_reader, "_DISK_GAP_NBYTES", -1)
    tables = [Table("fixed", rows=900, dim=5), Table("dynamic", rows=None, capacity=700, dim=7)]
    cluster = opened(tables)
    spec = VersionSpec(layout="grid", bits=3, grid=Grid(resets=False))
    keeper, random = started(cluster, LocalStore(tmp_path), spec=spec), np.random.default_rng(0)
    for step in range(1, 13):
        train(cluster, random)
        keeper.save(step)
        keeper.wait()
    keeper.close()
    store, fresh, plain = Together(LocalStore(tmp_path)), opened(tables), opened(tables)
    started(fresh, store).restore()
    started(plain, WrapperStore(LocalStore(tmp_path))).restore()
    assert state(fresh) == state(plain)
    assert store.calls_of_blocks == 2  # heads, and what bodies there are at such places
    assert store.calls_of_others > 4


def test_a_store_says_how_many_reads_pay_and_settings_may_choose_others() -> None:
    assert Reading.of(LocalStore("x")) == Reading(depth=16, nbytes=128 * 2**20)
    assert Reading.of(WrapperStore(MemoryStore())).depth == 1
    assert Reading.of(Watched(MemoryStore())).depth == 8
    chosen = SaveSettings(read_depth=100).reading(MemoryStore())
    assert chosen == Reading(depth=100, nbytes=256 * 2**20)
    assert chosen.part_nbytes == 2 * 2**20
    for wrong in ({"read_depth": 0}, {"read_nbytes": 0}):
        with pytest.raises(ConfigError, match=r"must be 1 or more, not 0"):
            SaveSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["intermittent", "grid"])
def test_a_restore_reads_each_manifest_once_while_it_is_pinned(layout: Layout) -> None:
    inner = MemoryStore()
    cluster = history(inner, layout)
    store, fresh = Watched(inner), opened()
    keeper = started(fresh, store)
    store.requests.clear()
    keeper.restore()
    manifests = [name for name in store.requests if name.startswith("versions/")]
    assert len(manifests) == len(set(manifests))
    assert state(fresh) == state(cluster)

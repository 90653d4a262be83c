"""Grids of rows that servers hold: each writes, extracts and restores its own part.

Servers are objects of this process, so that one can be lost at any message.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec, load
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import DamageError, ShardLostError
from emberkeep.repository import KeepAll, KeepEvery, KeepLast, Repository, fork, verify
from emberkeep.repository.grid.catalog import Catalog, grid_of, newest_catalog
from emberkeep.repository.policies import Grid
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad
from emberkeep.testing.local_transport import LocalNetwork, LocalServers, Rule
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.cluster import push
from tests.contracts.engine import state, tables

SHARDS = 3
ALL_ROWS = {"chunks", "read", "read_all", "install"}
"""Messages that carry rows, but for pulls and pushes."""


class Job:
    """Servers, a run that is saved as a grid, and a copy of every version."""

    def __init__(self, path: Path, shards: int = SHARDS, retention: Any = None) -> None:
        self.network = LocalNetwork(VirtualClock())
        self.hosts = LocalServers(self.network, shards)
        self.cluster = FlightCluster(
            tables(), Adagrad(lr=0.1), self.hosts, seed=3, pool=Pool(1), clock=self.network.clock,
            transport=self.network.transport(),
        )  # fmt: skip
        store = LocalStore(path)
        if not Repository.exists(store):
            Repository.create(store, schema=self.cluster.schema())
        self.repository = Repository.open(store)
        self.events: list[tuple[str, Any]] = []
        self.keeper = Checkpointer(
            self.repository, self.cluster,
            spec=VersionSpec(layout="grid", grid=Grid(ratio=0.1, resets=False)),
            settings=SaveSettings(retention=retention or KeepAll(), grace=timedelta(0), nice=0),
            on_event=lambda *event: self.events.append(event),
        )  # fmt: skip
        self.random = np.random.default_rng(1)
        self.states: dict[int, Any] = {}

    def save(self, versions: int = 1) -> None:
        for _ in range(versions):
            push(self.cluster, self.random)
            self.keeper.save(1)
            manifest = self.keeper.wait()
            assert manifest is not None
            self.states[manifest.version.number] = state(self.cluster)
            self.keeper.settle()

    def catalog(self) -> Catalog:
        repository = Repository.open(self.repository.store)
        grid = grid_of(repository.manifest(repository.versions()[-1]))
        assert grid is not None
        return newest_catalog(repository, grid)

    def events_of(self, name: str) -> list[Any]:
        return [details for event, details in self.events if event == name]

    def check(self) -> None:
        """Every version that stands is what it was, for any number of shards."""
        repository = Repository.open(self.repository.store)
        assert verify(repository).ok
        for version in repository.versions():
            shards = 1 + version.number % (SHARDS + 1)
            fresh = local(shards=shards, threads=1).open(tables(), Adagrad(lr=0.1), seed=3)
            load(repository, version, fresh, Pool(1))
            assert state(fresh) == self.states[version.number], version

    def sent(self, since: int = 0) -> set[str]:
        return {event.kind for event in self.network.events[since:]}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "run")
    yield made
    made.keeper.close()
    made.cluster.close()


def test_every_server_writes_extracts_and_restores_its_own_part(job: Job) -> None:
    """No rows pass through the process that coordinates, and no catalog is written there."""
    job.save(9)
    job.cluster.clear()
    at = len(job.network.events)
    job.keeper.restore(7)
    kinds = job.sent(at)
    assert "load" in kinds
    assert not kinds & ALL_ROWS
    assert state(job.cluster) == job.states[7]
    catalog = job.catalog()
    assert catalog.covered == 9
    assert [part.shard for part in catalog.parts] == list(range(SHARDS))
    for part in catalog.parts:
        files = part.files(job.repository).values()
        assert {file.file.metadata["shard"] for file in files} == {part.shard}
        assert any(file.file.name.startswith("moved/") for file in files), "nothing was moved"
    coordinators = {e.kind for e in job.network.events if e.sender == "client"}
    assert {"write", "extract"} <= coordinators
    assert "chunks" not in coordinators
    job.check()


def test_rows_come_to_any_number_of_servers(job: Job, tmp_path: Path) -> None:
    job.save(6)
    for shards in (1, 2, SHARDS + 1):
        other = Job(tmp_path / "run", shards)
        at = len(other.network.events)
        other.keeper.restore(4)
        assert not other.sent(at) & ALL_ROWS
        assert state(other.cluster) == job.states[4]
        other.states = dict(job.states)
        other.save()  # with another number of shards, a grid of its own
        newest = other.repository.manifest(other.repository.versions()[-1])
        assert grid_of(newest) == newest.version
        other.keeper.close()
        other.cluster.close()
        job.states = other.states
    other.check()


def test_a_run_goes_on_with_the_grid_of_the_one_before(job: Job, tmp_path: Path) -> None:
    """Servers that know nothing of living rows read them again."""
    job.save(5)
    other = Job(tmp_path / "run")
    other.keeper.restore()
    other.states = dict(job.states)
    other.save(4)
    repository = other.repository
    assert len({grid_of(repository.manifest(v)) for v in repository.versions()}) == 1
    assert other.catalog().covered == 9
    other.check()
    other.keeper.close()
    other.cluster.close()


def test_versions_that_go_leave_the_parts_of_all_servers(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", retention=KeepEvery(m=4) | KeepLast(n=2))
    job.save(14)
    repository = Repository.open(job.repository.store)
    assert [v.number for v in repository.versions()] == [4, 8, 12, 13, 14]
    job.check()
    # Nothing that lived between two versions alone is listed any more, and no file is left over.
    catalog = job.catalog()
    for part in catalog.parts:
        table = part.everything(catalog.repository)
        for birth, death in zip(table["birth"].tolist(), table["death"].tolist(), strict=True):
            assert any(birth <= v.number < death for v in repository.versions())
    stored = {i.name for i in repository.store.list("moved")}
    assert stored <= catalog.files()
    copy = fork(repository, 8, LocalStore(tmp_path / "fork"))
    fresh = local(shards=2, threads=1).open(tables(), Adagrad(lr=0.1), seed=3)
    load(copy, copy.versions()[-1], fresh, Pool(1))
    assert state(fresh) == job.states[8]
    assert verify(copy).ok
    job.keeper.close()
    job.cluster.close()


@pytest.mark.parametrize("how", ["refuse", "lose", "repeat"])
def test_a_round_whose_order_fails_leaves_the_grid_as_it_was(job: Job, how: Any) -> None:
    job.save(4)
    before = job.catalog()
    job.network.rules = [Rule(how=how, kind="extract", server="server-2")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.save()
    if how == "repeat":  # the second is late, and changes nothing
        assert job.catalog().covered == 5
    else:
        assert len(job.events_of("extraction_failed")) == 1
        assert job.catalog() == before
    job.network.rules = []
    job.save(2)
    assert job.catalog().covered == 7
    job.check()


@pytest.mark.parametrize("kind", ["extract", "work"])
def test_a_server_that_dies_in_a_round_leaves_the_grid_as_it_was(job: Job, kind: str) -> None:
    job.save(5)
    before = job.catalog()
    service = job.network.servers["server-1"]
    begin, died = service.rounds.begin, []

    def dies(*given: Any, **named: Any) -> None:
        if kind == "work":  # it has prepared its part, and nobody hears of it
            begin(*given, **named)
            with contextlib.suppress(Exception):
                service.rounds.job[1].result()  # type: ignore[index]
        died.append(1)
        job.network.stop("server-1")
        raise ShardLostError((1,))

    service.rounds.begin = dies  # type: ignore[method-assign]
    push(job.cluster, job.random)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.keeper.save(1)
        assert job.keeper.wait() is not None
        job.keeper.settle()
    assert died
    assert job.catalog() == before
    assert len(job.events_of("extraction_failed")) == 1
    # All go back to the newest version on what there is now, and the grid goes on.
    job.hosts.replace(1, "")
    other = Job(Path(job.repository.store.url.removeprefix("file://")))
    other.keeper.restore()
    other.states = {**job.states, 6: state(other.cluster)}
    other.save(2)
    assert other.catalog().covered == 8
    other.check()
    other.keeper.close()
    other.cluster.close()


def test_a_damaged_segment_is_named_and_brings_nothing_wrong(job: Job, tmp_path: Path) -> None:
    job.save(8)
    repository = Repository.open(job.repository.store)
    segments = [i.name for i in repository.store.list("moved") if i.name.endswith(".catalog")]
    named = [name for name in segments if name in job.catalog().files()]
    name = named[0]
    content = bytearray(repository.store.get(name))
    for at in np.linspace(0, len(content) - 1, 10).astype(int).tolist():
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        repository.store.put(name, bytes(damaged))
        assert name in {d.name for d in verify(Repository.open(repository.store)).damages}
        fresh = local(shards=1, threads=1).open(tables(), Adagrad(lr=0.1), seed=3)
        again = Repository.open(repository.store)
        for version in again.versions()[::3]:
            with contextlib.suppress(DamageError):
                load(again, version, fresh, Pool(1))
                assert state(fresh) == job.states[version.number]  # it reads other blocks
    repository.store.put(name, bytes(content))
    job.check()

"""Versions of rows that servers hold, servers being objects of this process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec, load
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_rows import RemoteRows
from emberkeep.errors import CancelledError, SaveError
from emberkeep.keeper.combined_subject import CombinedSubject
from emberkeep.repository import Repository
from emberkeep.repository.policies import LAYOUTS
from emberkeep.runtime.pool import Pool
from emberkeep.server import version_work
from emberkeep.tables import Adagrad
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.cluster import push
from tests.contracts.engine import state, tables
from tests.nightly import checkered
from tests.threads import started_since

SHARDS = 3


class Job:
    """Ranks over the servers of one network; the first coordinates."""

    def __init__(self, shards: int = SHARDS) -> None:
        self.network = LocalNetwork(VirtualClock())
        self.hosts = LocalServers(self.network, shards)
        self.ranks: list[FlightCluster] = []

    def join(self) -> FlightCluster:
        rank = len(self.ranks)
        cluster = FlightCluster(
            tables(), Adagrad(lr=0.1), self.hosts, seed=3, pool=Pool(1), clock=self.network.clock,
            transport=self.network.transport(f"rank-{rank}"), coordinate=rank == 0,
        )  # fmt: skip
        self.ranks.append(cluster)
        return cluster


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for cluster in reversed(made.ranks):
        cluster.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_does_not_coordinate_leaves_the_rows_to_the_one_that_does(
    job: Job, tmp_path: Path, layout: Any
) -> None:
    cluster = job.join()
    repository = Repository.create(LocalStore(tmp_path), schema=cluster.schema())
    with_layout = VersionSpec(layout=layout)
    keeper = Checkpointer(repository, cluster, spec=with_layout)
    push(cluster, np.random.default_rng(1), 3)
    keeper.save(1)
    saved = keeper.wait()
    assert saved is not None
    keeper.close()
    expected = state(cluster)
    follower = job.join()
    cluster.clear()
    Checkpointer(repository, cluster, spec=with_layout).restore()
    before = len(job.network.events)
    assert load(repository, saved.version, follower, Pool(1)).manifest == saved
    sent = {event.kind for event in job.network.events[before:] if event.sender == "rank-1"}
    assert sent == set()
    assert state(follower) == expected


@pytest.mark.filterwarnings("ignore:saving step")
@pytest.mark.parametrize("error", [MemoryError("no memory"), SystemExit(3)], ids=lambda e: type(e))
def test_when_a_server_cannot_write_the_others_are_given_up_and_awaited(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before, cluster = set(threading.enumerate()), job.join()
    repository = Repository.create(LocalStore(tmp_path), schema=cluster.schema())
    keeper = Checkpointer(repository, cluster)
    push(cluster, np.random.default_rng(1), 3)
    given_up: list[bool] = []

    def write(rows: RemoteRows, *_: Any, cancelled: threading.Event, **__: Any) -> None:
        if rows._shard.index == 1:
            raise error
        given_up.append(cancelled.wait(10))
        raise CancelledError("given up")

    with monkeypatch.context() as patched:
        patched.setattr(RemoteRows, "write", write)
        saving = keeper.save(1)
        with pytest.raises(SaveError) as failed:
            keeper.wait()
    assert failed.value.__cause__ is error
    assert saving.copied.exception() is error
    assert given_up == [True, True]
    assert not started_since(before, "emberkeep-write")
    keeper.save(2)
    assert keeper.join(timedelta(seconds=60))
    assert keeper.wait() is not None
    keeper.close()
    assert not started_since(before, "emberkeep-save")


def test_a_late_cancel_does_not_cancel_the_next_save(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent for a save that has ended since, and arrives when the rows of the next one are
    frozen, before they are written and while they are."""
    cluster = job.join()
    repository = Repository.create(LocalStore(tmp_path), schema=cluster.schema())
    keeper = Checkpointer(repository, cluster)
    late: list[dict[str, Any]] = []
    write, write_held = RemoteRows.write, version_work.write_held

    def cancel_earlier() -> None:
        for header in late:
            for service in job.network.servers.values():
                list(service.act("cancel", header, {}))

    def noted(rows: RemoteRows, draft: Any, *given: Any, **named: Any) -> None:
        cancel_earlier()
        write(rows, draft, *given, **named)
        late.append({"epoch": rows._epoch, "nonce": draft.nonce, "version": str(draft.version)})

    def cancelled_late(*given: Any, **named: Any) -> float:
        cancel_earlier()
        return write_held(*given, **named)

    monkeypatch.setattr(RemoteRows, "write", noted)
    monkeypatch.setattr(version_work, "write_held", cancelled_late)
    for step in (1, 2):
        push(cluster, np.random.default_rng(step), 3)
        keeper.save(step)
        saved = keeper.wait()
        assert saved is not None
        late = late[:SHARDS]  # those of the first save
    keeper.close()
    expected = state(cluster)
    cluster.clear()
    load(repository, saved.version, cluster, Pool(1))
    assert state(cluster) == expected


def test_servers_give_a_cancelled_version_up(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = job.join()
    repository = Repository.create(LocalStore(tmp_path), schema=cluster.schema())
    keeper = Checkpointer(repository, cluster)
    push(cluster, np.random.default_rng(1), 3)
    heard: list[bool] = []

    def write_held(*_: Any, cancelled: threading.Event, **__: Any) -> None:
        heard.append(cancelled.wait(20))
        raise CancelledError("given up")

    with monkeypatch.context() as patched:
        patched.setattr(version_work, "write_held", write_held)
        keeper.save(1)
        keeper.cancel()
        with pytest.raises(CancelledError):
            keeper.wait()
    assert heard == [True] * SHARDS
    keeper.save(2)
    assert keeper.wait() is not None
    keeper.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities of threads")
def test_servers_write_in_threads_that_yield_and_say_what_that_took(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = job.join()
    repository = Repository.create(LocalStore(tmp_path), schema=cluster.schema())
    events: list[Any] = []
    keeper = Checkpointer(
        repository, cluster, settings=SaveSettings(nice=7),
        on_event=lambda *event: events.append(event),
    )  # fmt: skip
    push(cluster, np.random.default_rng(1), 3)
    priorities: list[int] = []
    put = LocalStore.put

    def watched(store: LocalStore, name: str, data: Any) -> int:
        if name.startswith("data/"):
            me = threading.get_native_id()
            priorities.append(os.getpriority(os.PRIO_PROCESS, me))
        return put(store, name, data)

    monkeypatch.setattr(LocalStore, "put", watched)
    keeper.save(1)
    keeper.wait()
    own = keeper._cores.seconds
    keeper.close()
    assert len(priorities) >= SHARDS
    assert min(priorities) >= 7
    (saved,) = [details for name, details in events if name == "saved"]
    assert saved["core_seconds"] > own
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_servers_of_two_clusters_write_one_version_under_names_of_their_own(
    tmp_path: Path, layout: Any
) -> None:
    jobs = Job(), Job()
    clusters = [job.join() for job in jobs]
    subject = CombinedSubject([("one", clusters[0]), ("two", clusters[1])])
    repository = Repository.create(LocalStore(tmp_path), schema=subject.schema())
    keeper = Checkpointer(repository, subject, spec=VersionSpec(layout=layout))
    for step in (1, 2):
        for seed, cluster in enumerate(clusters):
            push(cluster, np.random.default_rng(2 * step + seed), 3)
        keeper.save(step)
        saved = keeper.wait()
        assert saved is not None
        names = [file.name for file in saved.files]
        assert len({*names}) == len(names) == 2 * SHARDS
    keeper.close()
    expected = [state(cluster) for cluster in clusters]
    assert expected[0] != expected[1]
    for cluster in clusters:
        cluster.clear()
    Checkpointer(repository, subject, spec=VersionSpec(layout=layout)).restore()
    assert [state(cluster) for cluster in clusters] == expected
    for cluster in clusters:
        cluster.close()


@pytest.mark.parametrize(("layout", "now"), checkered(LAYOUTS, [3, 4]))
def test_a_smaller_cluster_that_has_grown_loads_all_rows_and_starts_a_baseline(
    tmp_path: Path, layout: Any, now: int
) -> None:
    def started(shards: int) -> FlightCluster:
        return Job(shards).join()

    with_layout = VersionSpec(layout=layout)
    larger, before = started(4), started(2)
    subject = CombinedSubject([("one", larger), ("two", before)])
    repository = Repository.create(LocalStore(tmp_path), schema=subject.schema())
    keeper = Checkpointer(repository, subject, spec=with_layout)
    for step in (1, 2):
        push(larger, np.random.default_rng(step), 3)
        push(before, np.random.default_rng(step + 9), 3)
        keeper.save(step)
        keeper.wait()
    keeper.close()
    after = started(now)
    resumed = Checkpointer(
        repository, CombinedSubject([("one", larger), ("two", after)]), spec=with_layout
    )
    resumed.restore()
    names = [table.name for table in after.tables]
    assert [after.digest(name) for name in names] == [before.digest(name) for name in names]
    push(after, np.random.default_rng(20))
    resumed.save(3)
    saved = resumed.wait()
    assert saved is not None
    # A server that is lost later reads the files of its own shard alone.
    assert saved.layout["kind"] == "full"
    resumed.close()
    for cluster in (larger, before, after):
        cluster.close()

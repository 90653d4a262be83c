"""What servers write, what this process writes and what extraction writes keep to one limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.checkpoint.save import Extras
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.keeper.combined_subject import CombinedSubject
from emberkeep.repository import KeepAll, Repository
from emberkeep.repository.policies import Grid
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.cluster import push
from tests.contracts.engine import tables

SERVERS = 3
RATE = 6.0
LIMITED = SaveSettings(most_mb_per_second=RATE, retention=KeepAll(), grace=timedelta(0))
DENSE = Extras(dense=bytes(1000))


class Job:
    """Servers that are objects of this process."""

    def __init__(self) -> None:
        self.network = LocalNetwork(VirtualClock())
        self.cluster = FlightCluster(
            tables(), Adagrad(lr=0.1), LocalServers(self.network, SERVERS), seed=3, pool=Pool(1),
            clock=self.network.clock, transport=self.network.transport(),
        )  # fmt: skip

    def limits(self) -> list[Bandwidth]:
        """Those of the servers."""
        return [service._grid.bandwidth for service in self.network.servers.values()]


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.cluster.close()


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[Bandwidth, float]:
    """The most that each limit would have let through, by the limit; nobody waits."""
    seen: dict[Bandwidth, float] = {}
    lock = threading.Lock()

    def spend(limit: Bandwidth, nbytes: int, cancelled: Any = None) -> None:
        with lock:
            seen[limit] = max(seen.get(limit, 0.0), limit.share() or 0.0)

    monkeypatch.setattr(Bandwidth, "spend", spend)
    return seen


@pytest.mark.parametrize("layout", ["consecutive", "grid"])
def test_servers_and_rows_of_this_process_share_the_limit(
    job: Job, rates: dict[Bandwidth, float], tmp_path: Path, layout: Any
) -> None:
    beside = local(shards=2, threads=1).open(tables(), Adagrad(lr=0.1), seed=3)
    subject = CombinedSubject([("one", job.cluster), ("two", beside)])
    repository = Repository.create(LocalStore(tmp_path), schema=subject.schema())
    keeper = Checkpointer(
        repository, subject, spec=VersionSpec(layout=layout), settings=LIMITED
    )  # fmt: skip
    for step in (1, 2):
        for cluster in (job.cluster, beside):
            push(cluster, np.random.default_rng(step), 3)
        keeper.save(step)
        keeper.wait()
    keeper.close()
    assert set(rates) == {keeper._bandwidth, *job.limits()}
    assert sum(rates.values()) == pytest.approx(RATE)
    beside.close()


def test_a_save_and_extraction_on_servers_share_the_limit(
    job: Job, rates: dict[Bandwidth, float], tmp_path: Path
) -> None:
    """Also with the dense state, which this process writes while servers may be extracting."""
    events: list[tuple[str, Any]] = []
    repository = Repository.create(LocalStore(tmp_path), schema=job.cluster.schema())
    keeper = Checkpointer(
        repository, job.cluster, settings=LIMITED,
        spec=VersionSpec(layout="grid", grid=Grid(ratio=0.1, resets=False)),
        on_event=lambda *event: events.append(event),
    )  # fmt: skip
    random = np.random.default_rng(1)
    for step in range(1, 7):
        push(job.cluster, random)
        keeper.save(step, DENSE)
        keeper.wait()
        keeper.settle()
    keeper.close()
    assert any(name == "extracted" and about["written_nbytes"] for name, about in events)
    assert set(rates) == {keeper._bandwidth, *job.limits()}
    assert sum(rates.values()) == pytest.approx(RATE)


def test_without_rows_of_this_process_servers_have_the_whole_limit(
    job: Job, rates: dict[Bandwidth, float], tmp_path: Path
) -> None:
    repository = Repository.create(LocalStore(tmp_path), schema=job.cluster.schema())
    keeper = Checkpointer(repository, job.cluster, settings=LIMITED)
    push(job.cluster, np.random.default_rng(1), 3)
    keeper.save(1, DENSE)
    keeper.wait()
    keeper.close()
    assert [rates[limit] for limit in job.limits()] == pytest.approx([RATE / SERVERS] * SERVERS)
    assert rates[keeper._bandwidth] == RATE  # for the dense state, once they have ended


def test_a_process_that_is_being_stopped_lifts_the_limits_of_servers_with_its_next_version(
    job: Job, rates: dict[Bandwidth, float], tmp_path: Path
) -> None:
    repository = Repository.create(LocalStore(tmp_path), schema=job.cluster.schema())
    keeper = Checkpointer(
        repository, job.cluster, settings=LIMITED, spec=VersionSpec(layout="grid")
    )  # fmt: skip
    push(job.cluster, np.random.default_rng(1), 3)
    keeper.save(1)
    keeper.wait()
    keeper.settle()
    assert [limit.share() for limit in job.limits()] == [RATE / (SERVERS + 1)] * SERVERS
    keeper._lift_limits()
    push(job.cluster, np.random.default_rng(2), 3)
    keeper.save(2)
    keeper.wait()
    keeper.close()
    assert [limit.share() for limit in job.limits()] == [None] * SERVERS

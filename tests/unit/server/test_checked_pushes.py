"""A push that one shard has checked and another refuses: nothing of it stays on any server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import ProtocolError, TableFullError
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch, Session
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.protocol import APPLY, CHECK, Request
from tests.contracts.engine import wanted_of

SECOND = timedelta(seconds=1)
LEASE = 15 * SECOND
TABLES = [
    Table("full", rows=None, capacity=4, dim=2),
    Table("roomy", rows=None, capacity=500, dim=2),
]


class Servers:
    def __init__(self, tables: Sequence[Table] = TABLES) -> None:
        self.tables = tables
        self.clock = VirtualClock()
        self.network = LocalNetwork(self.clock)
        self.hosts = LocalServers(self.network, 2)
        self.clusters = [self.join(coordinate=True)]

    def join(self, *, coordinate: bool = False) -> FlightCluster:
        return FlightCluster(
            self.tables, Adagrad(lr=0.1), self.hosts, seed=3, pool=Pool(1), coordinate=coordinate,
            timing=Timing(deadline=10 * SECOND, lease=LEASE), clock=self.clock,
            transport=self.network.transport(),
        )  # fmt: skip

    @property
    def epochs(self) -> list[Epoch]:
        found = [self.network.servers[f"server-{shard}"]._epoch for shard in range(2)]
        return [epoch for epoch in found if epoch is not None]

    def held(self) -> list[int]:
        return [len(epoch._held) for epoch in self.epochs]


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    for cluster in made.clusters:
        cluster.close()


def push(cluster: Any, ids: dict[str, list[int]]) -> None:
    wanted = wanted_of(cluster, {"full": [], "roomy": [], **ids})
    cluster.push(wanted, [np.ones((w.ids.size, 2), np.float32) for w in wanted], lr=0.1)


def owned(cluster: Any, shard: int, count: int, start: int = 0) -> list[int]:
    """Ids that a shard owns."""
    ids = np.arange(start, start + 200)
    return ids[cluster.positions("full", ids)[shard]][:count].tolist()


def refused(cluster: Any, start: int) -> None:
    """A push that shard 0 takes and shard 1 has no room for."""
    ids = {"roomy": owned(cluster, 0, 3), "full": owned(cluster, 1, 9, start)}
    with pytest.raises(TableFullError):
        push(cluster, ids)


def test_refused_pushes_leave_no_more_than_one_behind(servers: Servers) -> None:
    (cluster,) = servers.clusters
    for start in range(5):
        refused(cluster, start)
    assert max(servers.held()) <= 1
    push(cluster, {"roomy": [1, 2, 3]})
    assert servers.held() == [0, 0]


def test_what_is_held_is_bounded_by_the_number_of_workers(servers: Servers) -> None:
    servers.clusters += [servers.join(), servers.join()]
    for start in range(4):
        for cluster in servers.clusters:
            refused(cluster, start)
    assert max(servers.held()) <= 3


def test_a_worker_that_is_gone_holds_nothing_after_a_lease(servers: Servers) -> None:
    (cluster,) = servers.clusters
    for start in range(3):
        worker = servers.join()
        refused(worker, start)
        worker.close()
        del worker
        gc.collect()
        servers.clock.advance(LEASE + SECOND)
    refused(cluster, 3)
    assert max(servers.held()) <= 1


def checked(epoch: Epoch, session: Session, number: int, incarnation: int = 7) -> Any:
    dims, groups = epoch.shape.dims_G, len(epoch.shape.tables_G)
    ids = np.array(owned_by(epoch, 2), np.int64)

    wanted = [RowIds(ids, np.array([0, 0, ids.size]))] * groups
    grads = [np.ones((ids.size, dim), np.float32) for dim in dims]
    epoch.push(
        Request(
            kind=CHECK, epoch=epoch.number, incarnation=incarnation, number=number, lr=0.1,
            wanted=wanted, grads=grads,
        ),
        session,
    )  # fmt: skip
    return grads[0]


def owned_by(epoch: Epoch, count: int) -> list[int]:
    ids = np.arange(200)
    return ids[epoch.owned_ids.of("roomy", ids)][:count].tolist()


def apply(epoch: Epoch, session: Session, number: int) -> None:
    request = Request(kind=APPLY, epoch=epoch.number, incarnation=7, number=number, lr=0.1)
    epoch.push(request, session)


def test_a_push_is_withdrawn_by_its_number(servers: Servers) -> None:
    (epoch, _), session = servers.epochs, Session()
    connection = servers.clusters[0].handles[0]
    gradients = weakref.ref(checked(epoch, session, 1))
    about = {"incarnation": 7, "world": 1}
    assert not connection.ask("withdraw", {**about, "number": 2})["withdrawn"]
    assert servers.held() == [1, 0]
    assert connection.ask("withdraw", {**about, "number": 1})["withdrawn"]
    assert servers.held() == [0, 0]
    assert gradients() is None
    assert not connection.ask("withdraw", {**about, "number": 1})["withdrawn"]
    with pytest.raises(ProtocolError, match="was not checked"):
        apply(epoch, session, 1)


def test_a_push_is_applied_over_another_stream_than_it_was_checked_on(servers: Servers) -> None:
    """Whose answer was lost: the stream is made again, and the push goes on."""
    (epoch, _) = servers.epochs
    checked(epoch, Session(), 1)
    gc.collect()
    apply(epoch, Session(), 1)
    assert epoch.applied(7) == 1
    assert servers.held() == [0, 0]


def test_a_check_that_comes_again_and_fails_takes_nothing_back(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late, over a stream that its client has given up: the push was checked since."""
    (epoch, _), old, session = servers.epochs, Session(), Session()
    checked(epoch, session, 1)

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(epoch.shard, "check", fail)
        with pytest.raises(MemoryError):
            checked(epoch, old, 1)
    apply(epoch, session, 1)
    assert epoch.applied(7) == 1
    assert servers.held() == [0, 0]


def test_gradients_go_with_their_epoch(servers: Servers) -> None:
    (cluster,) = servers.clusters
    session = Session()
    gradients = weakref.ref(checked(servers.epochs[0], session, 1))
    cluster.renew(0)
    gc.collect()
    assert gradients() is None

"""Writes that end half-way on a server, with an error that nobody foresaw. Rows that have the half
of an update are lost with their shard: an update that is sent again counts once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import Home, load_shards, steps_of
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.member import ParityMember
from emberkeep.errors import EpochError, ShardLostError, TierError
from emberkeep.repository import Repository
from emberkeep.rows.slab import Slab
from emberkeep.runtime.pool import Pool
from emberkeep.server.epoch import Epoch
from emberkeep.server.pushes import Ledger
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import state, wanted_of

TABLES = [Table("first", rows=24, dim=3), Table("second", rows=None, capacity=40, dim=5)]
ERRORS = [MemoryError("no room for the second slab"), TierError("the file failed")]


class Servers:
    """Servers in this process, and a twin that never fails."""

    def __init__(self, shards: int = 3, **more: Any) -> None:
        network = LocalNetwork(VirtualClock())
        self.network = network
        self.cluster = FlightCluster(
            TABLES, Adagrad(lr=0.1), LocalServers(network, shards), seed=3, pool=Pool(1),
            transport=network.transport(), clock=network.clock, **more,
        )  # fmt: skip
        self.twin = local(shards=shards, threads=1).open(TABLES, Adagrad(lr=0.1), seed=3)

    def both(self, change: Callable[[Any], object]) -> None:
        for cluster in (self.twin, self.cluster):
            change(cluster)

    def load_shard(self, saver: Checkpointer, shard: int) -> None:
        """What a partial recovery does between renewing a shard and having it serve."""
        home = Home(self.cluster, {table.name: table.name for table in TABLES})
        assert load_shards(saver, home, [shard], steps_of(self.cluster)) is not None

    def check(self) -> None:
        assert state(self.cluster) == state(self.twin)
        self.cluster.close()


def push(cluster: Any) -> None:
    wanted = wanted_of(cluster, {"first": list(range(24)), "second": list(range(12))})
    cluster.push(wanted, [np.ones((24, 3), np.float32), np.ones((12, 5), np.float32)], lr=0.1)


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception, *,
    when: Callable[..., bool] = lambda *_: True, after: bool = False,
) -> Callable[[], None]:  # fmt: skip
    """Once what is returned was called, the next call of a method fails; before it has done
    anything, or `after`."""
    real, left = getattr(owner, name), []

    def failing(self: Any, *given: Any, **named: Any) -> Any:
        due = left and when(self)
        if due and not after:
            raise left.pop()
        result = real(self, *given, **named)
        if due:
            raise left.pop()
        return result

    monkeypatch.setattr(owner, name, failing)
    return lambda: left.append(error)


def on_server(slab: Slab) -> bool:
    """Of the second slab of a shard; the twin is trained before anything fails."""
    return slab.dim == 5


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_push_that_ends_half_way_counts_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Parity brings the shard back as it was before: it has heard nothing of the half."""
    servers = Servers(parity=Parity(k=2, r=1))
    fail = fail_once(monkeypatch, Slab, "push", error, when=on_server)
    servers.both(push)
    push(servers.twin)
    fail()
    push(servers.cluster)
    servers.both(push)
    servers.check()


@pytest.mark.parametrize(
    ("owner", "name"), [(ParityMember, "record"), (Ledger, "note")], ids=["parity", "ledger"]
)
@pytest.mark.parametrize("after", [False, True])
def test_a_push_that_was_applied_and_could_not_be_noted_counts_once(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    servers = Servers(parity=Parity(k=2, r=1))
    fail = fail_once(monkeypatch, owner, name, MemoryError("no room for a note"), after=after)
    servers.both(push)
    push(servers.twin)
    fail()
    push(servers.cluster)
    servers.both(push)
    servers.check()


@pytest.mark.parametrize("shards", [1, 2])
def test_without_parity_the_shard_is_lost_and_comes_back_from_a_version(
    monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """With one shard the push was said to be applied nowhere, and was there in part."""
    servers = Servers(shards)
    cluster = servers.cluster
    cluster.track()
    saver = Checkpointer(Repository.create(MemoryStore(), schema=cluster.schema()), cluster)
    servers.both(push)
    saver.save(1)
    assert saver.wait() is not None
    fail_once(monkeypatch, Slab, "push", MemoryError("no room"), when=on_server)()
    with pytest.raises(ShardLostError) as lost:
        push(cluster)
    assert lost.value.shards == (0,)
    assert servers.network.servers["server-0"].epoch is None
    cluster.renew(*range(shards))
    assert saver.restore() is not None
    cluster.serve(*range(shards))
    servers.both(push)
    servers.check()
    saver.close()


def test_the_server_says_why_it_has_let_its_rows_go(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(1)
    heard: list[Any] = []
    monkeypatch.setattr(
        servers.network.servers["server-0"], "_tell", lambda *event: heard.append(event)
    )
    fail_once(monkeypatch, Slab, "push", MemoryError("no room"), when=on_server)()
    with pytest.raises(ShardLostError):
        push(servers.cluster)
    ((event, about),) = heard
    assert event == "failed"
    assert "half-way (MemoryError('no room'))" in about["error"]
    servers.cluster.close()


def upsert(cluster: Any) -> None:
    cluster.upsert("second", np.arange(8, 20), {"weight": np.ones((12, 5), np.float32)})


def delete(cluster: Any) -> None:
    cluster.delete("second", np.arange(6))


@pytest.mark.parametrize(
    ("change", "name"), [(upsert, "install"), (delete, "delete")], ids=["upsert", "delete"]
)
def test_other_writes_that_end_half_way_are_made_again_on_the_rows_before(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], name: str
) -> None:
    servers = Servers(parity=Parity(k=2, r=1))
    fail = fail_once(monkeypatch, Slab, name, MemoryError("no room"), when=on_server, after=True)
    servers.both(push)
    change(servers.twin)
    fail()
    change(servers.cluster)
    servers.both(push)
    servers.check()


def test_rows_that_are_refused_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is no write that ended half-way."""
    servers = Servers(1)
    push(servers.cluster)
    before = state(servers.cluster)
    epoch = servers.cluster.handles[0].epoch
    with pytest.raises(Exception, match="planes"):
        servers.cluster.install("second", np.arange(3), {"weight": np.ones((3, 5), np.float32)})
    assert state(servers.cluster) == before
    assert servers.cluster.handles[0].epoch == epoch
    servers.cluster.close()


def test_a_push_stands_where_it_cannot_be_said_what_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that were pulled ahead are pulled again."""
    servers = Servers()
    servers.both(push)
    cluster = servers.cluster
    wanted = wanted_of(cluster, {"first": list(range(24)), "second": list(range(12))})
    cluster.prefetch(wanted)
    fail_once(monkeypatch, Epoch, "_changed_now", MemoryError("no room"))()
    servers.both(push)
    for own, other in zip(cluster.pull(wanted), servers.twin.pull(wanted), strict=True):
        assert own.tobytes() == other.tobytes()
    servers.check()


def test_who_comes_later_hears_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the failure and the end of the epoch nobody sees the half of an update."""
    servers = Servers(1)
    service = servers.network.servers["server-0"]
    epoch = service.epoch
    assert epoch is not None
    fail_once(monkeypatch, Slab, "push", MemoryError("no room"), when=on_server)()
    monkeypatch.setattr(service, "let_go", lambda _: None)
    with pytest.raises(ShardLostError):
        push(servers.cluster)
    assert epoch.shard.state == "lost"
    with pytest.raises(EpochError, match="half-way"), epoch.writing():
        epoch.shard.delete("first", np.arange(2))
    servers.cluster.close()

"""Servers whose pushes, deletions and recoveries are larger than what one frame between them may
hold. All limits are 4096 times smaller than they are, and so are the rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.erasure import messages, rebuilder
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.messages import Differences, Message
from emberkeep.erasure.peers import Peer
from emberkeep.erasure.rebuilder import Rebuilder
from emberkeep.errors import ProtocolError, ShardLostError
from emberkeep.server import parity_sender
from emberkeep.server.parity_sender import Sender
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire import protocol
from emberkeep.wire.security import Security
from tests.contracts.engine import state
from tests.faults.test_local_network import opened

SMALLER = 2**12


class Limits:
    """What a frame may hold, as long as they are set."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()

    def set(self) -> None:
        for module, name in (
            (protocol, "MAX_FRAME_NBYTES"), (messages, "MESSAGE_NBYTES"),
            (rebuilder, "_ROUND_NBYTES"), (parity_sender, "_BATCH_NBYTES"),
        ):  # fmt: skip
            limit = getattr(module, name, 0) // SMALLER
            self._patch.setattr(module, name, limit, raising=False)
        self._patch.setattr(rebuilder, "_MARK_STRIPES", 2**10)

    def lift(self) -> None:
        self._patch.undo()


@pytest.fixture
def limits() -> Iterator[Limits]:
    made = Limits()
    yield made
    made.lift()


def servers(table: Table, parity: Parity) -> tuple[FlightCluster, LocalServers]:
    network = LocalNetwork(VirtualClock())
    hosts = LocalServers(network, parity.k + parity.r)
    return opened(network, hosts, [table], parity=parity), hosts


def twin(table: Table, parity: Parity) -> Any:
    return local(shards=parity.k + parity.r, threads=1).open([table], Adagrad(lr=0.1), seed=3)


def push(cluster: Any, ids: np.ndarray) -> None:
    (table,) = cluster.tables
    grads = np.random.default_rng(ids.size).standard_normal((ids.size, table.dim), np.float32)
    cluster.push([RowIds(ids, np.array([0, ids.size]))], [grads], lr=0.1)


@pytest.mark.parametrize("parity", [Parity(k=1, r=1), Parity(k=2, r=2)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_large_push_and_a_large_deletion_are_protected(
    limits: Limits, parity: Parity, dynamic: bool
) -> None:
    """Their differences are more than a host can be sent at once."""
    rows = 6000
    size = {"capacity": 2 * rows} if dynamic else {"rows": rows}
    table = Table("t", dim=4, **size)
    cluster, hosts = servers(table, parity)
    expected = twin(table, parity)
    events: list[str] = []
    cluster.on_event = lambda event, _: events.append(event)
    ids = np.arange(rows)
    limits.set()
    for each in (cluster, expected):
        push(each, ids)
        push(each, ids[::2])
    assert cluster.parity is not None
    assert cluster.parity.protected
    for each in (cluster, expected):
        each.delete("t", ids[1000:5000])
    assert cluster.parity.protected
    assert "unprotected" not in events
    hosts.kill(0)
    push(cluster, ids[:10])
    cluster.rebuild()
    limits.lift()
    push(expected, ids[:10])
    assert cluster.parity.protected
    assert state(cluster) == state(expected)
    assert cluster.losses == [0]
    cluster.close()


def test_a_shard_of_more_rows_than_a_frame_can_name_comes_back(limits: Limits) -> None:
    parity = Parity(k=4, r=1)
    table = Table("t", rows=50_000, dim=2)
    cluster, hosts = servers(table, parity)
    expected = twin(table, parity)
    ids = np.arange(0, table.slots, 60)
    for each in (cluster, expected):
        push(each, ids)
    limits.set()
    hosts.kill(0)
    for each in (cluster, expected):
        push(each, ids[:7])
    cluster.rebuild()
    limits.lift()
    assert state(cluster) == state(expected)
    assert cluster.losses == [0]
    cluster.close()


def test_rows_that_are_wide_come_back_and_are_protected_again(limits: Limits) -> None:
    """A chunk of them, of `chunk_rows`, is more than a frame can hold."""
    parity = Parity(k=1, r=1)
    table = Table("t", rows=1200, dim=32)
    cluster, hosts = servers(table, parity)
    expected = twin(table, parity)
    ids = np.arange(1200)
    for each in (cluster, expected):
        push(each, ids)
    limits.set()
    hosts.kill(0)
    cluster.pull([RowIds(ids[:1], np.array([0, 1]))])
    cluster.rebuild()
    limits.lift()
    assert cluster.parity is not None
    assert cluster.parity.protected
    assert state(cluster) == state(expected)
    cluster.close()


def test_the_repository_is_asked_where_parity_meets_an_error_that_nobody_foresaw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, hosts = servers(Table("t", rows=40, dim=2), Parity(k=2, r=1))
    asked: list[tuple[int, ...]] = []

    def on_loss(lost: ShardLostError) -> bool:
        asked.append(lost.shards)
        assert cluster.lost() == (1,)
        cluster.renew(1)
        cluster.serve(1)
        return True

    def fails(*_: object) -> None:
        raise ProtocolError("a frame is too long")

    cluster.on_loss = on_loss
    push(cluster, np.arange(40))
    hosts.kill(1)
    with monkeypatch.context() as patched:
        patched.setattr(Rebuilder, "recover_marks", fails)
        with pytest.warns(UserWarning, match=r"cannot bring shards 1 back \(ProtocolError: a fr"):
            push(cluster, np.arange(40))
    assert asked == [(1,)]
    cluster.rebuild()
    hosts.kill(1)
    push(cluster, np.arange(40))  # from parity again
    assert asked == [(1,)]
    cluster.close()


def test_many_messages_without_rows_are_not_sent_at_once() -> None:
    """Each of them names the state of every table."""
    nothing = Differences((), None, tuple(range(2000)))
    sender = Sender(
        Peer(1, "nowhere", 1), Placement(2, 1, 1), security=Security(),
        deadline=timedelta(seconds=60), acknowledged=lambda *_: None, stuck=lambda _: None,
    )  # fmt: skip
    sender._queue.extend(Message(0, 1, number, 0, nothing) for number in range(1, 5000))
    assert len(sender._next()) < 1000

"""What single servers do when things go wrong around them: stopped and woken, unreachable, answers
lost on the way, a coordinator that dies between the shards' writes and the commit."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import ConfigError, EpochError, ServerError, ShardLostError
from emberkeep.repository import Repository
from emberkeep.repository.writer import Draft
from emberkeep.runtime import pool
from emberkeep.tables import SGD, Table
from emberkeep.testing.proxy import Proxy
from emberkeep.wire.connection import Connection
from emberkeep.wire.protocol import PULL, PUSH, Request, check_reply, pack_request
from emberkeep.wire.security import Security
from tests.contracts.engine import state
from tests.faults.lives import Nursery
from tests.servers import Farm, FarmLauncher
from tests.waiting import until

TABLE = Table("t", rows=40, dim=3)
IDS = [RowIds(np.arange(40), np.array([0, 40]))]
ONES = [np.ones((40, 3), np.float32)]
MINUTE = timedelta(minutes=1)
"""Of what is answered at once: on a busy machine too."""
QUICK = Timing(deadline=timedelta(seconds=1), lease=timedelta(seconds=1.5))


def opened(hosts: FarmLauncher | FixedAddresses, timing: Timing | None = None) -> FlightCluster:
    return FlightCluster([TABLE], SGD(lr=1.0), hosts, pool=pool.Pool(1), timing=timing)


def test_a_stopped_server_that_wakes_beside_its_replacement_is_refused(farm: Farm) -> None:
    hosts = FarmLauncher(farm, 2)
    cluster = opened(hosts, QUICK)
    zombie, address = hosts.servers[1]
    old = cluster.handles[1].epoch
    os.kill(zombie, signal.SIGSTOP)
    lapsed = time.monotonic() + QUICK.lease.total_seconds()
    hosts.servers[1] = farm.start()  # as a supervisor on another machine would
    with pytest.raises(ShardLostError):
        cluster.pull(IDS)
    cluster.handles[1].address = hosts.address(1)
    # Nobody can know that it is dead: the lease says so, which nobody has renewed since.
    until(lambda: time.monotonic() > lapsed, "the end of the lease")
    cluster.renew(1)
    cluster.serve(1)
    cluster.push(IDS, ONES, lr=1.0)
    before = state(cluster)

    os.kill(zombie, signal.SIGCONT)
    connection = Connection(address, Security())
    connection.open(MINUTE)
    odd = RowIds(np.arange(1, 40, 2), np.array([0, 20]))
    for epoch, kind in ((old, PUSH), (old, PULL), (cluster.handles[1].epoch, PULL)):
        request = Request(
            kind=kind, epoch=epoch, incarnation=7, number=1, lr=1.0, wanted=[odd],
            grads=[ONES[0][:20]] if kind == PUSH else [],
        )  # fmt: skip
        connection.send(pack_request(request), MINUTE)
        with pytest.raises(EpochError):
            check_reply(connection.receive())
    with pytest.raises(EpochError):
        connection.act(
            "install", {"epoch": old, "table": "t"}, {"": np.array([1])},
            deadline=MINUTE,
        )  # fmt: skip
    connection.close()
    assert state(cluster) == before
    cluster.close()
    farm.kill(zombie)
    hosts.end()


def test_a_port_where_nobody_answers_costs_a_deadline_and_no_more(farm: Farm) -> None:
    hosts = FarmLauncher(farm, 1)
    with socket.socket() as silent:  # it is connected to, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        cluster = opened(hosts, QUICK)
        cluster.handles[0].disconnect()
        cluster.handles[0].address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(ShardLostError):
            cluster.pull(IDS)
        assert time.monotonic() - start < 60  # not the patience that a missing server gets
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    start = time.monotonic()
    nobody = FixedAddresses([f"127.0.0.1:{port}"], Security(), patience=timedelta(seconds=1))
    with pytest.raises(ServerError, match="start emberkeep serve"):
        opened(nobody, QUICK)
    assert time.monotonic() - start < 60
    cluster.close()
    hosts.end()


def test_a_second_run_does_not_take_the_servers_of_the_first(farm: Farm) -> None:
    hosts = FarmLauncher(farm, 1)
    first = opened(hosts, QUICK)
    first.push(IDS, ONES, lr=1.0)
    with pytest.raises(ServerError, match="another run, whose coordinator is alive"):
        opened(hosts, QUICK)
    first.pull(IDS)
    first._leases.stop()  # type: ignore[union-attr]
    second = opened(hosts, QUICK)  # once the lease has passed
    with pytest.raises(ShardLostError):
        first.pull(IDS)
    assert second.touched_ids("t").size == 0
    second.close()
    hosts.end()


def test_a_push_whose_answer_was_lost_is_applied_once(farm: Farm) -> None:
    hosts = FarmLauncher(farm, 1)
    proxy = Proxy(hosts.address(0))
    through = FixedAddresses([proxy.address], Security(), patience=MINUTE)
    cluster, twin = opened(through), local().open([TABLE], SGD(lr=1.0), seed=0)
    for _ in range(6):
        proxy.lose_answer()
        cluster.push(IDS, ONES, lr=1.0)
        twin.push(IDS, ONES, lr=1.0)
        proxy.lose_answer(False)
    assert proxy.lost_answers >= 5
    assert state(cluster) == state(twin)
    assert cluster.table_state() == twin.table_state()
    cluster.close()
    proxy.close()
    hosts.end()


def test_pushes_go_on_after_all_servers_were_lost_together(farm: Farm) -> None:
    hosts = FarmLauncher(farm, 2)
    cluster = opened(hosts)
    twin = local(shards=2).open([TABLE], SGD(lr=1.0), seed=0)
    cluster.push(IDS, ONES, lr=1.0)

    def on_loss(_lost: ShardLostError) -> bool:
        gone = cluster.lost()
        cluster.renew(*gone)
        cluster.serve(*gone)
        return True

    cluster.on_loss = on_loss
    for shard in range(2):
        hosts.kill(shard)
    for _ in range(3):  # the first meets the loss, and is made again on empty servers
        cluster.push(IDS, ONES, lr=1.0)
        twin.push(IDS, ONES, lr=1.0)
    assert state(cluster) == state(twin)
    cluster.close()
    hosts.end()


def coordinate_and_die(where: str, *addresses: str) -> None:
    """Trains, saves, and dies when all shards have written and nothing is committed."""
    hosts = FixedAddresses(addresses, Security(), patience=MINUTE)
    cluster = opened(hosts, QUICK)
    repository = Repository.create(LocalStore(where), schema=cluster.schema())
    keeper = Checkpointer(repository, cluster)
    cluster.push(IDS, ONES, lr=1.0)
    keeper.save(1)
    keeper.wait()
    cluster.push(IDS, ONES, lr=1.0)
    Draft.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    keeper.save(2)
    keeper.join()


def test_a_coordinator_that_dies_before_the_commit_leaves_the_version_before(
    farm: Farm, nursery: Nursery, tmp_path: Path
) -> None:
    hosts = FarmLauncher(farm, 2)
    where, log = tmp_path / "r", tmp_path / "log"
    life = (
        "call",
        "tests.faults.test_servers_alone:coordinate_and_die",
        str(where),
        *map(hosts.address, range(2)),
    )
    assert nursery.live(*life, log=log) == -signal.SIGKILL, log.read_text()
    store = LocalStore(where)
    assert any("0000000002" in info.name for info in store.list("data"))  # the shards had written
    successor = opened(hosts, QUICK)  # waits until the lease of the dead one has passed
    repository = Repository.open(store)
    keeper = Checkpointer(repository, successor)
    restored = keeper.restore()
    assert restored is not None
    assert restored.manifest.step == 1
    twin = local(shards=2).open([TABLE], SGD(lr=1.0), seed=0)
    twin.push(IDS, ONES, lr=1.0)
    assert state(successor) == state(twin)
    successor.push(IDS, ONES, lr=1.0)
    manifest = (keeper.save(2), keeper.wait())[1]
    assert manifest is not None
    assert manifest.step == 2
    successor.close()
    hosts.end()


def test_a_server_that_is_asked_to_end_answers_what_it_has_started(farm: Farm) -> None:
    from emberkeep.server.epoch import Session
    from emberkeep.server.shard_service import ShardService

    served = ShardService(threads=1)
    assert served.drain(1.0)
    reply = served.answer(np.zeros(48, np.uint8), Session())
    with pytest.raises(ServerError, match="shutting down"):
        check_reply(reply)


def test_waiting_times_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="lease"):
        Timing(lease=timedelta(seconds=1), deadline=timedelta(seconds=2))
    with pytest.raises(ConfigError, match="above 0"):
        Timing(deadline=timedelta(0))

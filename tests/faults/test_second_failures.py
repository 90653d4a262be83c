"""What follows a write that ends half-way, a load, or an error that passes: rows that come back
later are those that there were."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.erasure import coded_slabs, member, messages
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.host import ParityHost
from emberkeep.erasure.member import ParityMember
from emberkeep.erasure.messages import Differences, Wanted
from emberkeep.errors import ShardLostError
from emberkeep.repository import Repository
from emberkeep.rows.slab import Slab
from emberkeep.runtime.pool import Pool
from emberkeep.server.parity_service import ParityService
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers, Rule
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire import protocol
from tests.contracts.engine import state, wanted_of
from tests.faults.test_half_writes import TABLES, Servers, fail_once, push
from tests.waiting import until


def before_let_go(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], object]) -> None:
    """Has something happen when a server has let go of its rows, and its streams are open yet."""
    let_go = ShardService.let_go

    def acting(self: ShardService, epoch: Any) -> None:
        monkeypatch.setattr(ShardService, "let_go", let_go)
        act(epoch.parity_service)
        let_go(self, epoch)

    monkeypatch.setattr(ShardService, "let_go", acting)


# -- a shard that a write has torn -----------------------------------------------------------------


def ask_values(service: ParityService) -> None:
    group, _ = service.placement.groups(0)[0]
    with pytest.raises(ShardLostError):
        service.member.send_values([Wanted(1 << 40, group, 0, "marks", np.arange(2))])


def ask_fill(service: ParityService) -> None:
    host = service.placement.hosts(0)[0]
    with pytest.raises(ShardLostError):
        service.member.send_fill(host, 0, 0, 0, 2)


def leave_out(service: ParityService) -> None:
    service.member.leave_out(99)


@pytest.mark.parametrize("asked", [ask_values, ask_fill, leave_out])
def test_the_half_of_a_write_does_not_count_whatever_is_asked_next(
    monkeypatch: pytest.MonkeyPatch, asked: Callable[[Any], object]
) -> None:
    """A message behind it would be taken for its end."""
    monkeypatch.setattr(messages, "MESSAGE_NBYTES", 24)
    servers = Servers(4, parity=Parity(k=2, r=1))
    servers.both(push)
    send, said, left = ParityMember._send, list[Differences](), [MemoryError("no room")]

    def failing(self: ParityMember, body: Any) -> int:
        if left and self.index == 0 and isinstance(body, Differences):
            said.append(body)
            if len(said) == 3:
                assert said[1].more
                raise left.pop()
        return send(self, body)

    monkeypatch.setattr(ParityMember, "_send", failing)
    before_let_go(monkeypatch, asked)
    push(servers.twin)
    push(servers.cluster)
    assert not left
    monkeypatch.undo()
    servers.check()


def test_rows_that_a_write_has_torn_are_not_decoded_with(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(5, parity=Parity(k=3, r=2))
    cluster, network = servers.cluster, servers.network
    servers.both(push)
    monkeypatch.setattr(ParityService, "_rebuild_chunk", lambda self: False)
    network.stop("server-1")
    cluster.touched_ids("first")  # it is replaced; its rows are yet to come back
    replacement = network.servers[cluster.launcher.address(1)].epoch.parity_service
    refused: list[BaseException] = []

    def decode(_: ParityService) -> None:
        try:
            while (chunk := replacement._rows.next_missing(100)) is not None:
                replacement._decode(*chunk)
        except Exception as error:
            refused.append(error)

    before_let_go(monkeypatch, decode)
    fail = fail_once(
        monkeypatch, Slab, "push", MemoryError("no room"), when=lambda slab: slab.dim == 3,
        after=True,
    )  # fmt: skip
    own = list(range(0, 24, 5))  # of shard 0

    def push_own(cluster: Any) -> None:
        wanted = wanted_of(cluster, {"first": own, "second": []})
        grads = [np.ones((len(own), 3), np.float32), np.ones((0, 5), np.float32)]
        cluster.push(wanted, grads, lr=0.1)

    push_own(servers.twin)
    fail()
    push_own(cluster)
    assert refused
    monkeypatch.undo()
    servers.check()


def fail_take(monkeypatch: pytest.MonkeyPatch, left: list[Exception]) -> None:
    take = coded_slabs.Recorder._take

    def failing(self: coded_slabs.Recorder) -> Any:
        if left and self._number == 1:
            raise left.pop()
        return take(self)

    monkeypatch.setattr(coded_slabs.Recorder, "_take", failing)


def fail_message(monkeypatch: pytest.MonkeyPatch, left: list[Exception]) -> None:
    of_write = member.of_write

    def failing(*given: Any) -> Any:
        if left:
            raise left.pop()
        return of_write(*given)

    monkeypatch.setattr(member, "of_write", failing)


def fail_keeping(monkeypatch: pytest.MonkeyPatch, left: list[Exception]) -> None:
    """Rows of the dynamic table are marked as kept, and are not."""
    add_planes = coded_slabs.add_planes

    def failing(slab: Slab, *given: Any, fresh: bool) -> None:
        if left and fresh and slab.dim == 5:
            raise left.pop()
        add_planes(slab, *given, fresh=fresh)

    monkeypatch.setattr(coded_slabs, "add_planes", failing)


@pytest.mark.parametrize("failing", [fail_take, fail_message, fail_keeping])
@pytest.mark.parametrize("background", [False, True])
def test_differences_that_are_lost_in_one_process_have_parity_start_over(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[..., None], background: bool
) -> None:
    parity = Parity(k=2, r=1, background=background)
    cluster = local(shards=3, threads=1, parity=parity).open(TABLES, Adagrad(lr=0.1), seed=3)
    push(cluster)
    left: list[Exception] = [MemoryError("no room")]
    failing(monkeypatch, left)
    with pytest.raises(MemoryError):
        push(cluster)
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rows are not protected")
        push(cluster)
    cluster.rebuild()
    assert cluster.parity is not None
    assert cluster.parity.protected
    before = state(cluster)
    cluster.kill(0)
    assert state(cluster) == before


# -- rows that parity has yet to hear of -----------------------------------------------------------


def pushed_and_saved(servers: Servers) -> Checkpointer:
    """Who holds a version of the rows after one push."""
    cluster = servers.cluster
    cluster.track()
    saver = Checkpointer(Repository.create(MemoryStore(), schema=cluster.schema()), cluster)
    servers.both(push)
    saver.save(1)
    assert saver.wait() is not None
    return saver


@pytest.mark.parametrize("every", [True, False], ids=["full", "partial"])
def test_a_shard_that_dies_before_parity_holds_what_it_was_given_is_lost_again(
    monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    """From parity it would come back without what a version was loaded for."""
    servers = Servers(4, parity=Parity(k=2, r=1))
    cluster, network = servers.cluster, servers.network
    saver = pushed_and_saved(servers)
    named = range(4) if every else range(1)

    def load_and_serve() -> None:
        if every:
            assert saver.restore() is not None
        else:
            servers.load_shard(saver, 0)
        cluster.serve(*named)

    settle, killed = FlightCluster._settle_writes, list[str]()

    def dying(self: FlightCluster) -> None:
        if not killed and not self.lost():
            killed.append(self.launcher.address(0))
            network.stop(killed[0])
            network.rules.clear()
        settle(self)

    cluster.renew(*named)
    until(lambda: not cluster.parity.unprotected_stripes, "parity of empty shards")
    network.rules.append(Rule(how="refuse", kind="parity"))
    monkeypatch.setattr(FlightCluster, "_settle_writes", dying)
    with pytest.raises(ShardLostError):
        load_and_serve()
    assert killed
    cluster.renew(*named)
    load_and_serve()
    servers.check()


def test_no_shard_serves_before_parity_holds_its_rows_because_another_is_lost() -> None:
    """If it died next, parity would bring both back, one of them without what it was given."""
    servers = Servers(5, parity=Parity(k=2, r=2))
    cluster, network = servers.cluster, servers.network
    saver = pushed_and_saved(servers)
    cluster.renew(0)
    until(lambda: not cluster.parity.unprotected_stripes, "parity of an empty shard")
    network.rules.append(Rule(how="refuse", kind="parity"))
    servers.load_shard(saver, 0)
    network.stop(cluster.launcher.address(1))
    cluster.handles[1].lose()
    with pytest.raises(ShardLostError) as raised:
        cluster.serve(0)
    assert raised.value.shards == (0, 1)
    network.rules.clear()
    cluster.renew(0, 1)
    for shard in (0, 1):
        servers.load_shard(saver, shard)
    cluster.serve(0, 1)
    servers.check()


WRITES: dict[str, Callable[[Any], object]] = {
    "delete": lambda cluster: cluster.delete("first", np.arange(12)),
    "install": lambda cluster: cluster.install(
        "first", np.arange(3), dict.fromkeys(("weight", "accumulator"), np.ones((3, 3), np.float32))
    ),
    "load_table_state": lambda cluster: cluster.load_table_state(cluster.table_state()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_what_a_worker_writes_is_answered_when_parity_holds_it(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], object]
) -> None:
    """One that does not coordinate knows nothing of parity."""
    servers = Servers(3, parity=Parity(k=2, r=1))
    servers.both(push)
    network = servers.network
    worker = FlightCluster(
        TABLES, Adagrad(lr=0.1), servers.cluster.launcher, seed=3, pool=Pool(1), coordinate=False,
        transport=network.transport(), clock=network.clock,
    )  # fmt: skip
    flush, flushed = ParityService.flush, set[int]()

    def noting(self: ParityService) -> None:
        flush(self)
        assert self._source.settled == self._source.number
        flushed.add(self._shard.index)

    monkeypatch.setattr(ParityService, "flush", noting)
    write(worker)
    assert flushed == {0, 1, 2}
    worker.close()
    servers.cluster.close()


# -- errors that pass ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["seal", "roll", "follow"])
def test_a_peer_that_is_short_of_memory_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    servers = Servers(3, parity=Parity(k=2, r=1))
    servers.both(push)
    fail_once(monkeypatch, ParityHost, name, MemoryError("for a moment"))()
    servers.network.stop("server-0")
    servers.both(push)
    servers.check()


def test_a_read_is_made_again_when_a_peer_was_short_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(3, parity=Parity(k=2, r=1))
    servers.both(push)
    monkeypatch.setattr(ParityService, "_rebuild_chunk", lambda self: False)
    servers.network.stop("server-0")
    servers.cluster.touched_ids("first")
    fail_once(monkeypatch, ParityHost, "begin", MemoryError("for a moment"))()
    servers.check()


def test_a_push_that_is_sent_again_is_not_dropped_for_an_error_that_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = ShardService.answer

    def as_over_flight(self: ShardService, blob: Any, session: Any) -> Any:
        try:
            return answer(self, blob, session)
        except Exception as error:
            return protocol.refusal(error, 0)

    monkeypatch.setattr(ShardService, "answer", as_over_flight)
    servers = Servers(3, parity=Parity(k=2, r=1, background=True))
    cluster, network = servers.cluster, servers.network
    servers.both(push)
    cluster.rebuild()
    network.rules.append(Rule(how="refuse", kind="parity"))
    servers.both(push)  # answered, and parity does not hold it
    network.stop("server-0")
    network.rules.clear()
    fail_once(
        monkeypatch, Slab, "check_push", MemoryError("for a moment"),
        when=lambda slab: slab.dim == 5,
    )()  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was not refused
        found = state(cluster)
    assert found == state(servers.twin)
    cluster.close()


# -- rows from outside -----------------------------------------------------------------------------


@pytest.mark.parametrize("frame_nbytes", [64 * 8, 2**24], ids=["several frames", "one"])
def test_rows_that_an_upsert_names_are_not_evicted_by_it(
    monkeypatch: pytest.MonkeyPatch, frame_nbytes: int
) -> None:
    """Planes that are not given stay as they are."""
    tables = [Table("evicting", rows=None, capacity=40, dim=4, on_full="evict_oldest")]
    monkeypatch.setattr(protocol, "FRAME_NBYTES", frame_nbytes)
    network = LocalNetwork(VirtualClock())
    servers = FlightCluster(
        tables, Adagrad(lr=0.1), LocalServers(network, 1), seed=3, pool=Pool(1),
        transport=network.transport(), clock=network.clock,
    )  # fmt: skip
    twin = local(shards=1, threads=1).open(tables, Adagrad(lr=0.1), seed=3)
    oldest = np.arange(10)
    for cluster in (servers, twin):
        for first in range(0, 40, 10):
            wanted = wanted_of(cluster, {"evicting": list(range(first, first + 10))})
            cluster.push(wanted, [np.ones((10, 4), np.float32)], lr=0.1)
        ids = np.concatenate([np.arange(100, 120), oldest])
        cluster.upsert("evicting", ids, {"weight": np.full((30, 4), 7, np.float32)})
    found, wanted_planes = servers.read("evicting", oldest), twin.read("evicting", oldest)
    assert found["accumulator"].tobytes() == wanted_planes["accumulator"].tobytes()
    assert set(servers.touched_ids("evicting")) == set(twin.touched_ids("evicting"))
    servers.close()

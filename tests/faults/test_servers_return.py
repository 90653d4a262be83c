"""Servers that were only unreachable come back with their rows: partitions, stopped servers, a
coordinator that stalls. On virtual time; every run is compared, bit for bit, with shards that are
objects and never fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.recovery import steps_of
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import (
    FencedError,
    ParityLossError,
    PeerError,
    RecoveryError,
    ServerError,
    ShardLostError,
    TableFullError,
)
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.local_transport import LocalNetwork, LocalServers, Rule
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.security import Security
from tests.contracts.engine import state, wanted_of

SHARDS = 3
SECOND = timedelta(seconds=1)
TIMING = Timing(deadline=10 * SECOND, lease=15 * SECOND, patience=300 * SECOND)
TABLES = [Table("fixed", rows=40, dim=3)]
DYNAMIC = [Table("dynamic", rows=None, capacity=12, dim=3)]


class Schedule(VirtualClock):
    """Virtual time with appointments."""

    def __init__(self, *, pace: float = 0.0) -> None:
        super().__init__(pace=pace)
        self._calls: list[tuple[float, Callable[[], object]]] = []

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        self._calls.append((self.monotonic() + seconds, call))

    def sleep(self, seconds: float) -> None:
        until = self.monotonic() + seconds
        while self._calls and min(self._calls, key=lambda one: one[0])[0] <= until:
            one = min(self._calls, key=lambda one: one[0])
            self._calls.remove(one)
            super().sleep(max(0.0, one[0] - self.monotonic()))
            one[1]()
        super().sleep(max(0.0, until - self.monotonic()))


class World:
    """Servers, a cluster over them, and its twin that never fails."""

    def __init__(
        self, tables: Sequence[Table] = TABLES, *, fixed: bool = False, pace: float = 0.0,
        **more: Any,
    ) -> None:  # fmt: skip
        self.clock = Schedule(pace=pace)
        self.network = LocalNetwork(self.clock)
        self.tables = tables
        if fixed:
            self.names = [f"127.0.0.1:{7000 + shard}" for shard in range(SHARDS)]
            for name in self.names:
                self.network.start(name)
            self.launcher: Any = FixedAddresses(
                self.names, Security(), patience=TIMING.patience,
                transport=self.network.transport(), clock=self.clock,
            )  # fmt: skip
        else:
            self.launcher = LocalServers(self.network, SHARDS)
            self.names = [self.launcher.address(shard) for shard in range(SHARDS)]
        self.cluster = self.open(**more)
        self.twin = local(shards=SHARDS, threads=1).open(tables, Adagrad(lr=0.1), seed=3)
        self.heard: list[str] = []
        self.cluster.on_event = lambda event, _: self.heard.append(event)

    def open(self, sender: str = "client", **more: Any) -> FlightCluster:
        return FlightCluster(
            self.tables, Adagrad(lr=0.1), self.launcher, seed=3, pool=Pool(1), timing=TIMING,
            transport=self.network.transport(sender), clock=self.clock, **more,
        )  # fmt: skip

    def push(
        self, *, twin: bool = True, ids: Sequence[int] = range(40), by: FlightCluster | None = None
    ) -> None:
        clusters: list[Any] = [by or self.cluster, *([self.twin] if twin else [])]
        for cluster in clusters:
            wanted = wanted_of(cluster, {self.tables[0].name: list(ids)})
            cluster.push(wanted, [np.ones((len(ids), 3), np.float32)], lr=0.1)

    def cut_off(self, *shards: int, seconds: float) -> None:
        self.network.partition(*(self.names[shard] for shard in shards))
        self.clock.at(seconds, self.network.partition)

    @property
    def epochs(self) -> list[int]:
        return [shard.epoch for shard in self.cluster.handles]

    def check(self) -> None:
        assert state(self.cluster) == state(self.twin)
        self.cluster.close()


CODED = Parity(k=2, r=1)
BEHIND = Parity(k=2, r=1, background=True)


@pytest.mark.parametrize(
    ("fixed", "seconds", "parity"),
    [(True, 5, None), (True, 120, None), (False, 8, None), (True, 20, CODED), (False, 8, BEHIND)],
)
def test_a_server_that_was_cut_off_goes_on_with_its_rows(
    fixed: bool, seconds: float, parity: Parity | None
) -> None:
    world = World(fixed=fixed, parity=parity)
    epochs = world.epochs
    world.push()
    for shard in range(SHARDS):
        world.cut_off(shard, seconds=seconds)
        world.push()
    world.cut_off(*range(SHARDS), seconds=seconds)
    world.cluster.pull(wanted_of(world.cluster, {"fixed": [1]}))
    world.push()
    assert world.epochs == epochs
    assert set(world.heard) <= {"silent", "returned"}
    assert "returned" in world.heard
    world.check()


def test_an_answer_that_a_partition_took_is_asked_for_again_under_the_same_number() -> None:
    """The server has applied the push, and is cut off before it can say so."""
    world = World(fixed=True)
    world.push()
    answer = world.network.servers[world.names[1]].answer

    def cut(*given: Any) -> Any:
        reply = answer(*given)
        world.network.servers[world.names[1]].answer = answer  # type: ignore[method-assign]
        world.cut_off(1, seconds=60)
        raise ServerError("the answer is lost")
        return reply

    world.network.servers[world.names[1]].answer = cut  # type: ignore[method-assign]
    world.push()
    world.push()
    world.check()


@pytest.mark.parametrize("fixed", [True, False])
def test_a_coordinator_that_stalls_for_longer_than_its_leases_loses_nothing(fixed: bool) -> None:
    world = World(fixed=fixed)
    epochs = world.epochs
    world.push()
    world.network.rules = [Rule(how="refuse", kind="renew")]  # its threads do not run
    world.clock.advance(4 * TIMING.lease)
    world.network.rules = []
    world.push()
    assert world.epochs == epochs
    world.check()


def test_a_server_that_was_started_again_does_not_pass_for_the_one_before() -> None:
    world = World(fixed=True)
    world.push()
    world.network.stop(world.names[2])
    world.clock.at(40, lambda: world.network.start(world.names[2]))
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    assert "lost" in world.heard
    assert world.clock.monotonic() < 60
    world.cluster.close()


def test_a_push_that_ended_with_a_loss_is_finished_when_the_shard_is_back() -> None:
    """Nobody recovers: the error comes out after the others have applied the push."""
    world = World()
    world.push()
    world.cut_off(1, seconds=100)
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    wanted = wanted_of(world.twin, {"fixed": list(range(40))})
    world.twin.push(wanted, [np.ones((40, 3), np.float32)], lr=0.1)
    world.clock.advance(200 * SECOND)
    world.push()
    world.check()


def test_a_full_recovery_goes_behind_a_push_that_ended_with_a_loss() -> None:
    """The server that returns has rows of before the recovery: it is renewed like the others."""
    world = World()
    world.cluster.track()
    saver = Checkpointer(
        Repository.create(MemoryStore(), schema=world.cluster.schema()), world.cluster
    )
    world.push()
    saver.save(1)
    assert saver.wait() is not None
    world.push(twin=False)
    world.cut_off(1, seconds=100)
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    world.network.stop(world.names[0])
    world.network.rules = [Rule(how="refuse", kind="admit", server=world.names[2])]
    with pytest.raises(ShardLostError):  # given up half-way: one could not be renewed
        world.cluster.renew(*range(SHARDS))
    world.network.rules = []
    world.clock.advance(200 * SECOND)
    with pytest.raises(ShardLostError):
        world.cluster.pull(wanted_of(world.cluster, {"fixed": [1]}))
    world.cluster.renew(*range(SHARDS))
    assert saver.restore() is not None
    world.cluster.serve(*range(SHARDS))
    world.push()
    saver.close()
    world.check()


def test_a_refused_push_takes_no_acknowledged_one_with_it() -> None:
    """Parity in the background: what was acknowledged is sent again if its server dies."""
    world = World(DYNAMIC, parity=Parity(k=2, r=1, background=True))
    world.push(ids=range(6))
    world.cluster.rebuild()
    world.network.rules = [Rule(how="refuse", kind="parity", server=name) for name in world.names]
    world.push(ids=range(3, 9))
    with pytest.raises(TableFullError):
        world.push(twin=False, ids=range(100, 140))
    world.launcher.kill(0)
    world.network.rules = []
    world.push(ids=range(2))
    world.cluster.rebuild()
    world.check()


def test_a_coordinator_that_was_replaced_is_refused_for_good() -> None:
    world = World(fixed=True)
    world.push()
    world.network.rules = [Rule(how="refuse", kind="renew")]
    world.clock.advance(2 * TIMING.lease)
    after = world.open("another")
    world.network.rules = []
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    with pytest.raises(FencedError, match="another process coordinates"):
        world.cluster.renew(0)
    # Also on a server that knows of no coordinator yet, once the later one has claimed it.
    world.network.start(world.names[1])
    world.cluster.handles[1].connect()
    world.cluster.handles[1].admit(99, world.cluster._about())
    after.renew(1)
    with pytest.raises(FencedError):
        world.cluster.renew(1)
    after.close()
    world.cluster.close()


def test_a_replacement_that_dies_while_it_gets_pushes_again_is_one_more_loss() -> None:
    world = World(parity=Parity(k=2, r=1, background=True))
    world.push()
    world.cluster.rebuild()
    world.network.rules = [Rule(how="refuse", kind="parity")]
    world.push()
    world.network.rules = []
    send = world.cluster._send_one
    deaths = [0, 0]

    def dies(sent: Any, index: int) -> None:
        if deaths:
            deaths.pop()
            world.launcher.kill(index)
        send(sent, index)

    world.cluster._send_one = dies  # type: ignore[method-assign]
    world.launcher.kill(1)
    world.push()
    assert not deaths
    world.cluster.rebuild()
    world.check()


def test_a_call_that_loses_its_shards_after_each_recovery_ends() -> None:
    world = World()
    brought: list[tuple[int, ...]] = []

    def bring_back(lost: ShardLostError) -> bool:
        brought.append(lost.shards)
        world.cluster.renew(*lost.shards)
        world.cluster.serve(*lost.shards)
        world.launcher.kill(1)
        return True

    world.cluster.on_loss = bring_back
    world.launcher.kill(1)
    with pytest.raises(RecoveryError, match="17 times"):
        world.push(twin=False)
    assert len(brought) == 16
    world.cluster.close()


def test_unrelated_stalls_of_peers_do_not_add_up() -> None:
    """Each is shorter than what a call waits for."""
    world = World(parity=Parity(k=2, r=1))
    for _ in range(3):
        world.network.rules = [Rule(how="refuse", kind="parity")]
        world.clock.at(8, world.network.rules.clear)
        world.push()
        world.clock.advance(5 * SECOND)
    world.check()


@pytest.mark.parametrize(
    ("rates", "given_up"), [((3, 0, 0), [1]), ((3, 2, 0), []), ((0, 0, 0), [0, 1])]
)
def test_shards_whose_rows_come_back_are_not_given_up_with_one_whose_do_not(
    rates: tuple[int, ...], given_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(parity=CODED)
    missing = [5000, 5000, 0]
    for shard, handle in enumerate(world.cluster.handles):

        def status(shard: int = shard) -> Any:
            missing[shard] -= rates[shard]
            return {"parity": {"missing_rows": missing[shard]}}

        monkeypatch.setattr(handle, "status", status)
    brought: list[Sequence[int]] = []

    def bring_back(lost: ShardLostError) -> bool:
        brought.append(lost.shards)
        return True

    monkeypatch.setattr(world.cluster, "_bring_back", bring_back)
    waited = 3.1 * TIMING.deadline.total_seconds()
    assert world.cluster._await_peers(PeerError("a host is silent"), waited) == bool(given_up)
    assert [[*shards] for shards in brought] == ([given_up] if given_up else [])
    world.cluster.close()


def test_a_server_that_returns_while_the_model_goes_back_is_renewed_like_the_others() -> None:
    """At an address that stays nobody else can take its place."""
    world = World(fixed=True)
    world.push()
    world.cut_off(1, seconds=100)
    world.cluster.renew(*range(SHARDS))
    world.cluster.serve(*range(SHARDS))
    assert world.clock.monotonic() < 120
    assert world.cluster.touched_ids("fixed").size == 0
    world.cluster.close()


def test_a_server_whose_renewal_was_decided_is_not_taken_back() -> None:
    """It has not heard of it, and has its rows: those of a model that others have left."""
    world = World(fixed=True)
    world.push()
    world.network.rules = [Rule(how="refuse", kind="admit", server=world.names[1])]
    with pytest.raises(ShardLostError):
        world.cluster.renew(*range(SHARDS))
    world.network.rules = []
    world.cluster.await_silent()
    assert world.cluster.handles[1].state == "lost"
    world.cluster.close()


@pytest.mark.parametrize("asked", ["returned", "table_state"])
def test_a_server_that_answers_while_its_renewal_is_decided_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """One thread finds it there again, another has decided meanwhile to renew it."""
    world = World(fixed=True)
    world.push()
    shard = world.cluster.handles[1]
    connect = shard.connect

    def decided_meanwhile(*address: str) -> Any:
        status = connect(*address)
        shard.give_up()
        return status

    monkeypatch.setattr(shard, "connect", decided_meanwhile)
    if asked == "returned":
        shard.lose()
        assert not shard.returned()
    else:
        world.network.rules = [
            Rule(how="refuse", kind="table_state", server=world.names[1], at=(1,))
        ]
        with pytest.raises(ShardLostError):
            shard.table_state()
    assert shard.state == "lost"
    world.cluster.close()


def test_no_lease_is_renewed_of_a_server_whose_renewal_is_decided_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would serve beside its successor."""
    world = World()
    world.push()
    shard, leases = world.cluster.handles[1], world.cluster._leases
    assert leases is not None
    kept: list[int] = []
    monkeypatch.setattr(leases, "keep", lambda shard: kept.append(shard.index))

    def decided_meanwhile() -> None:
        shard.give_up()

    monkeypatch.setattr(shard, "returned", decided_meanwhile)
    shard.lose()
    world.cluster.await_silent()
    assert not kept
    world.cluster.close()


def test_a_server_whose_streams_were_sealed_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where more was lost by then than parity can bear."""
    world = World(fixed=True, parity=CODED)
    world.push()
    world.network.partition(world.names[1])
    assert not world.cluster.handles[1].alive()
    protection = world.cluster._protection
    assert protection is not None

    def recover(lost: Sequence[int], _: object) -> None:
        for shard in lost:
            for host in protection.placement.hosts(shard):
                protection.rebuilder.members[host].host.seal(shard)
        raise ParityLossError("another is lost, too")

    monkeypatch.setattr(protection, "recover", recover)
    with pytest.warns(UserWarning, match="another is lost"):
        assert not world.cluster._from_parity()
    world.network.partition()
    world.cluster.await_silent()
    assert world.cluster.handles[1].state == "lost"
    world.cluster.close()


def test_a_server_leaves_no_host_out_that_its_rows_are_to_come_back_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is decoded without any parity would pass for rows that were never trained."""
    world = World(parity=CODED)
    world.push()
    epoch = world.network.servers[world.names[0]].epoch
    assert epoch is not None
    service = epoch.parity_service
    assert service is not None
    streams, rows = service._streams, service._rows
    monkeypatch.setattr(streams, "_silent", lambda: list(streams._senders.values()))
    rows._missing_GK[0, 0] = 1
    for asking in (False, True):
        streams._leave_out_silent(asking=asking)
        assert streams.status()["left_out_hosts"] == 0
    rows._missing_GK[0, 0] = 0
    streams._leave_out_silent()
    assert streams.status()["left_out_hosts"] == len(service.placement.hosts(0))
    world.cluster.close()


def test_what_stays_silent_is_named_once_patience_is_over() -> None:
    world = World(fixed=True)
    world.push()
    start = world.clock.monotonic()
    world.network.partition(world.names[1])
    with pytest.raises(ServerError, match=r"shard 1 at 127\.0\.0\.1:7001: silent for 3\d\d s"):
        world.push(twin=False)
    assert world.clock.monotonic() - start < 1.2 * TIMING.patience.total_seconds()
    assert world.heard.count("silent") >= 10
    world.cluster.close()


@pytest.mark.parametrize("pushes", [1, 4])
def test_a_push_under_way_counts_once_on_a_shard_that_is_recovered_meanwhile(pushes: int) -> None:
    """The survivors have applied it; the one that comes back is sent it."""
    world = World()
    cluster = world.cluster

    def bring_back(lost: ShardLostError) -> bool:
        steps = steps_of(cluster)
        cluster.renew(*lost.shards)
        for index in lost.shards:
            cluster.handles[index].load_table_state({"fixed": {"tick": 0, "steps": steps["fixed"]}})
        cluster.serve(*lost.shards)
        return True

    cluster.on_loss = bring_back

    def counted() -> set[int]:
        return {handle.table_state()["fixed"]["steps"] for handle in cluster.handles}

    for shard in range(SHARDS):
        for _ in range(pushes):
            world.push(twin=False)
        world.launcher.kill(shard)  # met by a push
        world.push(twin=False)
        assert counted() == {(shard + 1) * (pushes + 1)}
        world.launcher.kill(shard)  # met by a pull
        cluster.pull(wanted_of(cluster, {"fixed": [1, 2, 3]}))
        assert counted() == {(shard + 1) * (pushes + 1)}
    cluster.close()


def given_up(world: World, shard: int) -> None:
    """A push that the others have applied, given up because a shard is lost."""
    world.cluster.on_loss = lambda _: False
    world.launcher.kill(shard)
    with pytest.raises(ShardLostError):
        world.push(twin=False)


def test_a_push_is_unfinished_where_it_was_applied_and_not_where_rows_went_back() -> None:
    world = World()
    world.push(twin=False)
    given_up(world, 1)
    assert [world.cluster.unfinished(shard) for shard in (0, 2)] == [1, 1]
    world.cluster.renew(0)
    world.cluster.serve(0)
    assert [world.cluster.unfinished(shard) for shard in (0, 2)] == [0, 1]
    world.cluster.close()


def test_a_push_that_was_given_up_comes_before_a_deletion() -> None:
    world = World()
    world.push(twin=False)
    given_up(world, 1)
    world.cluster.renew(1)
    world.cluster.serve(1)
    world.cluster.delete("fixed", np.arange(40))
    assert world.cluster.read_all("fixed")[0].size == 0
    world.cluster.close()


@pytest.mark.parametrize("parity", [CODED, BEHIND])
def test_rows_from_outside_are_known_to_a_shard_that_came_back_from_parity(parity: Parity) -> None:
    world = World(parity=parity)
    world.push()
    for cluster in world.cluster, world.twin:
        cluster.upsert("fixed", range(40), {"weight": np.ones((40, 3))})
    world.launcher.kill(1)
    world.push()
    assert world.cluster.table_state() == world.twin.table_state()
    world.check()


def test_a_push_is_not_unfinished_for_a_lost_shard_that_had_it() -> None:
    """The one that was without it is back, and gets it."""
    world = World()
    world.push(twin=False)
    given_up(world, 1)
    world.cluster.renew(1)
    world.cluster.serve(1)
    world.launcher.kill(2)
    assert not world.cluster.handles[2].alive()
    assert world.cluster.unfinished(0) == 0
    assert steps_of(world.cluster)["fixed"] == 2
    world.cluster.close()


def test_steps_are_those_of_the_shard_that_has_taken_most() -> None:
    """The first that serves has come back from parity, and has yet to get the last push again."""
    world = World()
    for _ in range(3):
        world.push(twin=False)
    world.cluster.handles[0].load_table_state({"fixed": {"tick": 0, "steps": 2}})
    world.launcher.kill(2)
    assert not world.cluster.handles[2].alive()
    assert steps_of(world.cluster)["fixed"] == 3
    world.cluster.close()


def test_another_server_at_the_address_is_not_asked_how_far_pushes_are() -> None:
    world = World()
    world.push(twin=False)
    asked = []

    def bring_back(lost: ShardLostError) -> bool:
        world.network.stop(world.names[0])
        world.network.start(world.names[0])
        with pytest.raises(ShardLostError):
            world.cluster.unfinished(0)
        asked.append(world.cluster.handles[0].state)
        return False

    world.cluster.on_loss = bring_back
    world.launcher.kill(1)
    with pytest.raises(ShardLostError):
        world.push(twin=False)
    assert asked == ["lost"]
    world.cluster.close()


def test_a_question_that_fails_twice_is_asked_again() -> None:
    world = World(fixed=True)
    world.push()
    epochs = world.epochs
    world.network.rules = [Rule(how="lose", kind="freeze", server=world.names[1], at={1, 2, 3, 4})]
    world.cluster.track()
    for frozen in world.cluster.freeze(None, 1 << 20):
        for rows in frozen:
            rows.close(())
    world.network.rules = [Rule(how="refuse", kind="table_state", at={1, 2})]
    world.cluster.table_state()
    assert world.epochs == epochs
    world.check()


@pytest.mark.parametrize("kind", ["clear", "install", "delete", "load_table_state"])
def test_a_request_that_arrives_after_it_was_given_up_changes_nothing(kind: str) -> None:
    """It was asked for again, answered, and rows were trained since."""
    world = World(fixed=True)
    world.push()
    late = Rule(how="delay", by=400 * SECOND, kind=kind, server=world.names[1], at={1})
    world.network.rules = [late]
    before = world.cluster.read_all("fixed")
    if kind == "clear":
        world.cluster.clear()
        world.twin.clear()
    elif kind == "delete":
        for cluster in world.cluster, world.twin:
            cluster.delete("fixed", np.arange(40))
    elif kind == "install":
        world.cluster.install("fixed", *before)
    else:
        world.cluster.load_table_state(world.cluster.table_state())
    world.push()
    world.clock.advance(500 * SECOND)
    world.push()
    assert "late" in {event.outcome for event in world.network.events}
    assert world.cluster.table_state() == world.twin.table_state()
    world.check()

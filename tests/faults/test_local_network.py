"""A whole cluster in one process, on virtual time: messages that get lost, come twice or late,
leases that lapse, servers that are cut off, die and come back. Every run is compared, bit for bit,
with shards that are objects and never fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore, MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.erasure.messages import Wanted, decode_numbers
from emberkeep.erasure.stream_frames import pack_wanted
from emberkeep.errors import DeadlineError, EpochError, PeerError, ShardLostError
from emberkeep.repository import Repository, VersionId
from emberkeep.runtime.clock import Progress
from emberkeep.runtime.pool import Pool
from emberkeep.server.counted_writer import CountedWriter
from emberkeep.server.parity_service import ParityService
from emberkeep.tables import Adagrad, Optimizer, Table
from emberkeep.testing.local_transport import (
    Event,
    LocalChannel,
    LocalNetwork,
    LocalServers,
    Rule,
)
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.connection import Connection
from emberkeep.wire.security import Security
from tests.contracts.cluster import ClusterContract, push
from tests.contracts.engine import state, tables, wanted_of

SHARDS = 3
SECOND = timedelta(seconds=1)
TIMING = Timing(deadline=10 * SECOND, lease=15 * SECOND)
FIXED = [Table("fixed", rows=40, dim=3), Table("wide", rows=30, dim=9)]
# Sent by threads of their own.
BACKGROUND = ("renew", "parity")


def opened(
    network: LocalNetwork, hosts: LocalServers, given: Sequence[Table] = (), **more: Any
) -> FlightCluster:
    return FlightCluster(
        given or tables(), Adagrad(lr=0.1), hosts, seed=3, pool=Pool(1), timing=TIMING,
        transport=network.transport(), clock=network.clock, **more,
    )  # fmt: skip


def twin_of(given: Sequence[Table] = ()) -> Any:
    return local(shards=SHARDS, threads=1).open(given or tables(), Adagrad(lr=0.1), seed=3)


def ones(cluster: Any) -> tuple[list[Any], list[Any]]:
    wanted = wanted_of(cluster, {"fixed": list(range(40)), "wide": list(range(30))})
    dims = [cluster.tables[group[0]].dim for group in cluster.groups]
    return wanted, [np.ones((w.ids.size, d), np.float32) for w, d in zip(wanted, dims, strict=True)]


class TestLocalNetwork(ClusterContract):
    """What holds for servers in processes of their own holds here."""

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, seed: int = 0
    ) -> FlightCluster:
        network = LocalNetwork(VirtualClock())
        return FlightCluster(
            tables, optimizer, LocalServers(network, shards), seed=seed, pool=Pool(1),
            transport=network.transport(), clock=network.clock,
        )  # fmt: skip

    def kill(self, cluster: FlightCluster, *shards: int) -> None:
        for shard in shards:
            cluster.launcher.kill(shard)


def trained(seed: int, rules: Sequence[Rule]) -> tuple[list[Event], dict[str, Any]]:
    """Pulls and pushes on a network with rules; what was sent, and all rows."""
    network = LocalNetwork(VirtualClock(), seed=seed, rules=rules)
    cluster = opened(network, LocalServers(network, SHARDS))
    random = np.random.default_rng(seed)
    for _ in range(12):
        push(cluster, random)
        cluster.pull(wanted_of(cluster, {"fixed": [1, 2, 3], "dynamic": [4, 5]}))
    rows = state(cluster)
    cluster.close()
    return [event for event in network.events if event.kind not in BACKGROUND], rows


# Not twice in a row: a server that does not answer a second time is given up.
ODD = range(1, 100, 2)
RULES: dict[str, list[Rule]] = {
    "answers lost": [
        Rule(how="lose", kind=kind, at=ODD, share=0.6) for kind in ("pull", "check", "apply")
    ],
    "requests lost": [
        Rule(how="refuse", kind=kind, at=ODD, share=0.6) for kind in ("pull", "check", "apply")
    ],
    "sent twice": [Rule(how="repeat", share=0.5)],
    "late": [Rule(how="delay", by=9 * SECOND, at={3, 7}, kind="apply")],
    "too late": [Rule(how="delay", by=12 * SECOND, at={3}, kind=k) for k in ("check", "apply")],
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_each_push_is_applied_once_and_a_seed_gives_the_same_run(
    rules: list[Rule],
) -> None:
    events, rows = trained(5, rules)
    assert {event.outcome for event in events} > {"delivered"}
    twin = twin_of()
    push(twin, np.random.default_rng(5), 12)
    assert rows == state(twin)
    assert trained(5, rules) == (events, rows)


def test_another_seed_is_another_run() -> None:
    lost = RULES["answers lost"]
    outcomes = [[event.outcome for event in trained(seed, lost)[0]] for seed in (1, 2)]
    assert outcomes[0] != outcomes[1]


def test_a_lease_is_kept_while_time_passes_and_lapses_without_renewals() -> None:
    """A lapsed server is silent; its rows come back from the version, and lost pushes are made
    again."""
    clock = VirtualClock()
    network = LocalNetwork(clock)
    cluster = opened(network, LocalServers(network, SHARDS))
    cluster.track()
    repository = Repository.create(MemoryStore(), schema=cluster.schema())
    saver = Checkpointer(repository, cluster)
    random, twin = np.random.default_rng(1), twin_of()
    push(cluster, random, 3)
    saver.save(3)
    assert saver.wait() is not None
    clock.advance(timedelta(minutes=3))
    cluster.pull(wanted_of(cluster, {"fixed": [1]}))

    network.rules = [Rule(how="refuse", kind="renew", server="server-1")]
    clock.advance(2 * TIMING.lease)
    with pytest.raises(ShardLostError) as lost:
        push(cluster, random)
    assert lost.value.shards == (1,)
    network.rules = []
    cluster.renew(*range(SHARDS))
    assert saver.restore() is not None
    cluster.serve(*range(SHARDS))
    push(cluster, np.random.default_rng(2))
    push(twin, np.random.default_rng(1), 3)
    push(twin, np.random.default_rng(2))
    assert state(cluster) == state(twin)
    assert cluster.table_state() == twin.table_state()
    saver.close()
    cluster.close()


def test_a_server_that_was_cut_off_is_silent_beside_its_replacement() -> None:
    clock = VirtualClock()
    network = LocalNetwork(clock)
    hosts = LocalServers(network, SHARDS, lease=TIMING.lease)
    cluster = opened(network, hosts, FIXED)
    for _ in range(3):
        cluster.push(*ones(cluster), lr=0.1)
    epoch = cluster.handles[2].epoch
    network.partition("server-2")
    with pytest.raises(ShardLostError):
        cluster.push(*ones(cluster), lr=0.1)
    cluster.renew(2)
    cluster.serve(2)
    network.partition()
    former = Connection("server-2", Security(), transport=network.transport("somebody"))
    with pytest.raises(EpochError, match="has not heard of its coordinator"):
        former.act("read_all", {"epoch": epoch, "table": "fixed"}, deadline=SECOND)
    assert hosts.address(2) != "server-2"
    cluster.push(*ones(cluster), lr=0.1)
    cluster.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", [8, 23])
def test_lost_servers_come_back_from_parity_with_every_row(background: bool, at: int) -> None:
    """Servers send parity to each other through the same network. An answer that is lost in the
    midst of a recovery makes it start over, and not give up."""
    lost = Rule(how="lose", kind="parity", at={at})
    network = LocalNetwork(VirtualClock(), rules=[lost, Rule(how="repeat", kind="push")])
    hosts = LocalServers(network, SHARDS)
    cluster = opened(network, hosts, FIXED, parity=Parity(k=2, r=1, background=background))
    twin = twin_of(FIXED)
    for step in range(12):
        if step in (3, 6, 9):
            hosts.kill(step // 3 - 1)
        for one in cluster, twin:
            one.push(*ones(one), lr=0.1)
        if step in (3, 6, 9):
            cluster.rebuild()
    cluster.rebuild()
    assert cluster.parity is not None
    assert cluster.parity.recoveries >= 3
    assert cluster.parity.protected
    assert state(cluster) == state(twin)
    sent = [event for event in network.events if event.kind == "parity"]
    assert {event.sender for event in sent} == {f"server-{shard}" for shard in range(SHARDS)}
    assert "lose" in {event.outcome for event in sent}
    cluster.close()


# -- nobody waits for ever -----------------------------------------------------------------------


def loading(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[VirtualClock, Any], None]
) -> FlightCluster:
    """A cluster and a version whose rows servers get as `load` says."""
    network = LocalNetwork(VirtualClock())
    cluster = opened(network, LocalServers(network, 1), FIXED)
    monkeypatch.setattr(
        "emberkeep.server.version_load.load_shard",
        lambda repository, version, target, *_: load(network.clock, target),
    )
    monkeypatch.setattr("emberkeep.server.version_load.grid_of", lambda _: None)
    monkeypatch.setattr(Repository, "manifest", lambda *_: SimpleNamespace(whole=False))
    return cluster


def load_version(cluster: FlightCluster, path: Path) -> None:
    saved = Repository.create(LocalStore(path), schema={"tables": {}})
    manifest: Any = SimpleNamespace(version=VersionId(1, 1))
    cluster.load_version(saved, [manifest], {"fixed": "fixed"})


def test_a_load_that_stands_still_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    released = threading.Event()
    cluster = loading(monkeypatch, lambda *_: released.wait(60) and None)
    (shard,) = cluster.handles
    shard.timing = replace(TIMING, bulk=SECOND)
    with pytest.raises(DeadlineError, match=r"shard 0 at .* to load version .* no progress"):
        load_version(cluster, tmp_path)
    assert 1 < cluster._clock.monotonic() < 2
    released.set()
    cluster.close()


def test_a_server_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    came, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def load(_: Any, target: Any) -> None:
        for row in range(3):
            target.delete("fixed", np.array([row]))
            came.release()
            assert go_on.acquire(timeout=60)

    cluster = loading(monkeypatch, load)
    Repository.create(LocalStore(tmp_path), schema={"tables": {}})
    (shard,) = cluster.handles
    header = {"url": str(tmp_path), "version": "1-1", "names": {"fixed": "fixed"}}
    shard.ask("load", header)
    reached = []
    for _ in range(3):
        assert came.acquire(timeout=60)
        reached.append(shard.ask("work", {})["progress"])
        go_on.release()
    assert reached == [1, 2, 3]
    cluster.close()


def test_a_file_on_its_way_says_how_far_it_is() -> None:
    calls: list[None] = []
    files = CountedWriter(
        MemoryStore(), VersionId(1, 1), "0" * 16, part=0, block_nbytes=4096,
        advance=lambda: calls.append(None),
    )  # fmt: skip
    files.add(iter([b"a", b"b"]), kind="x", suffix="x")
    files.add(b"c", kind="x", suffix="x")
    assert len(calls) == 3
    assert [file.size for file in files.written] == [2, 1]


def test_what_makes_progress_is_waited_for() -> None:
    clock = VirtualClock()
    progress = Progress(10 * SECOND, clock)
    for figure in range(5):
        clock.sleep(9)
        progress.require(figure, lambda: "it")
    clock.sleep(9)
    progress.require(4, lambda: "it")
    clock.sleep(2)
    with pytest.raises(DeadlineError, match="waited for it"):
        progress.require(4, lambda: "it")


def test_rows_that_never_come_back_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    network = LocalNetwork(VirtualClock())
    hosts = LocalServers(network, SHARDS)
    cluster = opened(network, hosts, FIXED, parity=Parity(k=2, r=1))
    assert cluster._protection is not None
    cluster._protection._timing = replace(TIMING, bulk=5 * SECOND)
    cluster.push(*ones(cluster), lr=0.1)
    monkeypatch.setattr(ParityService, "_rebuild_chunk", unreachable)
    hosts.kill(1)
    with pytest.raises(DeadlineError, match=r"shard 1 at .* no progress"):
        cluster.rebuild()
    with pytest.raises(DeadlineError, match=r"shard 1 at .* no progress"):
        cluster.freeze(None, 1 << 20)
    cluster.close()


@pytest.mark.parametrize("call", ["rebuild", "freeze"])
def test_rows_that_parity_does_not_bring_back_come_from_elsewhere(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulator (seed 5002265): the only host that was left of lost rows had been
    filled again without them, and a save waited for `bulk` and ended the run."""
    network = LocalNetwork(VirtualClock())
    hosts = LocalServers(network, SHARDS)
    cluster = opened(network, hosts, FIXED, parity=Parity(k=2, r=1))
    cluster.push(*ones(cluster), lr=0.1)
    cluster.track()
    protection = cluster._protection
    assert protection is not None
    asked: list[tuple[int, ...]] = []

    def from_elsewhere(lost: ShardLostError) -> bool:
        asked.append(lost.shards)
        cluster.renew(*lost.shards)
        for shard in lost.shards:
            cluster.handles[shard].serve()
        return True

    cluster.on_loss = from_elsewhere
    with monkeypatch.context() as slow:
        slow.setattr(ParityService, "_rebuild_chunk", unreachable)
        hosts.kill(1)
        cluster.table_state()
        for host in protection.placement.hosts(1):
            protection.rebuilder.members[host].host.refill(1)
    with pytest.warns(UserWarning, match="more than parity with k=2, r=1 can bring back"):
        cluster.rebuild() if call == "rebuild" else cluster.freeze(None, 1 << 20)
    assert asked == [(1,)]
    cluster.close()


def unreachable(*_: Any) -> bool:
    raise PeerError("no peer answers")


def test_decisions_about_parity_that_come_again_later_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that was attached again is not detached by what was said of the one before it."""
    said: list[tuple[str, bytes]] = []
    call = LocalChannel.call

    def heard(channel: LocalChannel, kind: str, content: bytes, deadline: timedelta) -> Any:
        if kind == "member":
            said.append((channel._address, content))
        return call(channel, kind, content, deadline)

    monkeypatch.setattr(LocalChannel, "call", heard)
    network = LocalNetwork(VirtualClock())
    hosts = LocalServers(network, SHARDS)
    cluster = opened(network, hosts, parity=Parity(k=2, r=1))
    random, twin = np.random.default_rng(1), twin_of()
    push(cluster, random, 3)
    hosts.kill(0)
    push(cluster, random, 3)
    cluster.rebuild()
    for address, content in reversed(said.copy()):
        assert len(list(network.servers[address].answer_action("member", content))) == 1
    push(cluster, random, 3)
    cluster.rebuild()
    assert cluster.parity is not None
    assert cluster.parity.protected
    hosts.kill(1)
    push(cluster, random, 3)
    cluster.rebuild()
    push(twin, np.random.default_rng(1), 12)
    assert state(cluster) == state(twin)
    cluster.close()


def test_rows_are_decoded_right_where_every_question_about_parity_comes_twice() -> None:
    """A member that says twice what it has of a stripe would take it out of the sum again."""
    network = LocalNetwork(VirtualClock(), rules=[Rule(how="repeat", kind="member")])
    hosts = LocalServers(network, SHARDS)
    cluster = opened(network, hosts, parity=Parity(k=2, r=1))
    random, twin = np.random.default_rng(1), twin_of()
    for shard in range(SHARDS):
        push(cluster, random, 3)
        hosts.kill(shard)
        push(cluster, random, 3)
        cluster.rebuild()
    push(twin, np.random.default_rng(1), 6 * SHARDS)
    assert state(cluster) == state(twin)
    assert cluster.losses == [*range(SHARDS)]
    cluster.close()


def test_decodes_that_failed_are_let_go_of() -> None:
    """A member that cannot be reached is asked again and again: each time a decode begins."""
    network = LocalNetwork(VirtualClock())
    hosts = LocalServers(network, SHARDS)
    cluster = opened(network, hosts, parity=Parity(k=2, r=1))
    epoch = network.servers["server-0"].epoch
    assert epoch is not None
    service = epoch.parity_service
    assert service is not None
    group = service.placement.group_on(0, 0)
    first, second = decode_numbers(), decode_numbers()
    for numbers in (second, *[first] * 20):
        wanted = [Wanted(next(numbers), group, 0, "marks", np.arange(2)) for _ in range(2)]
        service.ask({"ask": "begin", **(about := pack_wanted(wanted))[0]}, about[1])
    assert len(service.member.host._decodes) == 4  # the last of each
    cluster.close()


@pytest.mark.parametrize("frozen_again", [True, False])
def test_a_late_request_for_frozen_rows_takes_none_of_them(frozen_again: bool) -> None:
    """Found by the simulator (seed 4002294): a request that was given up was read after the next
    freeze, and took rows that the version then lacked."""
    network = LocalNetwork(VirtualClock())
    cluster = opened(network, LocalServers(network, 1), FIXED)
    (shard,) = cluster.handles
    cluster.track()
    cluster.push(*ones(cluster), lr=0.1)
    (frozen,) = shard.freeze(None, 2**20)
    late = {"epoch": shard.epoch, "freeze": 1, "rows": 100}
    if frozen_again:
        frozen.close(())
        (frozen,) = shard.freeze(None, 2**20)
    chunks = frozen.chunks(100)
    first = [] if frozen_again else [next(chunks)]
    with shard.dialed() as connection, pytest.raises(EpochError, match="this is late"):
        list(connection.stream("chunks", late, deadline=SECOND))
    ids = sorted(int(i) for chunk in [*first, *chunks] for i in chunk.ids)
    assert ids == sorted([*range(40), *range(30)])
    frozen.close(())
    cluster.close()


def test_what_a_shard_lost_before_parity_held_it_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by the simulator (seed 20006016): a server died after it had loaded a version, when one
    of its hosts held nothing of that yet: it came back from parity with initial rows."""
    network = LocalNetwork(VirtualClock())
    cluster = opened(network, LocalServers(network, SHARDS), FIXED, parity=Parity(k=2, r=1))
    twin = twin_of(FIXED)
    twin.push(*ones(twin), lr=0.1)
    settle, lost = cluster._settle_writes, [1]

    def lose_first() -> None:
        if lost:
            shard = lost.pop()
            cluster.renew(shard)
            cluster.handles[shard].serve()
        settle()

    monkeypatch.setattr(cluster, "_settle_writes", lose_first)
    for table in FIXED:
        cluster.install(table.name, *twin.read_all(table.name))
        assert cluster.digest(table.name) == twin.digest(table.name)
    cluster.close()

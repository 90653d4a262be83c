"""Parity over shard servers: the contract of parity, with processes that are really killed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import emberkeep as ek
from emberkeep.cli._cluster_status import protection
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.erasure.codes import Parity, Placement
from emberkeep.erasure.messages import Differences, Message
from emberkeep.erasure.peers import Peer
from emberkeep.errors import ConfigError, ShardLostError
from emberkeep.runtime.background import Retry
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.parity_sender import _RETRY, Sender
from emberkeep.server.shard_service import ShardService
from emberkeep.tables import Adagrad, Optimizer, Table
from emberkeep.wire.security import Security
from tests.contracts.engine import OPTIMIZERS, state
from tests.contracts.parity import (
    PLAIN,
    SIZES,
    Histories,
    ParityContract,
    check_counts,
    ones,
)
from tests.integration.test_cluster_flight import Clusters
from tests.servers import Farm

# Few planes on few servers, most on most; all of them are for the long tests, and in process.
QUICK = {("adagrad", (3, 2, 1, 1)), ("adam by row", (6, 4, 2, 2))}


@pytest.fixture(scope="module")
def clusters(farm: Farm) -> Iterator[Clusters]:
    opened = Clusters(farm)
    yield opened
    opened.close()


class TestServers(ParityContract):
    clusters: Clusters

    @pytest.fixture(autouse=True)
    def _clusters(self, clusters: Clusters) -> None:
        type(self).clusters = clusters

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, parity: Parity | None
    ) -> Any:
        cluster = self.clusters.open(tables, optimizer, shards=shards, seed=5)
        if parity is not None:
            cluster.protect(parity)
        return cluster

    def open_plain(self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int) -> Any:
        """In process: it is the same, and quicker."""
        return _InProcess().open(tables, optimizer, shards=shards, parity=None)

    def kill(self, cluster: FlightCluster, *shards: int) -> None:
        for shard in shards:
            cluster.launcher.kill(shard)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("name", "size"),
        [
            pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.soak)
            for name in OPTIMIZERS
            for size in SIZES
        ],
    )
    def test_losses_leave_no_trace(self, name: str, size: tuple[int, int, int, int]) -> None:
        """Unchanged, against a run in process: it is the same, and quicker."""
        spec = OPTIMIZERS[name]
        expected = _InProcess().run(spec, size, seed=3, losses=False)
        assert self.run(spec, size, seed=3, losses=True) == expected


class _InProcess(ParityContract):
    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, shards: int, parity: Parity | None
    ) -> Any:
        return local(shards=shards, threads=1, parity=parity).open(tables, optimizer, seed=5)


def kill_soon(cluster: Any, shards: Sequence[int], milliseconds: float) -> threading.Timer:
    def kill() -> None:
        for shard in shards:
            cluster.launcher.kill(shard)

    timer = threading.Timer(milliseconds / 1e3, kill)
    timer.start()
    return timer


def trained_under_fire(
    clusters: Clusters, *, background: bool, size: tuple[int, int, int], steps: int, seed: int
) -> None:
    """Servers are killed in the midst of pushes. Rows that come back have a value that they really
    had, with the optimizer state of the same update; afterwards they are those of a run in process.
    """
    shards, k, r = size
    spec = Parity(k=k, r=r, background=background, chunk_rows=32, window_nbytes=1 << 12)
    cluster = clusters.open(PLAIN, Adagrad(lr=0.1), shards=shards, seed=1)
    cluster.protect(spec)
    plain = local(threads=1).open(PLAIN, Adagrad(lr=0.1), seed=1)
    counts: Counter[tuple[str, int]] = Counter()
    histories = Histories()
    random = Random(seed)
    for step in range(steps):
        killer = None
        if step % 8 == 3:
            cluster.rebuild()
            gone = random.sample(range(shards), r)
            killer = kill_soon(cluster, gone, random.random() * 30)
        drawn = random.getrandbits(32)
        ones(cluster, Random(drawn), counts)
        ones(plain, Random(drawn), Counter())
        histories.add_all(plain)
        if killer is not None:
            killer.join()
            histories.check(cluster)
    check_counts(cluster, counts)
    assert state(cluster) == state(plain)
    cluster.rebuild()
    status = cluster.parity
    assert status is not None
    assert status.protected
    assert status.recoveries
    assert status.rebuilt_rows
    assert status.messages


@pytest.mark.parametrize("background", [False, True])
def test_no_push_is_lost_and_none_applied_twice(clusters: Clusters, background: bool) -> None:
    trained_under_fire(clusters, background=background, size=(3, 2, 1), steps=20, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("size", [(3, 2, 1), (6, 4, 1), (6, 4, 2), (5, 3, 2)])
def test_no_push_is_lost_for_long(
    clusters: Clusters, background: bool, size: tuple[int, int, int]
) -> None:
    for seed in range(3):
        trained_under_fire(clusters, background=background, size=size, steps=60, seed=seed)


def test_a_shard_that_is_lost_again_and_again_is_given_up(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = clusters.open(PLAIN, Adagrad(lr=0.1), shards=3, seed=1)
    cluster.protect(Parity(k=2, r=1))
    tried = []

    def recover(lost: Sequence[int], renew: object) -> None:
        tried.append(tuple(lost))
        raise ShardLostError(lost)

    monkeypatch.setattr(cluster._protection, "recover", recover)
    cluster.launcher.kill(1)  # type: ignore[attr-defined]
    cluster.handles[1].state = "lost"
    with pytest.warns(UserWarning, match="recover from the repository"):
        assert not cluster._from_parity()
    assert len(tried) == 8
    assert set(tried) == {(1,)}
    assert cluster.lost() == (1,)


def test_the_spec_of_servers_takes_parity() -> None:
    with pytest.raises(ConfigError, match="needs 5 shards"):
        ek.servers(shards=4, parity=Parity(k=4, r=1))
    with pytest.raises(ConfigError, match="needs 3 shards"):
        ek.connect(["localhost:1", "localhost:2"], parity=Parity(k=2, r=1))


class _On:
    """A spec over servers of the farm."""

    def __init__(self, clusters: Clusters, shards: int) -> None:
        self.clusters, self.shards = clusters, shards

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> FlightCluster:
        return self.clusters.open(tables, optimizer, shards=self.shards, seed=seed)


def test_two_levels_on_servers(clusters: Clusters, tmp_path: Path) -> None:
    """Losses within parity cost no step; beyond it the repository is what is left."""
    from tests.integration.test_parity_keeper import TABLES, bags_on, read_or_recover, train

    plain = bags_on(shards=1)
    bags = ek.EmbeddingBags(TABLES, optimizer=ek.Adagrad(lr=0.1), cluster=_On(clusters, 4))
    strategy = ek.parity(k=3, every=4, recovery="full")
    with ek.Keeper(tmp_path / "run", bags, bags.optimizer, strategy=strategy) as keeper:
        train(bags, range(6), keeper)
        bags.cluster.launcher.kill(2)
        train(bags, range(6, 8), keeper)
        train(plain, range(8))
        keeper.wait()
        assert state(bags.cluster) == state(plain.cluster)
        assert keeper.recoveries().full == 0
        assert "emberkeep_parity_recoveries_total 1" in keeper.metrics()
        bags.cluster.rebuild()
        train(bags, range(8, 9), keeper)
        for shard in (0, 1):
            bags.cluster.launcher.kill(shard)
        with pytest.warns(UserWarning, match="more than parity"):
            read_or_recover(bags, keeper)
        assert state(bags.cluster) == state(plain.cluster)
        assert keeper.recoveries().full == 1
        bags.cluster.rebuild()
        bags.cluster.launcher.kill(3)
        assert state(bags.cluster) == state(plain.cluster)


def test_a_host_that_is_gone_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    enough = threading.Event()
    honest = Retry.pause

    def pause(retry: Retry, failures: int) -> float:
        if retry is not _RETRY:  # of threads that other tests have left
            return honest(retry, failures)
        pauses.append(honest(retry, failures))
        if len(pauses) == 9:
            sender.close()
            enough.set()
        return 0

    monkeypatch.setattr(Retry, "pause", pause)
    sender = Sender(
        Peer(1, "127.0.0.1:1", 1), Placement(3, 2, 1), security=Security(),
        deadline=timedelta(seconds=60), acknowledged=lambda *_: None, stuck=lambda _: None,
    )  # fmt: skip
    sender.post(Message(0, 1, 1, 0, Differences((), None, ())))
    assert enough.wait(60)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]
    assert sender.trouble


def test_a_server_tells_of_its_parity() -> None:
    """In this process: what Prometheus and `emberkeep cluster status` see of a server."""
    served = [ShardService(threads=1) for _ in range(3)]
    started = [ShardServer(service) for service in served]
    spec = ek.connect([server.address for server in started], parity=Parity(k=2, r=1))
    cluster = spec.open(PLAIN, Adagrad(lr=0.1), seed=1)
    ones(cluster, Random(0), Counter())
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(served[0].page.text())
        for sample in family.samples
    }
    assert found["emberkeep_parity_messages_total"] == 2
    assert found["emberkeep_parity_lag_messages"] == 0
    status = cluster.handles[0].status()["parity"]
    assert status["unprotected_stripes"] == 0
    assert protection(status) == "whole"
    assert protection({**status, "lag": 3}) == "lag 3"
    assert protection({**status, "lag": 3, "unprotected_stripes": 1200}) == "1,200 stripes open"
    assert protection({**status, "unprotected_stripes": 9, "missing_rows": 7}) == "7 rows missing"
    assert protection(None) == ""
    cluster.close()
    for server in started:
        server.shutdown()

"""A batch of servers that is interrupted anywhere took place on all of them, or on none: one
document beside the versions says so, for servers that come back, for the next trainer, and for one
that was replaced and does not know it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_tiers import RemoteTiers, _Batch
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import (
    CancelledError,
    EmberkeepError,
    EpochError,
    ShardLostError,
    StorageError,
    TierError,
)
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.tables import Adagrad, Tier
from emberkeep.wire.connection import Connection
from tests.contracts.cluster import push
from tests.contracts.engine import state, tables
from tests.servers import Farm, FarmLauncher
from tests.waiting import until

SHARDS = 2
SECOND = timedelta(seconds=1)


class Trainer:
    """A cluster and its tiers; `leave` is the end of its process, which tells nobody."""

    def __init__(self, launcher: FarmLauncher, store: LocalStore, **options: Any) -> None:
        self.cluster = FlightCluster(
            tables(), Adagrad(lr=0.1), launcher, pool=pool.Pool(1),
            timing=Timing(deadline=SECOND, lease=SECOND), **options,
        )  # fmt: skip
        self.store = store
        if not Repository.exists(store):
            Repository.create(store, schema=self.cluster.schema())
        try:
            self.tiers = RemoteTiers([self.cluster], store, Repository.open(store).id, SYSTEM_CLOCK)
        except BaseException:
            self.cluster.close()
            raise

    def train(self, seed: int) -> dict[str, Any]:
        push(self.cluster, np.random.default_rng(seed), 2)
        return state(self.cluster)

    def prepare(self, batch: int) -> None:
        self.tiers.prepare(batch)()
        self.store.put(self.tiers.pending_state(), b"beside")

    def make_durable(self, batch: int) -> None:
        self.prepare(batch)
        self.tiers.commit()

    def leave(self) -> None:
        leases, finalizer = self.cluster._leases, self.cluster._finalizer
        assert leases is not None
        assert finalizer is not None
        finalizer.detach()  # type: ignore[attr-defined]
        leases.stop()


@pytest.fixture
def launcher(farm: Farm, tmp_path: Path) -> Iterator[FarmLauncher]:
    started = FarmLauncher(farm, SHARDS, tier=Tier(tmp_path / "t", memory=100_000))
    yield started
    started.end()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "r")


def decisions(store: LocalStore) -> list[str]:
    return [info.name for info in store.list("tiers") if "decision" in info.name]


@pytest.mark.parametrize("decided", [True, False])
@pytest.mark.parametrize("killed", [(), (0,), (0, 1)], ids=["servers live", "one killed", "both"])
def test_the_next_trainer_finds_what_was_decided(
    launcher: FarmLauncher, store: LocalStore, decided: bool, killed: tuple[int, ...]
) -> None:
    first = Trainer(launcher, store)
    one = first.train(1)
    first.make_durable(1)
    assert decisions(store) == []  # every server has recorded it
    two = first.train(2)
    first.prepare(2)
    if decided:  # and nobody has heard of it
        assert first.tiers._decide(first.tiers._pending, "committed")
    first.leave()
    for shard in killed:
        launcher.replace(shard, "")
    second = Trainer(launcher, store)
    assert second.tiers.batch() == (2 if decided else 1)
    assert second.tiers.at_batch()
    assert state(second.cluster) == (two if decided else one)
    three = second.train(3)
    second.make_durable(3)
    assert decisions(store) == []
    assert [info.name for info in store.list("tiers")] == [second.tiers.durable_state()]
    second.cluster.close()
    third = Trainer(launcher, store)
    assert state(third.cluster) == three
    third.cluster.close()


def test_one_that_was_replaced_commits_nothing(launcher: FarmLauncher, store: LocalStore) -> None:
    """It sleeps between prepare and decision, and wakes beside its successor."""
    sleeper = Trainer(launcher, store)
    one = sleeper.train(1)
    sleeper.make_durable(1)
    sleeper.train(2)
    sleeper.prepare(2)
    sleeper.leave()
    second = Trainer(launcher, store)
    assert state(second.cluster) == one
    two = second.train(5)
    second.make_durable(2)
    with pytest.raises((CancelledError, ShardLostError)):
        sleeper.tiers.commit()
    with pytest.raises(EmberkeepError):  # its servers have another epoch
        push(sleeper.cluster, np.random.default_rng(0))
    sleeper.tiers.abandon()
    store.size(second.tiers.durable_state())  # it took nothing away
    second.cluster.close()
    third = Trainer(launcher, store)
    assert third.tiers.batch() == 2
    assert state(third.cluster) == two
    third.cluster.close()


def test_nothing_is_guessed_where_the_repository_is_not_there(
    launcher: FarmLauncher, store: LocalStore, tmp_path: Path
) -> None:
    first = Trainer(launcher, store)
    one = first.train(1)
    first.make_durable(1)
    first.train(2)
    first.prepare(2)
    first.leave()
    away = (tmp_path / "r").rename(tmp_path / "away")
    (tmp_path / "r").mkdir()  # as a disk that is not mounted
    with pytest.raises(TierError, match=r"prepared batch 2, .* is not there; nothing was changed"):
        Trainer(launcher, LocalStore(tmp_path / "other"))
    assert not any((tmp_path / "r").iterdir())
    (tmp_path / "r").rmdir()
    away.rename(tmp_path / "r")
    second = Trainer(launcher, store)
    assert state(second.cluster) == one
    second.cluster.close()


@pytest.mark.parametrize("decided", [True, False])
def test_servers_that_are_adopted_record_what_was_decided(
    launcher: FarmLauncher, store: LocalStore, decided: bool
) -> None:
    first = Trainer(launcher, store, on_restart="adopt")
    first.cluster.tell(repository=Repository.open(store).id)
    until(lambda: all(s.status()["run"]["repository"] for s in first.cluster.handles), "the run")
    first.train(1)
    first.make_durable(1)
    first.train(2)
    first.prepare(2)
    if decided:
        assert first.tiers._decide(first.tiers._pending, "committed")
    live = first.train(3)
    first.leave()
    second = Trainer(launcher, store, on_restart="adopt")
    assert second.cluster.adopted
    assert state(second.cluster) == live
    assert second.tiers.batch() == (2 if decided else 1)
    assert second.tiers.at_batch() is False  # rows are ahead of it
    second.make_durable(4)
    second.cluster._on_restart = "rewind"
    second.cluster.close()
    third = Trainer(launcher, store)
    assert third.tiers.batch() == 4
    assert state(third.cluster) == live
    third.cluster.close()


def failing_once(trainer: Trainer, ask: str, error: EmberkeepError) -> None:
    """The next such request to the last server fails, and nothing else does."""
    real, left = trainer.tiers._ask, [error]

    def asking(shard: Any, header: Any, epoch: int | None = None) -> Any:
        if header["ask"] == ask and shard.index == SHARDS - 1 and left:
            raise left.pop()
        return real(shard, header, epoch)

    trainer.tiers._ask = asking  # type: ignore[method-assign]


@pytest.mark.parametrize("decided", [True, False])
def test_a_batch_that_is_settled_twice_keeps_its_state(
    launcher: FarmLauncher, store: LocalStore, decided: bool
) -> None:
    first = Trainer(launcher, store)
    one = first.train(1)
    first.make_durable(1)
    two = first.train(2)
    first.prepare(2)
    failing_once(first, "record", TierError("it could not be written"))
    with pytest.raises(TierError, match="could not be written"):
        (first.tiers.commit if decided else first.tiers.abandon)()
    first.tiers.abandon()
    assert first.tiers.batch() == (2 if decided else 1)
    assert [info.name for info in store.list("tiers")] == [first.tiers.durable_state()]
    first.cluster.close()
    second = Trainer(launcher, store)
    assert state(second.cluster) == (two if decided else one)
    second.cluster.close()


@pytest.mark.parametrize("then", ["the next is made", "the next is given up"])
@pytest.mark.parametrize("decided", [True, False])
def test_a_server_that_did_not_hear_of_an_outcome_finds_it(
    launcher: FarmLauncher, store: LocalStore, decided: bool, then: str
) -> None:
    """It was cut off for a moment: it has its rows, and a batch that it knows no outcome of."""
    first = Trainer(launcher, store)
    rows = {1: first.train(1)}
    first.make_durable(1)
    rows[2] = first.train(2)
    first.prepare(2)
    failing_once(first, "record", ShardLostError((1,)))
    (first.tiers.commit if decided else first.tiers.abandon)()
    assert first.tiers.batch() == (2 if decided else 1)
    assert len(decisions(store)) == 1
    rows[3] = first.train(3)
    if then == "the next is given up":  # before that server has heard of it
        first.tiers._pending = _Batch(3, "ab" * 8)
        first.tiers.abandon()
        assert len(decisions(store)) == 2  # it waits for the first of them
        last = 2 if decided else 1
    else:
        first.make_durable(3)
        assert decisions(store) == []
        last = 3
    first.leave()
    second = Trainer(launcher, store)
    assert second.tiers.batch() == last
    assert state(second.cluster) == rows[last]
    second.cluster.close()


def test_a_store_that_keeps_what_is_outdated_ends_nothing(
    launcher: FarmLauncher, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Trainer(launcher, store)

    def refuse(*_: Any) -> None:
        raise StorageError("the store is away")

    for batch in (1, 2):
        first.train(batch)
        with monkeypatch.context() as patched:
            patched.setattr(store, "delete", refuse)
            first.make_durable(batch)
    assert len(decisions(store)) == 2
    first.train(3)
    first.make_durable(3)
    assert [info.name for info in store.list("tiers")] == [first.tiers.durable_state()]
    first.cluster.close()


def test_rows_stay_where_the_outcome_cannot_be_known_yet(
    launcher: FarmLauncher, store: LocalStore, tmp_path: Path
) -> None:
    first = Trainer(launcher, store, on_restart="adopt")
    first.cluster.tell(repository=Repository.open(store).id)
    until(lambda: all(s.status()["run"]["repository"] for s in first.cluster.handles), "the run")
    first.train(1)
    first.make_durable(1)
    live = first.train(2)
    first.prepare(2)
    first.leave()
    away = (tmp_path / "r").rename(tmp_path / "away")
    (tmp_path / "r").mkdir()
    with pytest.raises(TierError, match=r"prepared batch 2, .* is not there; nothing was changed"):
        Trainer(launcher, store, on_restart="adopt")
    assert [shard.connect()["state"] for shard in first.cluster.handles] == ["serving"] * SHARDS
    (tmp_path / "r").rmdir()
    away.rename(tmp_path / "r")
    second = Trainer(launcher, store, on_restart="adopt")
    assert launcher.replaced == 0
    assert second.cluster.adopted
    assert second.tiers.batch() == 1
    assert state(second.cluster) == live
    second.cluster._on_restart = "rewind"
    second.cluster.close()


def test_what_changes_files_and_comes_late_is_refused(
    launcher: FarmLauncher, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a trainer gave up, a server may read later: questions are answered, and nothing
    else of it takes effect."""
    sent: list[tuple[str, Any]] = []
    stream = Connection.stream

    def noted(self: Connection, kind: str, header: Any = None, *rest: Any, **more: Any) -> Any:
        if kind == "tier":
            sent.append((self.address, header))
        return stream(self, kind, header, *rest, **more)

    monkeypatch.setattr(Connection, "stream", noted)
    trainer = Trainer(launcher, store)
    sent = [(address, header) for address, header in sent if "order" not in header]  # of opening
    trainer.train(1)
    trainer.prepare(1)
    trainer.tiers.abandon()
    trainer.train(2)
    trainer.prepare(2)
    ordered = {header["ask"] for _, header in sent if "order" in header}
    assert ordered == {"prepare", "abandon", "record"}
    assert {header["ask"] for _, header in sent} - ordered == {"points", "prepared"}
    shard = trainer.cluster.handles[0]
    of_one = [header for address, header in sent if address == shard.address and "order" in header]
    assert len(of_one) == 4
    for late in of_one:
        with shard.dialed() as connection, pytest.raises(EpochError, match="late"):
            connection.act("tier", late, deadline=SECOND)
    trainer.tiers.commit()
    assert trainer.tiers.batch() == 2
    trainer.cluster.close()

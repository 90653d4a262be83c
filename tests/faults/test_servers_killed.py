"""Shard servers are killed at random moments of training: it ends by itself, and the accounts are
right to the bit: pushes are applied once, versions are whole, what is lost is what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, VersionSpec
from emberkeep.checkpoint.recovery import Home, recover_partially
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.errors import ShardLostError
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from emberkeep.tables import SGD, Table
from emberkeep.train import build
from emberkeep.train.hooks import Hook
from emberkeep.train.loop import run
from emberkeep.train.result import Result
from emberkeep.train.run_config import demo
from tests.servers import Farm, FarmLauncher

SHARDS = 3
ROWS, DIM = 60, 4
SMALL = [
    "data.samples=4000",
    "data.rows_total=1000",
    "run.batch_size=100",
    "run.compare=false",
    "model.bottom=[8]",
    "model.top=[8]",
    "tables.dim=4",
    f"cluster.shards={SHARDS}",
]


class Watched(FarmLauncher):
    """Says when it has replaced a server."""

    on_replaced: Callable[[], None] = staticmethod(lambda: None)

    def replace(self, shard: int, life: str) -> str:
        address = super().replace(shard, life)
        self.on_replaced()
        return address


class Killer:
    """Kills random servers at random moments beside training, so many of them. None is killed
    before the last one was missed: a dead server cannot die."""

    def __init__(self, hosts: Watched, kills: int, seed: int) -> None:
        self.left = kills
        self._hosts = hosts
        self._asked = 0
        self._again = False
        self._random = np.random.default_rng(seed)
        self._kill: threading.Timer | None = None
        hosts.on_replaced = self._replaced

    @property
    def idle(self) -> bool:
        """Whether all that were to be killed have been replaced."""
        return not self._again and self._hosts.replaced >= self._asked

    def ask(self, *, room: bool = True) -> None:
        """Kills one soon. Where there is `room` for two, perhaps another one while the first is
        brought back."""
        self._again = room and self.left > 1 and self._random.random() < 0.5
        self._start()

    def _start(self) -> None:
        self._asked += 1
        self.left -= 1
        shard = int(self._random.integers(self._hosts.count))
        self._kill = threading.Timer(self._random.uniform(0, 0.02), self._hosts.kill, [shard])
        self._kill.start()

    def _replaced(self) -> None:
        if self._again:
            self._again = False
            self._start()

    def wait(self) -> None:
        """Returns when the server that was to be killed last is dead."""
        if self._kill is not None:
            self._kill.join()


# -- pushes, exactly once ------------------------------------------------------------------------


def push_of(step: int) -> tuple[list[RowIds], Any]:
    """Whole numbers, so that sums do not depend on their order."""
    random = np.random.default_rng(step)
    ids = np.sort(random.choice(ROWS, 20, replace=False))
    grads = random.integers(-4, 5, (20, DIM)).astype(np.float32)
    return [RowIds(ids.astype(np.int64), np.array([0, 20]))], grads


def trained_under_fire(farm: Farm, where: Path, kills: int, seed: int) -> None:
    """Partial recovery by hand, and beside it what every shard must hold."""
    hosts = Watched(farm, SHARDS)
    table = Table("t", rows=ROWS, dim=DIM)
    cluster = FlightCluster([table], SGD(lr=1.0), hosts, pool=pool.Pool(1))
    initial = cluster.read("t", np.arange(ROWS))["weight"]
    repository = Repository.create(LocalStore(where), schema=cluster.schema())
    keeper = Checkpointer(repository, cluster, spec=VersionSpec(layout="consecutive"))
    keeper.save(0)
    keeper.wait()
    applied: list[list[int]] = [[] for _ in range(SHARDS)]
    recovered = []

    def on_loss(lost: ShardLostError) -> bool:
        while cluster.lost():
            keeper.join()
            gone = cluster.lost()
            try:
                recover_partially(keeper, Home(cluster, {"t": "t"}), gone)
            except ShardLostError:
                continue
            assert keeper.whole is not None
            for shard in gone:
                saved = repository.manifest(keeper.whole.version).step
                applied[shard] = [step for step in applied[shard] if step <= saved]
                recovered.append(shard)
        return True

    cluster.on_loss = on_loss
    step = 0
    killer = Killer(hosts, kills, seed)
    while killer.left or step % 5 or not killer.idle:
        step += 1
        if step % 6 == 0 and killer.left and killer.idle:
            killer.ask()
        wanted, grads = push_of(step)
        cluster.pull(wanted)
        cluster.push(wanted, [grads], lr=1.0)
        for steps in applied:
            steps.append(step)
        if step % 4 == 0:
            keeper.join()
            try:
                keeper.save(step)
            except ShardLostError:
                on_loss(ShardLostError(cluster.lost()))
        assert step < 100_000
    keeper.join()
    expected = initial.copy()
    for shard, steps in enumerate(applied):
        for number in steps:
            (ids,), grads = push_of(number)
            own = ids.ids % SHARDS == shard
            expected[ids.ids[own]] -= grads[own]
    cluster.pull(push_of(0)[0])  # notices the server that was killed last
    held = cluster.read("t", np.arange(ROWS))["weight"]
    assert np.abs(held - expected).max() < 1e-5
    assert recovered
    assert hosts.replaced >= kills
    cluster.close()
    hosts.end()


def test_every_push_is_applied_once_however_often_servers_die(farm: Farm, tmp_path: Path) -> None:
    trained_under_fire(farm, tmp_path / "r", kills=4, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_every_push_is_applied_once_however_often_servers_die_for_long(
    farm: Farm, tmp_path: Path, seed: int
) -> None:
    trained_under_fire(farm, tmp_path / "r", kills=10, seed=seed)


# -- training ------------------------------------------------------------------------------------


class Recoveries(Hook):
    """Has servers killed after random steps. None dies later than before the last step: nothing
    brings servers back any more when the rows are compared afterwards."""

    def __init__(self, killer: Killer, seed: int) -> None:
        self.recovered: list[dict[str, Any]] = []
        self._killer = killer
        self._random = np.random.default_rng(seed)

    def on_step(self, step: Any) -> None:
        killer, steps = self._killer, step.steps - 1 - step.number
        if steps <= 0:
            killer.wait()
        elif killer.left and not killer.idle:
            killer.wait()  # the next step misses it
        elif killer.left and self._random.random() < 2 * killer.left / steps:
            # Of the steps that are left each kill takes two at most, two at once take four.
            killer.ask(room=steps > 4)

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        if event == "recovered":
            self.recovered.append(details)


class _Spec:
    def __init__(self, hosts: FarmLauncher) -> None:
        self.hosts = hosts

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> FlightCluster:
        return FlightCluster(tables, optimizer, self.hosts, seed=seed, pool=pool.Pool(1))


def train(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, where: Path, kills: int, seed: int, *more: str
) -> tuple[Result, Recoveries, Killer]:
    hosts = Watched(farm, SHARDS)
    monkeypatch.setattr(build, "_cluster", lambda *_: _Spec(hosts))
    settings = demo(
        [*SMALL, f"checkpoint.path={where}", "checkpoint.every=3 steps", "checkpoint.keep=1000",
         *more]
    )  # fmt: skip
    killer = Killer(hosts, kills, seed)
    heard = Recoveries(killer, seed)
    result = run(settings, hooks=[heard])
    hosts.end()
    return result, heard, killer


@pytest.fixture(scope="module")
def uninterrupted() -> Result:
    return run(demo(SMALL))


def check_full(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, where: Path, kills: int, seed: int, whole: Result
) -> int:
    result, heard, killer = train(farm, monkeypatch, where, kills, seed, "checkpoint.recovery=full")
    assert result.digest == whole.digest
    assert result.auc == whole.auc
    assert result.recoveries is not None
    # Where nothing was pushed since the version, the lost shards alone come back: nothing is lost.
    made = result.recoveries
    assert made.full + made.partial == len(heard.recovered)
    assert made.pls == 0
    return kills - killer.left


def check_partial(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, where: Path, kills: int, seed: int
) -> int:
    result, heard, killer = train(
        farm, monkeypatch, where, kills, seed, "checkpoint.recovery=partial"
    )
    repository = Repository.open(LocalStore(where))
    expected, last = 0.0, dict.fromkeys(range(SHARDS), 0)
    for event in heard.recovered:
        assert event["scope"] == "partial", event
        saved = repository.manifest(repository.version(event["version"])).step
        for shard in event["shards"]:
            lost = event["step"] - max(saved, last[shard])
            expected += max(0, lost) / (result.steps * SHARDS)
            last[shard] = event["step"]
    assert result.recoveries is not None
    assert result.recoveries.pls == pytest.approx(expected)
    assert result.recoveries.partial == len(heard.recovered)
    newest = repository.latest()
    assert newest is not None
    assert repository.manifest(newest).step == result.steps
    return kills - killer.left


def test_full_recovery_of_killed_servers_gives_the_bits_of_an_uninterrupted_run(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uninterrupted: Result
) -> None:
    assert check_full(farm, monkeypatch, tmp_path / "r", 3, 0, uninterrupted) == 3


def test_partial_recovery_of_killed_servers_counts_what_was_lost(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert check_partial(farm, monkeypatch, tmp_path / "r", 3, 5) == 3


def test_a_server_that_dies_while_recovery_of_another_is_planned_is_recovered_with_it(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uninterrupted: Result
) -> None:
    hosts = FarmLauncher(farm, SHARDS)
    asked = RemoteShard.table_state
    victims: list[int] = []

    class KillAtTen(Hook):
        def on_step(self, step: Any) -> None:
            if step.number == 10 and not victims:
                hosts.kill(2)
                victims.append(0)

    def dying(shard: RemoteShard) -> Any:
        if victims == [shard.index]:
            hosts.kill(victims[0])
            victims.append(-1)
        return asked(shard)

    monkeypatch.setattr(RemoteShard, "table_state", dying)
    monkeypatch.setattr(build, "_cluster", lambda *_: _Spec(hosts))
    given = ["checkpoint.every=3 steps", f"checkpoint.path={tmp_path}", "checkpoint.recovery=full"]
    result = run(demo([*SMALL, *given]), hooks=[KillAtTen()])
    assert victims == [0, -1]
    assert result.digest == uninterrupted.digest
    hosts.end()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_servers_are_killed_for_long_under_full_recovery(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uninterrupted: Result, seed: int
) -> None:
    assert check_full(farm, monkeypatch, tmp_path / "r", 10, seed, uninterrupted) == 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_servers_are_killed_for_long_under_partial_recovery(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    assert check_partial(farm, monkeypatch, tmp_path / "r", 10, seed) == 10

"""A signal that comes while a run waits for somebody else ends the wait, and commits nothing."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep._types import Json
from emberkeep.blobs import MemoryStore
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.errors import PeerError, RankError, ServerError
from emberkeep.keeper.signals import SignalledWaits, Termination
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.runtime.stopping import Stop
from emberkeep.tables import Optimizer, Table
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.wire.security import Security
from tests.contracts.engine import wanted_of
from tests.faults.test_servers_return import CODED, SECOND, TIMING, World

MOMENT = 3.0


class Run:
    """A keeper whose shards are servers on virtual time, which are started by hand or replaced."""

    def __init__(self, *, fixed: bool = True, store: MemoryStore | None = None) -> None:
        self.world = World(fixed=fixed)
        self.world.cluster.close()
        self.clock = self.world.clock
        self.bags = ek.EmbeddingBags(
            [ek.Table("fixed", rows=40, dim=4)], optimizer=ek.Adagrad(lr=0.1), cluster=self
        )
        self.store = store or MemoryStore()
        self.events: list[tuple[str, Json]] = []
        self.keeper = ek.Keeper(
            self.store, self.bags, self.bags.optimizer, clock=self.clock, reader=None,
            strategy=ek.incremental(every=2, recovery="full"),
            on_event=lambda *event: self.events.append(event),
        )  # fmt: skip

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(
            tables, optimizer, self.world.launcher, seed=seed, pool=Pool(1), timing=TIMING,
            transport=self.world.network.transport(), clock=self.clock,
        )  # fmt: skip

    def train(self, steps: int) -> None:
        if self.keeper.steps == 0:
            self.keeper.resume()
        while self.keeper.steps < steps:
            with self.keeper.surviving():
                random = np.random.default_rng(self.keeper.steps)
                self.bags({"fixed": torch.from_numpy(random.integers(0, 40, 16))}).sum().backward()
                self.bags.optimizer.step()
                self.keeper.step()

    def interrupted(self, number: int, seconds: float) -> float:
        """Trains until a signal that comes so much later ends it; how long after it that is."""
        sent = self.clock.monotonic() + seconds

        def send() -> None:
            if number == signal.SIGTERM:
                signal.raise_signal(number)
            else:  # which a process in the background may ignore
                self.keeper.stop_after_step(number)

        self.clock.at(seconds, send)
        expected = KeyboardInterrupt if number == signal.SIGINT else SystemExit
        with pytest.raises(expected) as ended, self.keeper:
            self.train(100)
        if number == signal.SIGTERM:
            assert isinstance(ended.value, SystemExit)
            assert ended.value.code == 75
        self.bags.cluster.close()
        return self.clock.monotonic() - sent

    def versions(self) -> list[int]:
        repository = Repository.open(self.store)
        return [repository.manifest(version).step for version in repository.versions()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_a_server_ends_soon_after_a_signal(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    run.train(5)
    run.keeper.wait()
    before = run.versions()
    run.world.network.stop(run.world.names[1])
    assert run.interrupted(number, 30) < MOMENT + 2
    assert run.versions() == before == [0, 2, 4]
    assert run.events[-1] == ("stopped", {"step": 5, "saved_step": 4})
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "stopped after" in line]
    assert line == (
        f"emberkeep: {signal.Signals(number).name}: stopped after step 5, waiting for shard 1 at "
        f"{run.world.names[1]} to answer; nothing was saved since version 3 of step 4: "
        "start the run again to go on from there"
    )


def test_a_step_that_goes_on_within_a_moment_is_saved(capfd: pytest.CaptureFixture[str]) -> None:
    run = Run()
    run.train(5)
    run.keeper.wait()
    run.world.cut_off(1, seconds=MOMENT)
    run.interrupted(signal.SIGTERM, 1)
    assert run.versions()[-1] == 6
    assert "stopped after step 6; version of step 6 was saved" in capfd.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_a_run_whose_servers_cannot_be_started_ends_soon_after_a_signal(
    first: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fixed=False)
    if not first:
        run.train(5)
        run.keeper.wait()

    def fails(shard: int, life: str) -> str:
        raise ServerError("there is no room for another server")

    saver, launcher = run.keeper._saver, run.world.launcher
    assert saver is not None
    cut = saver.cut

    def killing(*given: Any, **more: Any) -> Any:
        launcher.kill(1)
        return cut(*given, **more)

    launcher.replace = fails
    if first:
        monkeypatch.setattr(saver, "cut", killing)
    else:
        launcher.kill(1)
    assert run.interrupted(signal.SIGTERM, 30) < MOMENT + 2
    line = capfd.readouterr().err
    assert "waiting for shards that are lost again and again" in line
    assert ("before the first version" in line) == first
    assert ("no version of this run was saved" in line) == first


class Impatient:
    """Gives every wait up, and says what it was for."""

    def __init__(self, *clusters: Any) -> None:
        self.heard: list[tuple[str, bool]] = []
        for cluster in clusters:
            cluster.stop.heed(self.look)

    def look(self, what: str, others: bool) -> None:
        self.heard.append((what, others))
        raise SystemExit(75)


def test_a_worker_does_not_wait_for_its_coordinator() -> None:
    world = World(fixed=True)
    worker = world.open("worker", coordinate=False)
    impatient = Impatient(worker)
    world.network.stop(world.names[1])
    with pytest.raises(SystemExit):
        worker.pull(wanted_of(worker, {"fixed": [1]}))
    assert impatient.heard == [("the coordinator to bring lost shards back", False)]
    worker.close()
    world.cluster.close()


def test_nobody_waits_for_a_server_that_somebody_else_starts() -> None:
    world = World(fixed=True)
    world.network.stop(world.names[1])
    impatient = Impatient(world.cluster)
    began = world.clock.monotonic()
    with pytest.raises(SystemExit):
        world.cluster.renew(1)
    assert impatient.heard == [(f"a server of shard 1 at {world.names[1]}", False)]
    assert world.clock.monotonic() - began < 3 * SECOND.total_seconds()
    assert world.cluster.lost() == (1,)  # and not taken for one that is there
    world.cluster.close()


def test_nobody_waits_for_servers_that_do_not_reach_each_other() -> None:
    world = World(parity=CODED)
    impatient = Impatient(world.cluster)
    with pytest.raises(SystemExit):
        world.cluster._await_peers(PeerError("server-1 is silent"), 0.0)
    assert impatient.heard == [("servers that do not reach each other (server-1 is silent)", False)]
    world.cluster.close()


def test_other_ranks_are_waited_for_as_those_who_train() -> None:
    world = World()
    impatient = Impatient(world.cluster)

    def alone() -> None:
        raise RankError("rank 1 has not sent its part")

    with pytest.raises(SystemExit):
        world.cluster._until_all_ranks(alone)
    assert impatient.heard == [("other ranks to take their part in a step", True)]
    world.cluster.close()


def test_a_version_that_a_server_loads_is_left() -> None:
    class Loading:
        def act(self, *_: Any, **__: Any) -> tuple[Json, None]:
            return {"done": False, "progress": next(progress)}, None

    progress = iter(range(10))
    clock = VirtualClock()
    shard = RemoteShard(2, "server-2", Security(), TIMING, 1, clock=clock)
    impatient = Impatient(shard)
    with pytest.raises(SystemExit):
        shard._await_work(Loading(), {}, "load version 3")  # type: ignore[arg-type]
    assert impatient.heard == [("shard 2 at server-2 to load version 3", False)]


def test_a_disk_that_has_room_again_after_a_while_costs_no_rows() -> None:
    """Eight attempts of parity were over within an instant."""
    world = World(parity=CODED)
    world.push()
    replace, began = world.launcher.replace, world.clock.monotonic()

    def full(shard: int, life: str) -> str:
        if world.clock.monotonic() < began + 5:
            raise ServerError("a shard server cannot be started: No space left on device")
        return str(replace(shard, life))

    world.launcher.replace = full
    world.launcher.kill(1)
    world.push()
    assert world.cluster.losses == [1]
    world.cluster.rebuild()
    world.check()


# -- how long a signal lets others wait ----------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "grace", "deadline", "seconds"),
    [(False, 25, 0, 3), (True, 25, 0, 25), (False, 1, 0, 1), (False, 25, 25, 25)],
)
def test_how_long_a_wait_may_last_after_a_signal(
    others: bool, grace: int, deadline: int, seconds: int
) -> None:
    clock, termination, left = VirtualClock(), Termination(), []
    termination.close()
    waits = SignalledWaits(
        termination, lambda *about: left.append(about), timedelta(seconds=grace), clock
    )
    stop = Stop(clock)
    stop.heed(waits.look)
    stop.look("a server", others=others)
    clock.advance(timedelta(hours=1))
    stop.look("a server", others=others)
    termination.asked = signal.SIGTERM
    waits.deadline = clock.monotonic() + deadline
    began = clock.monotonic()

    def wait() -> None:
        for _ in range(100):
            stop.look("a server", others=others)
            clock.advance(timedelta(seconds=0.5))

    for _ in range(2):
        with pytest.raises(SystemExit):
            wait()
    assert clock.monotonic() - began == seconds
    assert left == [(signal.SIGTERM, "a server")]  # said once
    stop.heed(None)
    stop.look("a server")


def test_who_waits_does_not_keep_a_keeper_alive() -> None:
    impatient, stop = Impatient(), Stop()
    stop.heed(impatient.look)
    del impatient
    stop.look("a server")

"""A trainer dies at any message, and the next one goes back on the servers that it left: rows that
have not changed since the version are not loaded again, and all have the bits of a full load."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.checkpoint.restore import load
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.errors import EmberkeepError
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.server import version_work
from emberkeep.server.version_load import load_rows
from emberkeep.tables import Adam
from emberkeep.testing.local_transport import LocalNetwork, LocalServers, LocalTransport
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import grads_of, state, tables, wanted_of

pytestmark = pytest.mark.filterwarnings("ignore:saving step|after Killed|step . is saved")
SHARDS = 3
OPTIMIZER = Adam(lr=0.05, step="row")
LEASE = timedelta(seconds=15)


class Killed(BaseException):
    """What a process meets that is no more."""


class World:
    """Servers that stay, and trainers that come and go."""

    def __init__(self, where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.network = LocalNetwork(VirtualClock())
        self.servers = LocalServers(self.network, SHARDS)
        self.store = LocalStore(where)
        self.loads: list[bool] = []
        self._deliver: Callable[..., Any] = self.network.deliver
        self._left: tuple[LocalTransport, float, bool] | None = None
        self._lock = threading.Lock()
        monkeypatch.setattr(self.network, "deliver", self._count)
        monkeypatch.setattr(version_work, "load_rows", self._load)

    def _load(self, *given: Any) -> Any:
        done = load_rows(*given)
        self.loads.append(done["rewound"])
        return done

    def _count(self, sender: LocalTransport, *given: Any) -> Any:
        """Kills a trainer at its last message: before it is sent, or before it is answered."""
        with self._lock:
            last = False
            if self._left is not None and sender is self._left[0]:
                sender, left, sent = self._left
                self._left = sender, left - 1, sent
                last = left == 0
                sender.ended = sender.ended or (last and not sent)
        try:
            return self._deliver(sender, *given)
        finally:
            sender.ended = sender.ended or last
            if sender.ended:
                raise Killed

    def trainer(self, messages: float = float("inf"), *, sent: bool = False) -> Trainer:
        self.network.clock.advance(2 * LEASE)  # of the one before
        transport = self.network.transport()
        self._left = transport, messages, sent
        return Trainer(self, transport)

    def fresh(self, version: Any) -> Any:
        """A cluster that has loaded all rows of a version."""
        cluster = local(shards=SHARDS).open(tables(), OPTIMIZER, seed=0)
        repository = Repository.open(self.store)
        load(repository, repository.version(version), cluster, Pool(1))
        return cluster


class Trainer:
    def __init__(self, world: World, transport: LocalTransport) -> None:
        self.world, self._transport = world, transport
        self.cluster: Any = None
        self.saver: Any = None

    def begin(self, spec: VersionSpec) -> int | None:
        """The number of the version that it goes on from."""
        world = self.world
        self.cluster = FlightCluster(
            tables(), OPTIMIZER, world.servers, seed=0, pool=Pool(1),
            transport=self._transport, clock=world.network.clock,
        )  # fmt: skip
        if not Repository.exists(world.store):
            Repository.create(world.store, schema=self.cluster.schema())
        self.saver = Checkpointer(Repository.open(world.store), self.cluster, spec=spec)
        restored = self.saver.restore()
        return None if restored is None else restored.manifest.version.number

    def train(self, chance: random.Random, twin: Any) -> None:
        """One step of the cluster, and then of its twin."""
        some = np.random.default_rng(chance.randrange(2**32))
        batch = {
            "fixed": some.choice(40, 4, replace=False).tolist(),
            "dynamic": some.choice(20, 3, replace=False).tolist(),
            "evicting": some.choice(50, 2, replace=False).tolist(),
            "wide": some.choice(30, 2, replace=False).tolist(),
        }
        grads = {
            t.name: some.standard_normal((len(batch[t.name]), t.dim)).astype(np.float32)
            for t in self.cluster.tables
        }
        gone = {n: np.array(batch[n][:1]) for n in ("fixed", "dynamic") if chance.random() < 0.3}
        for one in (self.cluster, twin):
            one.push(wanted_of(one, batch), grads_of(one, grads), lr=0.1)
            for name, ids in gone.items():
                one.delete(name, ids)

    def end(self) -> None:
        """As the system does: no message of it arrives any more."""
        self._transport.ended = True
        if self.cluster is not None:
            self.cluster._finalizer.detach()
            self.cluster._leases.stop()
        if self.saver is not None:
            with suppress(EmberkeepError, Killed):
                self.saver._end()


def everything(cluster: Any) -> Any:
    return state(cluster), cluster.table_state()


def live(world: World, chance: random.Random, spec: VersionSpec, steps: int) -> None:
    """One life of a trainer, which ends at some message."""
    if chance.random() < 0.15:
        world.servers.replace(chance.randrange(SHARDS), "")  # empty, while others have their rows
    trainer = world.trainer(chance.randrange(5, 260), sent=chance.random() < 0.5)
    try:
        version = trainer.begin(spec)
        twin = local(shards=SHARDS).open(tables(), OPTIMIZER, seed=0)
        if version is not None:
            twin = world.fresh(version)
        assert everything(trainer.cluster) == everything(twin)
        for step in range(steps):
            trainer.train(chance, twin)
            if chance.random() < 0.4:
                trainer.saver.save(step)
                if chance.random() < 0.5:
                    trainer.saver.wait()
        assert everything(trainer.cluster) == everything(twin)
    except (Killed, EmberkeepError):
        assert trainer._transport.ended
    trainer.end()


def histories(where: Path, seeds: range, monkeypatch: pytest.MonkeyPatch, layout: Any) -> World:
    loads = list[bool]()
    for seed in seeds:
        chance = random.Random(seed)
        world = World(where / str(seed), monkeypatch)
        for _ in range(6):
            live(world, chance, VersionSpec(layout=layout), chance.randrange(1, 12))
        loads += world.loads
    world.loads = loads
    return world


@pytest.mark.parametrize("layout", ["one_shot", "consecutive"])
def test_trainers_die_at_any_message(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = histories(tmp_path, range(2), monkeypatch, layout)
    assert world.loads.count(True) > 3
    assert world.loads.count(False) > 0  # of servers that were started again, or died loading


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["full", "one_shot", "consecutive", "intermittent"])
def test_trainers_die_at_any_message_often(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    histories(tmp_path, range(100, 200), monkeypatch, layout)


def trained(world: World, spec: VersionSpec, steps: int = 4) -> Trainer:
    """A trainer that has saved a version, trained on and died."""
    chance, trainer = random.Random(steps), world.trainer()
    trainer.begin(spec)
    twin = local(shards=SHARDS).open(tables(), OPTIMIZER, seed=0)
    for _ in range(steps):
        trainer.train(chance, twin)
    trainer.saver.save(steps)
    trainer.saver.wait()
    trainer.train(chance, twin)
    trainer.end()
    return trainer


def test_rows_that_are_set_aside_are_seen_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    trained(world, VersionSpec())
    trainer = world.trainer()
    trainer.cluster = FlightCluster(
        tables(), OPTIMIZER, world.servers, seed=0, pool=Pool(1),
        transport=trainer._transport, clock=world.network.clock,
    )  # fmt: skip
    twin = local(shards=SHARDS).open(tables(), OPTIMIZER, seed=0)
    assert everything(trainer.cluster) == everything(twin)
    trainer.train(random.Random(1), twin)
    assert everything(trainer.cluster) == everything(twin)
    trainer.end()


def test_versions_of_two_repositories_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path / "one", monkeypatch)
    trained(world, VersionSpec(), steps=3)
    first, world.store = world.store, LocalStore(tmp_path / "two")
    trained(world, VersionSpec(), steps=6)
    world.store = first
    trainer = world.trainer()
    assert trainer.begin(VersionSpec()) == 1
    assert world.loads == [False] * SHARDS
    assert everything(trainer.cluster) == everything(world.fresh(1))
    trainer.end()


def test_a_version_that_is_not_exact_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    trained(world, VersionSpec(bits=4))
    trainer = world.trainer()
    trainer.begin(VersionSpec(bits=4))
    assert world.loads == [False] * SHARDS
    assert everything(trainer.cluster) == everything(world.fresh(1))
    trainer.end()

"""Peers agree before anything is at stake: on the protocol, and on where a repository is.

Below `/proc/self/cwd` every process finds its own working directory: one path, two places, as a
plain path is on two machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.blobs import open_store
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import (
    ConfigError,
    DamageError,
    ProtocolError,
    SaveError,
    ServerError,
    StorageError,
)
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.server import shard_service
from emberkeep.server.flight_server import ShardServer
from emberkeep.server.shard_service import ShardService
from emberkeep.strategies import Strategy
from emberkeep.tables import Adagrad, Optimizer, Table
from emberkeep.wire import connection
from emberkeep.wire.security import Security
from tests.servers import Farm, FarmLauncher

WHERE = "/proc/self/cwd/run"
TABLES = [Table("t", rows=60, dim=4)]


class Nodes:
    """Two servers, each with a directory, and the model that they hold the rows of."""

    def __init__(self, farm: Farm, *directories: Path) -> None:
        self.launcher = FarmLauncher(farm, 2, directories=directories)
        self.bags = ek.EmbeddingBags(TABLES, optimizer=Adagrad(lr=0.1), cluster=self)

    def open(self, tables: list[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(tables, optimizer, self.launcher, seed=seed, pool=Pool(1))

    def keeper(self, strategy: Strategy | None = None) -> ek.Keeper:
        return ek.Keeper(WHERE, self.bags, self.bags.optimizer, strategy=strategy)

    def step(self, keeper: ek.Keeper) -> None:
        self.bags({"t": torch.arange(30)}).sum().backward()
        self.bags.optimizer.step()
        keeper.step()

    def refusal(self, what: str) -> str:
        return f"shard 1 at {self.launcher.address(1)} finds {what} repository under file://{WHERE}"

    def end(self) -> None:
        self.bags.cluster.close()
        self.launcher.end()


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    return first, second


# Versions of a grid are written by the trainer, all but the exact one with which a lossy grid ends.
@pytest.mark.parametrize(
    "strategy", [None, ek.all_versions(every=1, bits=8)], ids=["plain", "grid"]
)
@pytest.mark.parametrize("what", ["no", "another"])
def test_servers_whose_paths_differ_are_refused_before_the_first_version(
    farm: Farm, directories: tuple[Path, Path], what: str, strategy: Strategy | None
) -> None:
    if what == "another":
        Repository.create(open_store(directories[1] / "run"), schema={"shards": 2, "tables": {}})
    nodes = Nodes(farm, *directories)
    with pytest.raises(ConfigError) as refused:
        nodes.keeper(strategy)
    assert nodes.refusal(what) in str(refused.value)
    assert "use a store that all nodes reach" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert what == "no" or list(directories[0].iterdir()) == []
    nodes.end()


@pytest.mark.parametrize("found", ["a file", "a damaged repository"])
@pytest.mark.parametrize("new", [True, False])
def test_a_server_that_cannot_open_the_repository_is_named(
    farm: Farm, directories: tuple[Path, Path], found: str, new: bool
) -> None:
    own, there = (directory / "run" for directory in directories)
    nodes = Nodes(farm, *directories)
    if not new:
        schema = nodes.bags.cluster.schema()
        Repository.create(open_store(own), schema=schema)
    if found == "a file":
        there.write_text("x")
    else:
        there.mkdir()
        (there / "repository.json").write_text("garbage")
    with pytest.raises(StorageError if found == "a file" else DamageError) as refused:
        nodes.keeper()
    assert f"shard 1 at {nodes.launcher.address(1)} cannot open" in str(refused.value)
    assert f"file://{WHERE}" in str(refused.value)
    assert own.exists() is not new  # a repository that nobody can use is not even made
    nodes.end()


def test_a_replacement_elsewhere_neither_writes_nor_reads_a_version(
    farm: Farm, directories: tuple[Path, Path]
) -> None:
    nodes = Nodes(farm, directories[0], directories[0])
    keeper = nodes.keeper()
    nodes.step(keeper)
    keeper.save()
    first = keeper.wait()
    # The next server of shard 1 starts where the path leads elsewhere.
    nodes.launcher.directories[1] = directories[1]
    cluster = nodes.bags.cluster
    nodes.launcher.kill(1)
    cluster.handles[1].state = "lost"
    with pytest.raises(ConfigError, match="finds no repository"):
        keeper.recover()
    cluster.renew(1)
    cluster.serve(1)
    keeper.save()
    with pytest.raises(SaveError) as failed, pytest.warns(UserWarning, match="finds no repository"):
        keeper.wait()
    assert nodes.refusal("no") in str(failed.value)
    assert Repository.open(open_store(WHERE)).versions() == (first.version,)
    assert list(directories[1].iterdir()) == []
    keeper.close(save=False)
    nodes.end()


def test_a_grid_needs_a_store_that_servers_reach_too(
    farm: Farm, directories: tuple[Path, Path]
) -> None:
    """They write and read its rows themselves."""
    nodes = Nodes(farm, *directories)
    own = directories[0] / "run"
    Repository.create(open_store(own), schema=nodes.bags.cluster.schema())
    with pytest.raises(ConfigError) as refused:
        nodes.keeper(ek.all_versions(every=1))
    assert nodes.refusal("no") in str(refused.value)
    nodes.end()


# -- the protocol --------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    server = ShardServer(ShardService(threads=1))
    yield server.address
    server.shutdown()


def connect(address: str) -> FlightCluster:
    timing = Timing(deadline=timedelta(seconds=60), lease=timedelta(seconds=60))
    hosts = FixedAddresses([address], Security(), patience=timedelta(seconds=1))
    return FlightCluster(TABLES, Adagrad(lr=0.1), hosts, pool=Pool(1), timing=timing)


def test_a_client_refuses_a_server_of_another_protocol(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_service, "PROTOCOL", 1)
    with pytest.raises(ProtocolError, match="speaks protocol 1, this process protocol 2") as error:
        connect(address)
    assert address in str(error.value)


def test_a_server_refuses_a_client_of_another_protocol(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is asked as an older client would: one that does not look at its number."""
    greeting = connection.Connection(address, Security())
    seconds = timedelta(seconds=60)
    for given in ({}, {"protocol": 1}, {"protocol": 3}):
        number = given.get("protocol", 1)
        with pytest.raises(ProtocolError, match=f"protocol {number}, this process protocol 2"):
            greeting.act("admit", {"epoch": 1, **given}, deadline=seconds)
    with monkeypatch.context() as patched:
        patched.setattr(connection, "PROTOCOL", 1)
        greeting.open(seconds)
    with suppress(ServerError):  # its stream may have ended by then
        greeting.send(np.zeros(1, np.uint8), seconds)
    with pytest.raises(ServerError, match="protocol 1, this process protocol 2"):
        greeting.receive()
    greeting.close()

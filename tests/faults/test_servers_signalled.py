"""Servers that this process has started: who reaches them, and what signals do to them."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.blobs import open_store
from emberkeep.cluster.remote import processes
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.processes import ProcessLauncher
from emberkeep.errors import SecurityError
from emberkeep.repository import Repository
from emberkeep.wire.connection import Connection
from emberkeep.wire.security import TOKEN, Security, split_address

IDS = [RowIds(np.arange(8), np.array([0, 8]))]
SECONDS = timedelta(seconds=60)
NOBODY = 65534


@pytest.fixture(scope="module")
def bags() -> Iterator[ek.EmbeddingBags]:
    """One server, started where the environment holds a token that is meant for others."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as state:
        patch.setenv(TOKEN, "a token that is meant for others")
        patch.setenv("XDG_STATE_HOME", state)
        yield ek.EmbeddingBags(
            [ek.Table("t", rows=8, dim=2)], optimizer=ek.SGD(lr=1.0),
            cluster=ek.servers(shards=1, spares=0),
        )  # fmt: skip


@pytest.fixture
def cluster(bags: ek.EmbeddingBags) -> FlightCluster:
    assert isinstance(bags.cluster, FlightCluster)
    return bags.cluster


def launcher(cluster: FlightCluster) -> ProcessLauncher:
    assert isinstance(cluster.launcher, ProcessLauncher)
    return cluster.launcher


def directory(cluster: FlightCluster) -> Path:
    scheme, path, _ = split_address(launcher(cluster).address(0))
    assert scheme == "grpc+unix"
    return Path(path).parent


def test_a_token_in_the_environment_is_not_theirs(cluster: FlightCluster) -> None:
    assert cluster.pull(IDS)[0].shape == (8, 2)


def test_their_token_is_random_and_in_no_command_line(cluster: FlightCluster) -> None:
    token = launcher(cluster).security.token
    assert token is not None
    assert token.encode() not in Path(f"/proc/{launcher(cluster).pid(0)}/cmdline").read_bytes()
    for wrong in (None, "another token of some length"):
        stranger = Connection(launcher(cluster).address(0), Security(token=wrong))
        with pytest.raises(SecurityError, match="token"):
            stranger.act("status", deadline=SECONDS)
        stranger.close()


def test_other_users_cannot_reach_them(cluster: FlightCluster) -> None:
    where = directory(cluster)
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    if os.geteuid() != 0:
        return  # nobody else to try it as
    os.seteuid(NOBODY)
    try:
        with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(PermissionError):
            stranger.connect(str(where / "socket"))
    finally:
        os.seteuid(0)


def test_a_signal_to_every_process_does_not_take_them_from_the_last_save(
    bags: ek.EmbeddingBags, cluster: FlightCluster, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server = launcher(cluster)
    pid, where = server.pid(0), directory(cluster)
    assert os.getsid(pid) == pid  # what is sent to the group of this process does not reach it
    keeper = ek.Keeper(tmp_path, bags, bags.optimizer, strategy=ek.incremental(every=1000))

    def step() -> None:
        bags({"t": torch.arange(8)}).sum().backward()
        bags.optimizer.step()
        keeper.step()

    step()
    os.kill(pid, signal.SIGTERM)
    for _ in range(200):  # a server that drains refuses within a few milliseconds
        step()
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        step()
    assert ended.value.code == 75
    assert server.pid(0) == pid  # not replaced
    repository = Repository.open(open_store(str(tmp_path)))
    newest = repository.latest()
    assert newest is not None
    assert repository.manifest(newest).step == keeper.steps > 2
    monkeypatch.setattr(processes, "_END_SECONDS", 300.0)  # on a busy machine too
    process = server._servers[0]._process
    cluster.close()
    assert process.returncode != -signal.SIGKILL  # it ended by itself
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not where.exists()

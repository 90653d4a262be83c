"""Clusters of shard servers: started and supervised by this process, or by somebody else."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from emberkeep.cluster.base import check_size
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.remote_shard import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, DeadlineError, ServerError
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.tables import Optimizer, Table
from emberkeep.wire.security import Security, read_token

_START_SECONDS = 120.0
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Where rows live: `shards` servers on this machine, each a process, on the loopback interface.

    They are started with the cluster, end with it, and a dead one is replaced when it is missed.
    `spares` more are started and wait: a server knows nothing of tables before it is given a place,
    so a spare can take any. `threads` are those of each server. With `parity`, servers that die
    come back from the others, with every row as it was.
    """

    shards: int
    spares: int = 1
    threads: int | None = None
    timing: Timing = field(default_factory=Timing)
    parity: Parity | None = None

    def __post_init__(self) -> None:
        check_size(self.shards, self.threads, self.parity)
        if self.spares < 0:
            raise ConfigError(f"spares must be 0 or more, not {self.spares}")

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        launcher = ProcessLauncher(self.shards, spares=self.spares, threads=self.threads)
        try:
            cluster = FlightCluster(
                tables, optimizer, launcher, seed=seed, pool=pools.shared(), timing=self.timing,
                parity=self.parity,
            )  # fmt: skip
        except BaseException:
            launcher.close()
            raise
        weakref.finalize(cluster, launcher.close)
        return cluster


def servers(
    *,
    shards: int,
    spares: int = 1,
    threads: int | None = None,
    timing: Timing | None = None,
    parity: Parity | None = None,
) -> Servers:
    """`shards` servers on this machine: `ek.EmbeddingBags(..., cluster=ek.servers(shards=4))`.

    `parity=ek.Parity(k=4, r=1)` brings those back that die, with nothing lost.
    """
    return Servers(
        shards=shards, spares=spares, threads=threads, timing=timing or Timing(), parity=parity
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Where rows live: servers that somebody else has started; their addresses in shard order.

    `rank` of `world` makes this process one of several that train together, synchronously; rank 0
    coordinates. With `world=1` and `coordinate=False` it joins as an asynchronous worker.
    """

    addresses: tuple[str, ...]
    rank: int = 0
    world: int = 1
    coordinate: bool = True
    security: Security = field(default_factory=Security)
    timing: Timing = field(default_factory=Timing)
    patience: timedelta = timedelta(minutes=2)
    parity: Parity | None = None

    def __post_init__(self) -> None:
        if self.parity is not None:
            self.parity.check_shards(len(self.addresses))
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank must be from 0 to below world, not {self.rank} of {self.world}"
            )
        FixedAddresses(self.addresses, self.security, patience=self.patience)

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        launcher = FixedAddresses(self.addresses, self.security, patience=self.patience)
        return FlightCluster(
            tables, optimizer, launcher, seed=seed, pool=pools.shared(), security=self.security,
            timing=self.timing, rank=self.rank, world=self.world,
            coordinate=self.coordinate and self.rank == 0, parity=self.parity,
        )  # fmt: skip


def connect(
    addresses: Sequence[str],
    *,
    rank: int = 0,
    world: int = 1,
    coordinate: bool = True,
    token_file: str | os.PathLike[str] | None = None,
    authority: str | os.PathLike[str] | None = None,
    timing: Timing | None = None,
    patience: timedelta = timedelta(minutes=2),
    parity: Parity | None = None,
) -> Connect:
    """Servers started with `emberkeep serve`: `cluster=ek.connect(["host:7070", "host:7071"])`.

    The token is read from `token_file`, else from the environment (`EMBERKEEP_TOKEN`); `authority`
    names the certificates to trust. `patience` is how long a dead server may take to come back;
    with `parity` it then gets its rows from the others.
    """
    token = read_token(None if token_file is None else Path(token_file))
    security = Security(token=token, authority=None if authority is None else Path(authority))
    return Connect(
        addresses=tuple(addresses), rank=rank, world=world, coordinate=coordinate,
        security=security, timing=timing or Timing(), patience=patience, parity=parity,
    )  # fmt: skip


class ProcessLauncher:
    """Servers of this machine, children of this process: they end with it, however it ends."""

    def __init__(
        self, shards: int, *, spares: int = 1, threads: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._threads = threads or max(1, pools.default_threads() // shards)
        self._lock = threading.Lock()
        self._closed = False
        self._servers: list[_Process] = []
        self._spares: list[_Process] = []
        self._wanted_spares = spares
        try:
            for processes, count in ((self._servers, shards), (self._spares, spares)):
                for _ in range(count):
                    processes.append(_Process(self._threads))
            for server in self._servers:
                server.wait()
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self._servers)

    def address(self, shard: int) -> str:
        return self._servers[shard].address

    def pid(self, shard: int) -> int:
        return self._servers[shard].pid

    def replace(self, shard: int, life: str) -> str:
        """Ends the old process for good, and puts a spare in its place."""
        with self._lock:
            if self._closed:
                raise ServerError("the cluster is closed")
            self._servers[shard].kill()
            server = self._spares.pop(0) if self._spares else _Process(self._threads)
            self._servers[shard] = server
            if len(self._spares) < self._wanted_spares:
                self._spares.append(_Process(self._threads))
        server.wait()
        return server.address

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes = [*self._servers, *self._spares]
        until = self._clock.monotonic() + _END_SECONDS
        end_all(
            *(process.ask_to_end for process in processes),
            *(lambda p=p: p.end(until - self._clock.monotonic()) for p in processes),
        )


class _Process:
    """One `emberkeep serve`; it starts while others do."""

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "emberkeep.cli", "serve", "--port", "0", "--threads",
                str(threads), "--until-stdin-closes",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        self._greeting: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        return str(self._ready()["address"])

    def wait(self) -> None:
        self._ready()

    def _ready(self) -> dict[str, Any]:
        """What the server says when it listens."""
        if self._greeting is None:
            assert self._process.stdout is not None
            # It writes one short line, whole.
            if not select.select([self._process.stdout], [], [], _START_SECONDS)[0]:
                self._process.kill()
            line = self._process.stdout.readline()
            if not line:
                code = self._ended()
                raise ServerError(
                    f"a shard server ended with {code} before it was ready: run emberkeep serve to "
                    "see why"
                )
            self._greeting = json.loads(line)
        return self._greeting

    def kill(self) -> None:
        """SIGKILL, and gone when this returns; a stopped process dies too."""
        self._process.send_signal(signal.SIGKILL)
        try:
            self._ended()
        finally:
            self._close_pipes()

    def _ended(self) -> int:
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"shard server {self.pid} has not ended within {_END_SECONDS:g} s: the system does "
                "not let it go, look at what it waits for (a disk or mount that hangs)"
            ) from None

    def ask_to_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, seconds: float) -> None:
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

"""Clusters of shard servers: started and supervised by this process, or by somebody else."""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberkeep.cluster.base import check_size
from emberkeep.cluster.remote.adoptable_rows import OnRestart, check_on_restart
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.remote_shard import Timing
from emberkeep.cluster.spread import check_tier, warn_of_shared_machines
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, DeadlineError, ServerError
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.event_log import last_line, new_log_directory, stderr_beside
from emberkeep.runtime.waiting import Waiting
from emberkeep.tables import Optimizer, Table, Tier
from emberkeep.wire.private_socket import own_address
from emberkeep.wire.security import TOKEN, Security, read_token

_START_SECONDS = 120.0
_END_SECONDS = 5.0
_numbers = itertools.count(1)
_LONGEST_DIRECTORY = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Where rows live: `shards` servers on this machine, processes that only this user reaches.

    They are started with the cluster, end with it, and a dead one is replaced when it is missed.
    `spares` more are started and wait: a server knows nothing of tables before it is given a place,
    so a spare can take any. `threads` are those of each server. With `parity`, servers that die
    come back from the others, with every row as it was. With a `tier` rows live in files, those of
    each shard in a directory of its own below its path; each server has its `memory`.
    """

    shards: int
    spares: int = 1
    threads: int | None = None
    timing: Timing = field(default_factory=Timing)
    parity: Parity | None = None
    tier: Tier | None = None

    def __post_init__(self) -> None:
        check_size(self.shards, self.threads, self.parity)
        check_tier(self.tier, self.parity)
        if self.spares < 0:
            raise ConfigError(f"spares must be 0 or more, not {self.spares}")

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        launcher = ProcessLauncher(
            self.shards, spares=self.spares, threads=self.threads, tier=self.tier
        )
        try:
            cluster = FlightCluster(
                tables, optimizer, launcher, seed=seed, pool=pools.shared(),
                security=launcher.security, timing=self.timing, parity=self.parity,
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
    tier: Tier | None = None,
) -> Servers:
    """`shards` servers on this machine: `ek.EmbeddingBags(..., cluster=ek.servers(shards=4))`.

    `parity=ek.Parity(k=4, r=1)` brings those back that die, with nothing lost.
    `tier=ek.Tier("/nvme/run", memory="8GB")` has them keep rows in files, the hot ones in memory:
    so much on each server.
    """
    return Servers(
        shards=shards, spares=spares, threads=threads, timing=timing or Timing(), parity=parity,
        tier=tier,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Where rows live: servers that somebody else has started; their addresses in shard order.

    `rank` of `world` makes this process one of several that train together, synchronously; rank 0
    coordinates. With `world=1` and `coordinate=False` it joins as an asynchronous worker.
    `on_restart` says what becomes of rows that live servers hold of an earlier trainer of the run.
    """

    addresses: tuple[str, ...]
    rank: int = 0
    world: int = 1
    coordinate: bool = True
    security: Security = field(default_factory=Security)
    timing: Timing = field(default_factory=Timing)
    parity: Parity | None = None
    on_restart: OnRestart = "rewind"

    def __post_init__(self) -> None:
        check_on_restart(self.on_restart, self.parity)
        if self.parity is not None:
            self.parity.check_shards(len(self.addresses))
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank must be from 0 to below world, not {self.rank} of {self.world}"
            )
        FixedAddresses(self.addresses, self.security, patience=self.timing.patience)

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        launcher = FixedAddresses(self.addresses, self.security, patience=self.timing.patience)
        if self.coordinate and self.rank == 0:
            warn_of_shared_machines(self.parity, self.addresses)
        return FlightCluster(
            tables, optimizer, launcher, seed=seed, pool=pools.shared(), security=self.security,
            timing=self.timing, rank=self.rank, world=self.world,
            coordinate=self.coordinate and self.rank == 0, parity=self.parity,
            on_restart=self.on_restart,
        )  # fmt: skip


def connect(
    addresses: Sequence[str],
    *,
    rank: int = 0,
    world: int = 1,
    coordinate: bool = True,
    token_file: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    authority: str | os.PathLike[str] | None = None,
    timing: Timing | None = None,
    parity: Parity | None = None,
    on_restart: OnRestart = "rewind",
) -> Connect:
    """Servers started with `emberkeep serve`: `cluster=ek.connect(["host:7070", "host:7071"])`.

    `127.0.0.1:7070` is this user's own server, which needs nothing else. Others are reached over
    TLS, `grpc+tls://host:7070`: with the token from `token_file`, else from the environment
    (`EMBERKEEP_TOKEN`), with this process's `certificate` and `key`, and with `authority`, which
    signs the servers'. `patience` of `timing` is how long a server may be away: one that was only
    unreachable goes on with its rows, one that was started again gets them from a version, or with
    `parity` from the others.

    Servers outlive the trainer. With `on_restart="rewind"` one that is started again has all rows
    go back to the newest version, or batch, with the network and the reader. With `"adopt"` rows
    stay as they are, ahead of the two: samples since then are applied twice, and counted.
    """
    files = [None if name is None else Path(name) for name in (certificate, key, authority)]
    security = Security(
        token=read_token(None if token_file is None else Path(token_file)),
        certificate=files[0], key=files[1], authority=files[2],
    )  # fmt: skip
    return Connect(
        addresses=tuple(own_address(address) for address in addresses),
        rank=rank, world=world, coordinate=coordinate,
        security=security, timing=timing or Timing(), parity=parity, on_restart=on_restart,
    )  # fmt: skip


class ProcessLauncher:
    """Servers of this machine, children of this process: they end with it, however it ends."""

    def __init__(
        self, shards: int, *, spares: int = 1, threads: int | None = None,
        tier: Tier | None = None, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._threads = threads or max(1, pools.default_threads() // shards)
        self._tier = tier
        self.security = Security().with_token()
        """What the servers demand of their clients; no other cluster has the same token."""
        self._lock = threading.Lock()
        self._closed = False
        self._servers: list[_Process] = []
        self._spares: list[_Process] = []
        self._wanted_spares = spares
        self._logs = _log_directory(clock)
        self.token_file = None if self._logs is None else self._logs / "token"
        """With it this user's `emberkeep cluster status` can ask the servers as well."""
        if self.token_file is not None:
            self.token_file.touch(mode=0o600)
            self.token_file.write_text(f"{self.security.token}\n")
        waiting = Waiting(clock)
        what = f"{shards} shard server{'s' if shards > 1 else ''}"
        waiting.say(f"starting {what}" + (f" and {spares} to spare" if spares else ""))
        try:
            for processes, count in ((self._servers, shards), (self._spares, spares)):
                for _ in range(count):
                    processes.append(self._start())
            for ready, server in enumerate(self._servers):
                server.wait()
                waiting.say(f"{ready + 1} of {what} are ready")
        except BaseException:
            self.close()
            raise
        waiting.over(f"{what} ready")

    def _start(self) -> _Process:
        return _Process(self._threads, self.security, self._logs, self._tier)

    @property
    def count(self) -> int:
        return len(self._servers)

    def address(self, shard: int) -> str:
        return self._servers[shard].address

    def pid(self, shard: int) -> int:
        return self._servers[shard].pid

    @property
    def replaceable(self) -> bool:
        return True

    def gone(self, shard: int, life: str) -> bool:
        return self._servers[shard].ended

    def replace(self, shard: int, life: str) -> str:
        """Ends the old process for good, and puts a spare in its place."""
        with self._lock:
            if self._closed:
                raise ServerError("the cluster is closed")
            self._servers[shard].kill()
            server = self._spares.pop(0) if self._spares else self._start()
            self._servers[shard] = server
            if len(self._spares) < self._wanted_spares:
                self._spares.append(self._start())
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


def _tier_options(tier: Tier | None) -> list[str]:
    if tier is None:
        return []
    options = ["--tier", tier.path, "--tier-memory", f"{tier.memory}B"]
    return [*options, *(["--tier-exclusive"] if tier.exclusive else [])]


def _log_directory(clock: Clock) -> Path | None:
    """Where servers log; None, with a warning, where this user can keep nothing."""
    try:
        return new_log_directory(clock)
    except OSError as error:
        warnings.warn(
            f"servers keep no logs: {error}; set XDG_STATE_HOME to a directory that can be written",
            stacklevel=2,
        )
        return None


class _Process:
    """One `emberkeep serve`; it starts while others do.

    In a session of its own: what is sent to this process's group does not reach it. What is sent
    to it all the same, to the control group say, it outlives for as long as it is needed.
    """

    def __init__(
        self, threads: int, security: Security, logs: Path | None, tier: Tier | None = None
    ) -> None:
        assert security.token is not None
        self.log = None if logs is None else logs / f"server-{next(_numbers)}.log"
        """Its events; None where nothing can be kept. What else it prints is in the file beside."""
        self._directory = tempfile.mkdtemp(prefix="emberkeep-", dir=_short_directory())
        try:
            stderr = subprocess.DEVNULL if self.log is None else stderr_beside(self.log).open("ab")
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "emberkeep.cli", "serve", "--threads", str(threads),
                    "--socket", f"{self._directory}/socket", "--until-stdin-closes",
                    "--metrics", "0", *([] if self.log is None else ["--log", str(self.log)]),
                    *_tier_options(tier),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
                # Unlike arguments, only this user can read it.
                env={**os.environ, TOKEN: security.token},
            )  # fmt: skip
        except BaseException:
            self._remove_directory()
            raise
        if not isinstance(stderr, int):
            stderr.close()
        self._greeting: dict[str, Any] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

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
                said = "" if self.log is None else last_line(stderr_beside(self.log))
                raise ServerError(
                    f"a shard server ended with {code} before it was ready: "
                    f"{said or 'it said nothing; run emberkeep serve to see why'}"
                )
            self._greeting = json.loads(line)
        return self._greeting

    def kill(self) -> None:
        """SIGKILL, and gone when this returns; a stopped process dies too."""
        self._process.send_signal(signal.SIGKILL)
        try:
            self._ended()
        finally:
            self._let_go()

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
        self._let_go()

    def _let_go(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._remove_directory()

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _short_directory() -> str:
    """Where the directories of sockets are made: their names must not be long."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_DIRECTORY else "/tmp"

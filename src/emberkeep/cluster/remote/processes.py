"""Clusters of shard servers: started and supervised by this process, or by somebody else."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from emberkeep.cluster.base import check_size
from emberkeep.cluster.remote.adoptable_rows import OnRestart, check_on_restart
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.cluster.spread import check_tier, warn_of_shared_machines
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, DeadlineError, ServerError
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background import Retry, Worker, end_all
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.event_log import last_line, new_log_directory, stderr_beside
from emberkeep.runtime.stopping import Stop
from emberkeep.runtime.waiting import Waiting
from emberkeep.tables import Optimizer, Table, Tier
from emberkeep.wire.private_socket import own_address
from emberkeep.wire.security import TOKEN, Security, read_token

_START_SECONDS = 120.0
_END_SECONDS = 5.0
# How often a spare is tried again that could not be started.
_SPARE_SECONDS = 30.0
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
            self.shards, spares=self.spares, threads=self.threads, tier=self.tier,
            lease=self.timing.lease,
        )  # fmt: skip
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
    """Servers of this machine, children of this process: they end with it, however it ends.

    A server that cannot be started is `ServerError`; a spare is not worth that: it is said once,
    and tried again until it is there.
    """

    def __init__(
        self, shards: int, *, spares: int = 1, threads: int | None = None,
        tier: Tier | None = None, lease: timedelta | None = None, clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._pid = os.getpid()
        self.stop = Stop(clock)
        self._threads = threads or max(1, pools.default_threads() // shards)
        self._tier = tier
        self.security = Security().with_token()
        """What the servers demand of their clients; no other cluster has the same token."""
        self._lock = threading.Lock()
        self._closed = False
        self._servers: list[_Process] = []
        self._spares: list[_Process] = []
        self._wanted_spares = spares
        self._lease_seconds = (lease or Timing().lease).total_seconds()
        # Those that SIGKILL has not ended, and which others have replaced.
        self._stuck: list[_Process] = []
        self._said: set[str] = set()
        retry = Retry(limit=None, most=timedelta(seconds=_SPARE_SECONDS))
        self._later = Worker("emberkeep-spares", self._try_again, retry=retry, clock=clock)
        self._logs = _log_directory(clock, f"{self.security.token}\n")
        self.token_file = None if self._logs is None else self._logs / "token"
        """With it this user's `emberkeep cluster status` can ask the servers as well."""
        waiting = Waiting(clock)
        what = f"{shards} shard server{'s' if shards > 1 else ''}"
        waiting.say(f"starting {what}" + (f" and {spares} to spare" if spares else ""))
        try:
            for _ in range(shards):
                self._servers.append(self._start())
            self._want_spares()
            for ready, server in enumerate(self._servers):
                server.wait()
                waiting.say(f"{ready + 1} of {what} are ready")
        except BaseException:
            self.close()
            raise
        waiting.over(f"{what} ready")

    def _start(self) -> _Process:
        try:
            started = _Process(self._threads, self.security, self._logs, self._tier)
        except OSError as error:
            places = [tempfile.tempdir or "TMPDIR", *([] if self._logs is None else [self._logs])]
            raise ServerError(
                f"a shard server cannot be started: {error}; see that "
                f"{' and '.join(map(str, places))} can be written and have space and inodes, and "
                "that limits on open files and processes (ulimit -n, ulimit -u) leave room"
            ) from error
        self._said.clear()
        return started

    def _want_spares(self) -> None:
        """Has as many spares as it should; those that cannot be started come later."""
        try:
            self._fill_spares()
        except ServerError as error:
            self._warn("spare", f"a spare is missing, and is tried again: {error}")
            self._later.wake()

    def _fill_spares(self) -> None:
        while not self._closed and len(self._spares) < self._wanted_spares:
            self._spares.append(self._start())

    def _try_again(self) -> float | None:
        try:
            with self._lock:
                self._fill_spares()
        except ServerError:  # said before
            return _SPARE_SECONDS
        return None

    def _warn(self, of: str, text: str) -> None:
        """Says it once, until a server could be started again."""
        if of not in self._said:
            self._said.add(of)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

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
            self._end_for_good(shard)
            try:
                server = self._spares.pop(0) if self._spares else self._start()
            except ServerError as error:
                # Who recovers asks again, for as long as there is patience: nobody else says why.
                self._warn("server", f"shard {shard} has no server yet: {error}")
                raise
            self._servers[shard] = server
            self._want_spares()
        server.wait()
        return server.address

    def _end_for_good(self, shard: int) -> None:
        """Returns once the server is dead, or once its lease has passed with SIGKILL pending.

        No thread of such a process runs again outside of the call in which the system holds it,
        so it answers nobody, and by its lease it may not. That lease runs out from here at the
        latest: its renewals rest, and one that is read late renews nothing. Files of a tier it
        keeps locked: there a replacement is refused until it has gone.
        """
        server = self._servers[shard]
        if server in self._stuck:
            return
        try:
            server.kill(max(_END_SECONDS, self._lease_seconds))
        except DeadlineError as error:
            self._stuck.append(server)
            warnings.warn(
                f"shard {shard} is replaced, as its lease has passed: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        if self._pid != os.getpid():  # a forked child: the servers are its parent's
            return
        with self._lock:
            self._closed = True
            processes = [*self._servers, *self._spares]
            processes = [process for process in processes if process not in self._stuck]
        until = self._clock.monotonic() + _END_SECONDS
        end_all(
            self._later.close,
            *(process.ask_to_end for process in processes),
            *(lambda p=p: p.end(until - self._clock.monotonic()) for p in processes),
        )


def _tier_options(tier: Tier | None) -> list[str]:
    if tier is None:
        return []
    options = ["--tier", tier.path, "--tier-memory", f"{tier.memory}B"]
    return [*options, *(["--tier-exclusive"] if tier.exclusive else [])]


def _log_directory(clock: Clock, token: str) -> Path | None:
    """Where servers log, with a file that has the token; None, with a warning, where this user can
    keep nothing."""
    try:
        made = new_log_directory(clock)
        (made / "token").touch(mode=0o600)
        (made / "token").write_text(token)
        return made
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
        stderr: int | IO[bytes] = subprocess.DEVNULL
        try:
            if self.log is not None:
                stderr = stderr_beside(self.log).open("ab")
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "emberkeep.cli", "serve", "--threads", str(threads),
                    "--socket", f"{self._directory}/socket", "--until-stdin-closes",
                    # Without it, a child that was forked here would keep their input open.
                    "--parent", str(os.getpid()), "--metrics", "0",
                    *([] if self.log is None else ["--log", str(self.log)]), *_tier_options(tier),
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
        finally:
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
            stdout = self._process.stdout
            assert stdout is not None
            # Not `select`, which takes no descriptors above 1023.
            with selectors.PollSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                spoke = bool(selector.select(_START_SECONDS))
            # It writes one short line, whole.
            line = stdout.readline() if spoke else ""
            if not line:
                said = "" if self.log is None else last_line(stderr_beside(self.log))
                said = said or "it said nothing; run emberkeep serve to see why"
                if not spoke:
                    self._process.kill()
                    raise ServerError(
                        f"shard server {self.pid} was not ready within {_START_SECONDS:g} s: {said}"
                    )
                raise ServerError(
                    f"a shard server ended with {self._ended()} before it was ready: {said}"
                )
            self._greeting = json.loads(line)
        return self._greeting

    def kill(self, seconds: float = _END_SECONDS) -> None:
        """SIGKILL, and gone when this returns; a stopped process dies too."""
        self._process.send_signal(signal.SIGKILL)
        try:
            self._ended(seconds)
        finally:
            self._let_go()

    def _ended(self, seconds: float = _END_SECONDS) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"shard server {self.pid} has not ended within {seconds:g} s: the system does "
                "not let it go, look at what it waits for (a disk or mount that hangs)"
            ) from None

    def ask_to_end(self) -> None:
        """In words: closing alone is not heard while a forked child has the same pipe."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.closed:
            with suppress(OSError):  # it has ended
                os.write(stdin.fileno(), b"end\n")
            stdin.close()

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

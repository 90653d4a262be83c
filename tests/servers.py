"""Shard servers for tests: real processes, forked from one that has loaded everything already.

`Farm` asks `python -m tests.servers` (see `tests.loaded`) for forks that serve, or that call a
function; one that is killed is really dead. `FarmLauncher` has the servers of one cluster.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.loaded import ROOT, Foreman, Questions, serve

if TYPE_CHECKING:
    from emberkeep.cluster.remote.flight_cluster import FlightCluster
    from emberkeep.tables import Tier


class Farm:
    """Starts and ends servers."""

    def __init__(self) -> None:
        # Arrow's own pool sets regions of 32 MB aside, which RLIMIT_DATA counts, used or not.
        self._foreman = Foreman(
            "tests.servers", EMBERKEEP_THREADS="1", OMP_NUM_THREADS="1",
            ARROW_DEFAULT_MEMORY_POOL="system",
        )  # fmt: skip
        self._lock = threading.Lock()

    def _ask(self, **question: Any) -> Any:
        with self._lock:
            return self._foreman.ask(**question)

    def start(
        self, threads: int = 1, port: int = 0, directory: Path = ROOT, tier: Tier | None = None,
        limit: int | None = None,
    ) -> tuple[int, str]:  # fmt: skip
        """The pid and address of a server that works in a directory; `limit` is its RLIMIT_DATA."""
        kept = None if tier is None else [tier.path, tier.memory]
        pid, address = self._ask(
            threads=threads, port=port, directory=str(directory), tier=kept, limit=limit
        )
        return int(pid), str(address)

    def call(self, function: str, *arguments: str, log: Path) -> int:
        """The pid of a process that calls `module:function`; what it prints goes to a file."""
        return int(self._ask(call=function, arguments=arguments, log=str(log)))

    def ended(self, pid: int) -> int | None:
        """The exit code of a process, or minus the signal that ended it; None while it lives."""
        code = self._ask(ended=pid)
        return None if code is None else int(code)

    def kill(self, pid: int) -> None:
        """SIGKILL, and gone when this returns."""
        self._ask(kill=pid)

    def close(self) -> None:
        self._foreman.close()


class FarmLauncher:
    """The servers of one cluster, replaced as soon as that is asked for."""

    def __init__(
        self, farm: Farm, shards: int, threads: int = 1, directories: Sequence[Path] | None = None,
        tier: Tier | None = None, limit: int | None = None,
    ) -> None:  # fmt: skip
        self.farm = farm
        self.threads = threads
        self.tier, self.limit = tier, limit
        self.directories = list(directories or [ROOT] * shards)
        self.servers = [
            farm.start(threads, directory=where, tier=tier, limit=limit)
            for where in self.directories
        ]
        self.replaced = 0

    @property
    def count(self) -> int:
        return len(self.servers)

    def address(self, shard: int) -> str:
        return self.servers[shard][1]

    def kill(self, shard: int) -> None:
        self.farm.kill(self.servers[shard][0])

    def signal(self, shard: int, number: int) -> None:
        os.kill(self.servers[shard][0], number)

    @property
    def replaceable(self) -> bool:
        return True

    def gone(self, shard: int, life: str) -> bool:
        try:
            status = Path(f"/proc/{self.servers[shard][0]}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return status.rpartition(") ")[2].startswith("Z")

    def replace(self, shard: int, life: str) -> str:
        self.kill(shard)
        self.servers[shard] = self.farm.start(
            self.threads, directory=self.directories[shard], tier=self.tier, limit=self.limit
        )
        self.replaced += 1
        return self.address(shard)

    def close(self) -> None:
        """They serve the next cluster."""

    def end(self) -> None:
        for shard in range(self.count):
            self.kill(shard)


class OnFarm:
    """A cluster of servers that were started before; they serve one cluster after the other."""

    def __init__(self, farm: Farm, shards: int) -> None:
        self.hosts = FarmLauncher(farm, shards)

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> FlightCluster:
        from emberkeep.cluster.remote.flight_cluster import FlightCluster
        from emberkeep.runtime.pool import Pool

        return FlightCluster(tables, optimizer, self.hosts, seed=seed, pool=Pool(1))


def _serve(
    pipe: int, threads: int, port: int, kept: Sequence[Any] | None, limit: int | None
) -> None:
    from emberkeep.server.flight_server import ShardServer
    from emberkeep.server.shard_service import ShardService
    from emberkeep.tables import Tier
    from emberkeep.tiers import durable_open

    if limit is None:
        durable_open.SEGMENT_NBYTES = 32 * 1024
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    tier = None if kept is None else Tier(kept[0], memory=kept[1])
    server = ShardServer(ShardService(threads=threads, tier=tier), port=port)
    os.write(pipe, (server.address + "\n").encode())
    os.close(pipe)
    server.serve()


def _call(function: str, arguments: Sequence[str], log: str) -> int:
    """The rest of a process that calls a function; its exit code."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(*arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        traceback.print_exc()
        return int(getattr(error, "exit_code", 1))
    return 0


def _main() -> None:
    import pyarrow.flight  # noqa: F401

    import emberkeep.server.flight_server  # noqa: F401
    from emberkeep.server.server_warmup import warm_up

    warm_up()  # kernels are loaded once, here
    serve(sys.argv[1], _start_and_end)


def _start_and_end(questions: Questions) -> None:
    children: set[int] = set()
    for question in questions:
        if "kill" in question:
            if question["kill"] in children:
                os.kill(question["kill"], signal.SIGKILL)
                os.waitpid(question["kill"], 0)
                children.discard(question["kill"])
            questions.answer(None)
            continue
        if "ended" in question:
            pid, status = os.waitpid(question["ended"], os.WNOHANG)
            children.discard(pid)
            questions.answer(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        if "call" in question:
            pid = questions.fork()
            if pid == 0:
                os._exit(_call(question["call"], question["arguments"], question["log"]))
            children.add(pid)
            questions.answer(pid)
            continue
        reading, writing = os.pipe()
        pid = questions.fork()
        if pid == 0:
            os.close(reading)
            try:
                os.chdir(question["directory"])
                _serve(
                    writing,
                    question["threads"],
                    question["port"],
                    question["tier"],
                    question["limit"],
                )
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        os.close(writing)
        children.add(pid)
        with os.fdopen(reading) as pipe:
            questions.answer([pid, pipe.readline().strip()])
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()

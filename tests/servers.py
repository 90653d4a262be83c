"""Shard servers for tests: real processes, forked from one that has loaded everything already.

`Farm` starts `python -m tests.servers`, which loads once and forks a server for each request, or a
process that calls a function; one that is killed is really dead. `FarmLauncher` has the servers of
one cluster.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emberkeep.tables import Tier

ROOT = Path(__file__).parent.parent


class Farm:
    """Starts and ends servers."""

    def __init__(self) -> None:
        environment = {**os.environ, "EMBERKEEP_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.servers"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()

    def _ask(self, **question: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

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
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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
    gc.freeze()  # a server that collects garbage need not copy all that was loaded

    children: set[int] = set()
    for line in sys.stdin:
        question = json.loads(line)
        if "kill" in question:
            if question["kill"] in children:
                os.kill(question["kill"], signal.SIGKILL)
                os.waitpid(question["kill"], 0)
                children.discard(question["kill"])
            print("null", flush=True)
            continue
        if "ended" in question:
            pid, status = os.waitpid(question["ended"], os.WNOHANG)
            children.discard(pid)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        if "call" in question:
            pid = os.fork()
            if pid == 0:
                os._exit(_call(question["call"], question["arguments"], question["log"]))
            children.add(pid)
            print(pid, flush=True)
            continue
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            devnull = os.open(os.devnull, os.O_RDWR)
            os.dup2(devnull, 0)
            os.dup2(devnull, 1)
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
            print(json.dumps([pid, pipe.readline().strip()]), flush=True)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _main()

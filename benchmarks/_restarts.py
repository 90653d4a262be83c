"""A trainer that is killed and started again: what it does with servers that hold its rows.

Three ways from `connect` to the end of the first step, in a process that has imported and compiled
everything: rows are adopted; they go back to the newest version, after which fifty steps have
changed some; or servers were started again too, and load all of them. What servers say that they
did is checked.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import emberkeep as ek
from _common import criteo_batches
from emberkeep._types import RowIds
from emberkeep.cluster.remote.leases import let_go
from emberkeep.cluster.remote.processes import Connect, ProcessLauncher
from emberkeep.cluster.remote.remote_shard import RemoteShard
from emberkeep.cluster.remote.timing import Timing
from emberkeep.wire.security import Security

SHARDS, TABLES, DIM, BATCH = 4, 26, 64, 2048
ROW_NBYTES = 2 * 4 * DIM  # weight and accumulator


@dataclass(frozen=True, slots=True)
class Plan:
    """What is on each server, how often all ways are taken, how many steps follow the version and
    each adoption, and how long a server waits for a trainer that does not speak."""

    gigabytes: float
    rounds: int
    steps: int
    lease: timedelta


FULL = Plan(1.0, 3, 50, timedelta(seconds=10))
QUICK = Plan(1 / 32, 1, 5, timedelta(seconds=4))
# Each way, and what servers have to say that they did.
LOADS: dict[str, list[bool]] = {
    "adopt": [], "rewind": SHARDS * [True], "reload": SHARDS * [False]
}  # fmt: skip


class Trainer:
    """A DLRM whose rows are on servers, with its keeper."""

    def __init__(
        self, addresses: tuple[str, ...], security: Security, path: str, rows: int,
        batches: list[Any], lease: timedelta, on_restart: Any = "adopt",
    ) -> None:  # fmt: skip
        import torch

        from emberkeep.models import DLRM, DLRMShape

        where = Connect(
            addresses=addresses, security=security, timing=Timing(deadline=lease, lease=lease),
            on_restart=on_restart,
        )  # fmt: skip
        tables = [ek.Table(f"C{t}", rows=rows, dim=DIM) for t in range(TABLES)]
        self.bags = ek.EmbeddingBags(tables, optimizer=ek.Adagrad(lr=0.01), cluster=where, seed=0)
        shape = DLRMShape(bottom=(128, DIM), top=(128, 1))
        self.network = DLRM(self.bags, shape, features=TABLES, dense=13, seed=0)
        self._optimizers = [
            self.bags.optimizer,
            torch.optim.Adam(self.network.parameters(), lr=1e-3),
        ]
        self._batches = batches
        self._criterion = torch.nn.BCEWithLogitsLoss()
        self.keeper = ek.Keeper(
            path, self.network, self._optimizers, strategy=ek.incremental(every=10**9)
        )

    def step(self) -> None:
        dense, ids, labels = self._batches[self.keeper.steps % len(self._batches)]
        self._criterion(self.network(dense, ids), labels).backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.keeper.step()

    def fill(self, rows: int) -> None:
        """Trains every row once."""
        cluster, size = self.bags.cluster, 4096
        for start in range(0, rows, size):
            ids = np.arange(start, min(start + size, rows))
            wanted = RowIds(np.tile(ids, TABLES), np.arange(TABLES + 1) * ids.size)
            cluster.push([wanted], [np.full((wanted.ids.size, DIM), 0.1, np.float32)], lr=0.01)

    def leave(self) -> None:
        """As if killed, but for the lease: the next trainer need not wait for it."""
        cluster: Any = self.bags.cluster
        let_go(cluster._leases, cluster.handles, True)
        cluster._finalizer.detach()


def first_trainer(
    addresses: tuple[str, ...], security: Security, path: str, rows: int, plan: Plan, heard: Any
) -> None:
    """Fills the tables, saves a version, trains on and waits to be killed."""
    warnings.simplefilter("ignore")
    trainer = Trainer(addresses, security, path, rows, batches_of(rows), plan.lease)
    trainer.fill(rows)
    assert trainer.keeper.resume() is None
    trainer.keeper.save()
    assert trainer.keeper.wait() is not None, "there is nothing to go back to"
    heard.put("saved")
    for _ in range(plan.steps):
        trainer.step()
    heard.put("trained")
    time.sleep(600)


def batches_of(rows: int) -> list[Any]:
    names = [f"C{t}" for t in range(TABLES)]
    return criteo_batches(names, rows=rows, batch=BATCH, dense=13, count=64)


class Loads:
    """What servers say that they have loaded: True where unchanged rows stayed."""

    def __init__(self) -> None:
        self._rewound: list[bool] = []
        until_done = RemoteShard.until_done

        def noted(shard: RemoteShard, kind: str, *given: Any) -> Any:
            answer = until_done(shard, kind, *given)
            if kind == "load":
                self._rewound.append(answer["rewound"])
            return answer

        self._until_done = until_done
        RemoteShard.until_done = noted  # type: ignore[method-assign]

    def close(self) -> None:
        RemoteShard.until_done = self._until_done  # type: ignore[method-assign]

    def take(self) -> list[bool]:
        rewound, self._rewound = self._rewound, []
        return rewound


def process_start_seconds() -> float:
    """Of an interpreter that imports what a trainer needs."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import torch, emberkeep as ek, emberkeep.models; ek.Keeper"],
        check=True,
    )
    return time.perf_counter() - start


def restarts(hosts: ProcessLauncher, plan: Plan, say: Callable[[str], None]) -> dict[str, float]:
    """Median seconds of each way."""
    rows = int(plan.gigabytes * 2**30 * SHARDS / ROW_NBYTES / TABLES)
    batches, taken = batches_of(rows), {how: list[float]() for how in LOADS}
    loads = Loads()
    directory = tempfile.mkdtemp(prefix="emberkeep-restarts-")
    try:
        path = f"{directory}/run"

        def addresses() -> tuple[str, ...]:
            return tuple(hosts.address(shard) for shard in range(SHARDS))

        say(f"a trainer fills {TABLES * rows * ROW_NBYTES / 2**30:.2f} GB of rows")
        context = multiprocessing.get_context("spawn")
        heard = context.Queue()
        given = (addresses(), hosts.security, path, rows, plan, heard)
        process = context.Process(target=first_trainer, args=given)
        process.start()
        try:
            for _ in range(2):
                say(heard.get(timeout=500))
        finally:
            process.kill()
            process.join()
        time.sleep(1.2 * plan.lease.total_seconds())
        for turn in range(-1, plan.rounds):  # the first warms this process up
            for how in LOADS:
                if how == "reload":
                    if turn < 0:
                        continue  # it has nothing that a rewind has not warmed up
                    with ThreadPoolExecutor(SHARDS) as threads:
                        list(threads.map(lambda shard: hosts.replace(shard, ""), range(SHARDS)))
                start = time.perf_counter()
                chosen = "adopt" if how == "adopt" else "rewind"
                trainer = Trainer(
                    addresses(), hosts.security, path, rows, batches, plan.lease, chosen
                )
                kept = trainer.keeper.resume()
                trainer.step()
                seconds = time.perf_counter() - start
                assert kept is not None, "there was nothing to go on from"
                assert loads.take() == LOADS[how], f"{how} is not what servers did"
                say(f"{how}: {seconds:.2f} s")
                if turn >= 0:
                    taken[how].append(seconds)
                if how == "adopt":
                    for _ in range(plan.steps):
                        trainer.step()
                trainer.leave()
    finally:
        loads.close()
        with suppress(OSError):
            shutil.rmtree(Path(directory))
    return {how: statistics.median(times) for how, times in taken.items()}

"""Servers behind lines that are cut: runs that must end as if nothing had happened.

`Rig` has real server processes, each behind a `Proxy`. `train` trains over them as `ek.connect`
would, with a keeper; faults begin after a step and end after so many seconds, while training waits.
`python -m tests.faults.partitions [SECONDS ...]` prints the table of docs/cluster.md.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from emberkeep._types import RowIds
from emberkeep.blobs import LocalStore
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.repository import Repository
from emberkeep.runtime import pool
from emberkeep.tables import SGD, Table
from emberkeep.testing.proxy import Proxy
from emberkeep.train import build
from emberkeep.train.hooks import Hook
from emberkeep.train.loop import run
from emberkeep.train.result import Result
from emberkeep.train.run_config import demo
from emberkeep.wire.security import Security
from tests.servers import Farm

SHARDS = 3
SMALL = [
    "data.samples=1600", "data.rows_total=1000", "run.batch_size=100", "run.compare=false",
    "model.bottom=[8]", "model.top=[8]", "tables.dim=4", f"cluster.shards={SHARDS}",
]  # fmt: skip
STRATEGIES = {"full": "full", "partial": "partial", "parity": "full"}
"""By name: the scope of recoveries from the repository."""
PARITY = Parity(k=2, r=1)
EVERY = 3
FAULT_AT = 8  # two steps after a version
SECOND = timedelta(seconds=1)
SCALED = Timing(deadline=SECOND, lease=SECOND, patience=60 * SECOND)


class Rig:
    """Server processes, each behind a line. With `replaceable` a server that stays silent is ended
    and replaced at another address, as `ek.servers` and Ray do; else its address stays, as with
    `ek.connect`."""

    def __init__(self, farm: Farm, shards: int = SHARDS, *, replaceable: bool = False) -> None:
        self._farm = farm
        self._replaceable = replaceable
        self.servers = [farm.start() for _ in range(shards)]
        self.lines = [Proxy(address) for _, address in self.servers]
        self._former: list[Proxy] = []
        self.cluster: FlightCluster | None = None

    def launcher(self, timing: Timing) -> Any:
        if self._replaceable:
            return _Replacing(self)
        return FixedAddresses(
            [line.address for line in self.lines], Security(), patience=timing.patience
        )

    def kill(self, shard: int) -> None:
        self._farm.kill(self.servers[shard][0])

    def signal(self, shard: int, number: int) -> None:
        os.kill(self.servers[shard][0], number)

    def restart(self, shard: int) -> None:
        """Another process takes the place of the server, behind the same line."""
        self.kill(shard)
        self.servers[shard] = self._farm.start()
        self.lines[shard].point(self.servers[shard][1])

    def replace(self, shard: int) -> None:
        """Another process takes the place of the server, behind another line."""
        self.kill(shard)
        self.servers[shard] = self._farm.start()
        self._former.append(self.lines[shard])
        self.lines[shard] = Proxy(self.servers[shard][1])

    def close(self) -> None:
        for line in (*self.lines, *self._former):
            line.close()
        for shard in range(len(self.servers)):
            self.kill(shard)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Replacing:
    """The launcher of a rig whose servers are replaced."""

    replaceable = True

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    @property
    def count(self) -> int:
        return len(self._rig.lines)

    def address(self, shard: int) -> str:
        return self._rig.lines[shard].address

    def gone(self, shard: int, life: str) -> bool:
        return False

    def replace(self, shard: int, life: str) -> str:
        self._rig.replace(shard)
        return self.address(shard)

    def close(self) -> None:
        """The rig has the servers."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a shard's server or line, and what ends it."""

    seconds: float
    begin: Callable[[Rig], object]
    end: Callable[[Rig], object]


def line_fault(shard: int, seconds: float, *calls: Callable[[Proxy], object]) -> Fault:
    def begin(rig: Rig) -> None:
        for call in calls:
            call(rig.lines[shard])

    return Fault(seconds, begin, lambda rig: rig.lines[shard].heal())


def stop_fault(shard: int, seconds: float) -> Fault:
    """SIGSTOP, and SIGCONT."""
    return Fault(
        seconds,
        lambda rig: rig.signal(shard, signal.SIGSTOP),
        lambda rig: rig.signal(shard, signal.SIGCONT),
    )


def restart_fault(shard: int, seconds: float) -> Fault:
    """The line is cut, and behind it another process takes the server's place."""

    def begin(rig: Rig) -> None:
        rig.lines[shard].cut()
        rig.restart(shard)

    return Fault(seconds, begin, lambda rig: rig.lines[shard].heal())


@dataclass
class Trouble(Hook):
    """Lets faults happen after a step, and notes what is seen of them."""

    rig: Rig
    faults: Sequence[Fault]
    at: int = FAULT_AT
    heard: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    began: float = math.nan
    ended: float = math.nan
    noticed: float = math.nan
    served: float = math.nan
    epochs: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]
    _threads: list[threading.Thread] = field(default_factory=list)

    def on_step(self, step: Any) -> None:
        cluster = self.rig.cluster
        assert cluster is not None
        if step.number == self.at and not self._threads:
            self.epochs = ([shard.epoch for shard in cluster.handles], [])
            self.began = time.monotonic()
            self._threads = [
                threading.Thread(target=self._let_happen, args=(fault,)) for fault in self.faults
            ]
            for fault in self.faults:
                fault.begin(self.rig)
            for thread in self._threads:
                thread.start()
        elif self._threads and math.isnan(self.served):
            self.served = time.monotonic()
        if step.number == step.steps:
            for thread in self._threads:
                thread.join()
            self.epochs = (self.epochs[0], [shard.epoch for shard in cluster.handles])

    def _let_happen(self, fault: Fault) -> None:
        cluster = self.rig.cluster
        assert cluster is not None
        until = self.began + fault.seconds
        while (now := time.monotonic()) < until:
            if math.isnan(self.noticed) and cluster.lost():
                self.noticed = now
            time.sleep(min(0.005, until - now))
        fault.end(self.rig)
        if fault.seconds == max(each.seconds for each in self.faults):
            self.ended = time.monotonic()

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        self.heard.append((event, details))

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return [details for event, details in self.heard if event == "recovered"]


@dataclass(frozen=True, slots=True)
class _Spec:
    rig: Rig
    timing: Timing
    parity: Parity | None

    def open(self, tables: Any, optimizer: Any, *, seed: int) -> FlightCluster:
        self.rig.cluster = FlightCluster(
            tables, optimizer, self.rig.launcher(self.timing), seed=seed, pool=pool.Pool(1),
            timing=self.timing, parity=self.parity,
        )  # fmt: skip
        return self.rig.cluster


def train(
    rig: Rig, strategy: str, where: Path, faults: Sequence[Fault], timing: Timing
) -> tuple[Result, Trouble]:
    """A small run over the servers of a rig, with faults in it."""
    trouble = Trouble(rig, faults)
    settings = demo(
        [*SMALL, f"checkpoint.path={where}", f"checkpoint.every={EVERY} steps",
         "checkpoint.keep=1000", f"checkpoint.recovery={STRATEGIES[strategy]}"]
    )  # fmt: skip
    spec = _Spec(rig, timing, PARITY if strategy == "parity" else None)
    with _clusters_of(spec):
        result = run(settings, hooks=[trouble])
    assert rig.cluster is not None
    rig.cluster.close()
    return result, trouble


@contextmanager
def _clusters_of(spec: _Spec) -> Iterator[None]:
    before = build._cluster
    build._cluster = lambda *_: spec
    try:
        yield
    finally:
        build._cluster = before


def undisturbed() -> Result:
    return run(demo(SMALL))


def expected_pls(where: Path, recoveries: Sequence[dict[str, Any]], steps: int) -> float:
    """What partial recoveries have taken from a model, counted from the versions themselves."""
    repository = Repository.open(LocalStore(where))
    pls, last = 0.0, dict.fromkeys(range(SHARDS), 0)
    for event in recoveries:
        if event["scope"] != "partial":
            continue
        saved = repository.manifest(repository.version(event["version"])).step
        for shard in event["shards"]:
            pls += max(0, event["step"] - max(saved, last[shard])) / (steps * SHARDS)
            last[shard] = event["step"]
    return pls


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a partition did to a run."""

    strategy: str
    seconds: float
    replaceable: bool
    bits: bool
    pls: float
    exact: bool
    rows_kept: bool
    seconds_to_notice: float
    seconds_to_serve: float

    @property
    def noticed(self) -> str:
        return "no" if math.isnan(self.seconds_to_notice) else f"{self.seconds_to_notice:.1f} s"

    @property
    def survived(self) -> bool:
        return self.exact and (self.bits or self.pls > 0)


def outcome(
    farm: Farm, strategy: str, seconds: float, digest: str, *,
    replaceable: bool = False, timing: Timing | None = None,
) -> Outcome:  # fmt: skip
    """One server is cut off for so long, in a run of its own."""
    with (
        tempfile.TemporaryDirectory() as where,
        Rig(farm, replaceable=replaceable) as rig,
    ):
        fault = line_fault(1, seconds, Proxy.cut)
        result, trouble = train(rig, strategy, Path(where) / "r", [fault], timing or Timing())
        assert result.recoveries is not None
        counted = expected_pls(Path(where) / "r", trouble.recoveries, result.steps)
        return Outcome(
            strategy=strategy,
            seconds=seconds,
            replaceable=replaceable,
            bits=result.digest == digest,
            pls=result.recoveries.pls,
            exact=math.isclose(result.recoveries.pls, counted, abs_tol=1e-12),
            rows_kept=trouble.epochs[0] == trouble.epochs[1],
            seconds_to_notice=trouble.noticed - trouble.began,
            seconds_to_serve=trouble.served - trouble.began,
        )


def pushes(farm: Farm, count: int, seed: int = 1) -> tuple[int, int, int]:
    """Pushes over lines that lose answers, and are reset and cut: how many of their updates are
    lost, how many were applied twice, and how often lines were disturbed."""
    tables = [Table("t", rows=SHARDS * count, dim=1)]
    chance = Random(seed)
    timers: list[threading.Timer] = []
    with Rig(farm) as rig:
        cluster = FlightCluster(
            tables, SGD(lr=1.0), rig.launcher(SCALED), pool=pool.Pool(1), timing=SCALED
        )
        ids = np.arange(SHARDS * count)
        before = cluster.read("t", ids)["weight"]
        for number in range(count):
            line = chance.choice(rig.lines)
            trouble = chance.choice((line.lose_answer, line.reset, line.cut, None))
            if trouble is not None and chance.random() < 0.3:
                trouble()
                timer = threading.Timer(chance.uniform(0.0, 0.05), line.heal)
                timer.start()
                timers.append(timer)
            own = ids[number * SHARDS : (number + 1) * SHARDS]  # one row of each shard
            grads = np.ones((SHARDS, 1), np.float32)
            cluster.push([RowIds(own, np.array([0, SHARDS]))], [grads], lr=1.0)
        for timer in timers:
            timer.join()
        applied = np.rint(before - cluster.read("t", ids)["weight"])
        cluster.close()
    return int((applied < 1).sum()), int((applied > 1).sum()), len(timers)


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| cut off for | another server | strategy | rows | bits | PLS | noticed | served |",
        "|--:|---|---|---|---|---|--:|--:|",
    ]
    for each in outcomes:
        pls = f"{each.pls:.4f}" if each.pls else "0"
        lines.append(
            f"| {each.seconds:g} s | {'yes' if each.replaceable else 'no'} | {each.strategy} "
            f"| {'kept' if each.rows_kept else 'recovered'} | {'equal' if each.bits else 'other'} "
            f"| {pls}, {'exact' if each.exact else 'WRONG'} | {each.noticed} "
            f"| {each.seconds_to_serve:.1f} s |"
        )
    return "\n".join(lines)


def main() -> None:
    given = [float(word) for word in sys.argv[1:]] or [5.0, 15.0, 30.0, 120.0]
    digest = undisturbed().digest
    farm = Farm()
    outcomes = []
    for seconds in given:
        for replaceable in (False, True):
            for strategy in STRATEGIES:
                found = outcome(farm, strategy, seconds, digest, replaceable=replaceable)
                print(found, file=sys.stderr, flush=True)
                outcomes.append(found)
    farm.close()
    print(table(outcomes))


if __name__ == "__main__":
    main()

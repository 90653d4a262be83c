"""A night of a job in minutes: servers and workers are killed, stopped and cut off, the disk fills
up, and the job goes on until it ends by itself.

Two ranks train together on servers behind lines (`Proxy`), as `ek.connect` would; who is dead is
started again, as a supervisor would, and both ranks resume the newest version together. Each step
changes a row of its own on every shard, its *witness*: afterwards these rows say which step is in
which shard, and a replay of just those steps must give every row, bit for bit. Full recovery and
parity must have all steps everywhere, partial recovery all but what its PLS counts.

`Night` is the supervisor and the trouble; `work` is a rank, in a process forked by a `Farm`.
"""

from __future__ import annotations

import errno
import faulthandler
import heapq
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from emberkeep._types import I64, RowIds
from emberkeep.blobs import LocalStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.checkpoint.recovery import Home, Losses, Recovery, plan, recover_partially
from emberkeep.checkpoint.save import Extras
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.launcher import FixedAddresses
from emberkeep.cluster.remote.timing import Timing
from emberkeep.erasure.codes import Parity
from emberkeep.errors import (
    DeadlineError,
    EpochError,
    FencedError,
    PeerError,
    RankError,
    RecoveryError,
    SaveError,
    ServerError,
    ShardLostError,
    StorageError,
)
from emberkeep.kernels import hash_index
from emberkeep.repository import KeepLast, Repository, verify
from emberkeep.repository.policies import LAYOUTS, Grid
from emberkeep.runtime import pool
from emberkeep.tables import Adagrad, Table
from emberkeep.testing.proxy import Proxy
from emberkeep.wire.security import Security
from tests.faults.findings import HangError, WrongRowsError
from tests.servers import Farm

SHARDS, RANKS = 4, 2
MOST_STEPS = 40_000
FIXED_ROWS, DIM = 200, 4
TABLES = [
    Table("fixed", rows=FIXED_ROWS, dim=DIM),
    Table("witness", rows=(MOST_STEPS + 1) * SHARDS, dim=DIM),
    Table("dynamic", rows=None, capacity=4000, dim=DIM),
]
OPTIMIZER = Adagrad(lr=0.1)
NAMES = {table.name: table.name for table in TABLES}
TIMING = Timing(
    deadline=timedelta(seconds=1.5), lease=timedelta(seconds=2), patience=timedelta(seconds=60)
)
LEASE = TIMING.lease.total_seconds()
STRATEGIES = ("full", "partial", "parity")
EVERY = 10  # steps between versions
PACE_SECONDS = 0.01
DISK_MIB = 24
# A rank that ends with one of these is started again: something that it needs was not there.
TRANSIENT = (
    ShardLostError, ServerError, PeerError, EpochError, RankError, RecoveryError, DeadlineError,
    SaveError, StorageError, FencedError,
)  # fmt: skip
# Twice the patience: somebody waits for who is waited for.
HANGS_AFTER = 2 * TIMING.patience.total_seconds() + 30

Batch = dict[str, tuple[I64, Any]]


# -- what is trained -------------------------------------------------------------------------------


def part_of(seed: int, step: int, rank: int) -> Batch:
    """A rank's part of a step: ids and gradients by table. Whole and even numbers: means over two
    ranks are exact, in whatever order they are added."""
    chance = np.random.default_rng([seed, step, rank])
    part: Batch = {}
    for table, ids in (("fixed", FIXED_ROWS), ("dynamic", 2000)):
        chosen = np.sort(chance.choice(ids, 16, replace=False)).astype(np.int64)
        part[table] = chosen, 2 * chance.integers(-4, 5, (16, DIM)).astype(np.float32)
    own = np.arange(step * SHARDS, (step + 1) * SHARDS)[rank::RANKS].astype(np.int64)
    part["witness"] = own, np.full((own.size, DIM), 2, np.float32)
    return part


def packed(cluster: Any, batch: Batch) -> tuple[list[RowIds], list[Any]]:
    """As a cluster wants it: slab by slab, tables in order."""
    wanted, grads = [], []
    for group in cluster.groups:
        parts = [batch[cluster.tables[t].name] for t in group]
        offsets = np.cumsum([0, *(ids.size for ids, _ in parts)])
        wanted.append(RowIds(np.concatenate([ids for ids, _ in parts]), offsets))
        grads.append(np.concatenate([values for _, values in parts]))
    return wanted, grads


def owner_of(table: str, ids: I64) -> I64:
    """The shard of each row."""
    dynamic = np.array([table == "dynamic"])
    counts_ST = np.zeros((SHARDS, 1), np.int64)
    order = np.empty(ids.size, np.int64)
    hash_index.route(ids, np.array([0, ids.size]), dynamic, SHARDS, counts_ST, order)
    owners = np.empty(ids.size, np.int64)
    owners[order] = np.repeat(np.arange(SHARDS), counts_ST[:, 0])
    return owners


def rows_of(cluster: Any) -> dict[str, Any]:
    """All rows that were trained, by table and plane, in the order of their ids."""
    held = {}
    for table in TABLES:
        ids, planes = cluster.read_all(table.name)
        order = np.argsort(ids)
        held[f"{table.name}/"] = ids[order]
        held.update({f"{table.name}/{plane}": values[order] for plane, values in planes.items()})
    return held


def replayed(seed: int, steps_S: Sequence[set[int]]) -> dict[str, Any]:
    """What shards hold that have applied these steps, each once and in order."""
    twin = local(shards=1, threads=1).open(TABLES, OPTIMIZER, seed=1)
    for step in sorted(set().union(*steps_S)):
        applied_S = np.array([step in steps for steps in steps_S])
        parts = [part_of(seed, step, rank) for rank in range(RANKS)]
        batch: Batch = {}
        for table in NAMES:
            ids, inverse = np.unique(
                np.concatenate([part[table][0] for part in parts]), return_inverse=True
            )
            sums = np.zeros((ids.size, DIM), np.float32)
            np.add.at(sums, inverse, np.concatenate([part[table][1] for part in parts]))
            own = applied_S[owner_of(table, ids)]
            batch[table] = ids[own], sums[own] / np.float32(RANKS)
        wanted, grads = packed(twin, batch)
        twin.push(wanted, grads, lr=0.1)
    held = rows_of(twin)
    twin.close()
    return held


def witnessed(rows: dict[str, Any]) -> list[set[int]]:
    """By shard, the steps that it has applied."""
    ids = rows["witness/"]
    return [set((ids[ids % SHARDS == shard] // SHARDS).tolist()) for shard in range(SHARDS)]


# -- a rank ----------------------------------------------------------------------------------------


class Rank:
    """One process of the job, from its start to its end or the next failure that needs both."""

    def __init__(self, where: Path, given: dict[str, Any]) -> None:
        self.where, self.given = where, given
        self.rank, self.strategy = given["rank"], given["strategy"]
        self.losses = Losses()
        self.step = 0
        self.keeper: Checkpointer | None = None

    def run(self) -> None:
        if self.rank:
            self.step = int(self._wait_for(f"round-{self.given['round']}"))
        self.cluster = FlightCluster(
            TABLES, OPTIMIZER,
            FixedAddresses(self.given["addresses"], Security(), patience=TIMING.patience),
            seed=1, pool=pool.Pool(1), timing=TIMING, rank=self.rank, world=RANKS,
            coordinate=self.rank == 0,
            parity=Parity(k=2, r=1) if self.strategy == "parity" else None,
        )  # fmt: skip
        if self.rank == 0:
            self._resume()
        while self.step < self._last():
            self._train()
        if self.rank == 0:
            self._finish()
        else:
            self._say(f"done-{self.given['round']}", "")
        self.cluster.close()

    def _resume(self) -> None:
        store = LocalStore(self.where / "disk" / "repository")
        if not Repository.exists(store):
            Repository.create(store, schema=self.cluster.schema())
        layout = self.given["layout"]
        self.keeper = Checkpointer(
            Repository.open(store), self.cluster,
            spec=VersionSpec(layout=layout, grid=Grid(ratio=0.1) if layout == "grid" else None),
            settings=SaveSettings(
                retention=KeepLast(n=3), grace=timedelta(0), threads=1, nice=0, max_failures=1000
            ),
        )  # fmt: skip
        restored = self.keeper.restore()
        if restored is not None:
            self.step = restored.manifest.step
            self.losses = Losses.from_dict(restored.manifest.counters)
        self.cluster.on_loss = self._on_loss
        self._say(f"round-{self.given['round']}", str(self.step))

    def _train(self) -> None:
        part = part_of(self.given["seed"], self.step + 1, self.rank)
        wanted, grads = packed(self.cluster, part)
        self.cluster.pull(wanted)
        self.cluster.push(wanted, grads, lr=0.1)
        self.step += 1
        if self.keeper is None:
            return
        if self.step % 5 == 0:
            self._say("progress", str(self.step))
        if self.step % EVERY == 0:
            self._save()
        time.sleep(PACE_SECONDS)

    def _save(self) -> None:
        assert self.keeper is not None
        try:
            self.keeper.save(self.step, Extras(counters=self.losses.to_dict()))
        except (SaveError, StorageError):  # the disk is full: a later one has room
            pass
        except ShardLostError as lost:
            if not self._on_loss(lost):
                raise

    def _on_loss(self, _: ShardLostError) -> bool:
        """A full recovery ends both ranks; they resume together."""
        assert self.keeper is not None
        while lost := self.cluster.lost():
            self.keeper.learn_outcome()
            whole = self.keeper.whole
            decided = plan(
                Recovery(scope="partial" if self.strategy == "partial" else "full"), self.losses,
                lost, shards=SHARDS, step=self.step, saved=None if whole is None else whole.step,
                total=MOST_STEPS,
            )  # fmt: skip
            if decided.scope == "full":
                return False
            self.losses = decided.losses  # before: some may serve when it is interrupted
            try:
                recover_partially(self.keeper, Home(self.cluster, NAMES), lost)
            except ShardLostError:
                continue
            print(f"{lost} recovered after step {self.step}: PLS {self.losses.pls}", flush=True)
        return True

    def _finish(self) -> None:
        assert self.keeper is not None
        self._wait_for(f"done-{self.given['round']}")
        rows = rows_of(self.cluster)
        self.keeper.close(self.step, Extras(counters=self.losses.to_dict()))
        np.savez(self.where / "rows.npz", **rows)
        self._say("result", json.dumps({"step": self.step, "pls": self.losses.pls}))

    def _last(self) -> int:
        """The step that ends the job: decided once, by the first rank."""
        try:
            return int((self.where / "last").read_text())
        except FileNotFoundError:
            if self.rank == 0 and (self.where / "stop").exists():
                # The other rank is at most one step ahead.
                self._say("last", str(min(MOST_STEPS, self.step + 2)))
        return MOST_STEPS

    def _say(self, name: str, content: str) -> None:
        draft = self.where / f".{name}.{os.getpid()}"
        draft.write_text(content)
        draft.rename(self.where / name)

    def _wait_for(self, name: str) -> str:
        until = time.monotonic() + 2 * TIMING.patience.total_seconds()
        while not (self.where / name).exists():
            if time.monotonic() > until:
                raise RankError(f"the other rank does not come: {name}")
            time.sleep(0.02)
        return (self.where / name).read_text()


def work(where: str, options: str) -> None:
    """The life of one rank."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")
    Rank(Path(where), json.loads(options)).run()


# -- the supervisor, and the trouble ---------------------------------------------------------------


class Night:
    """One job, from dusk to dawn."""

    def __init__(self, farm: Farm, disk: SmallDisk, where: Path, seed: int, strategy: str) -> None:
        self.farm, self.disk, self.where = farm, disk, where
        self.seed, self.strategy = seed, strategy
        self.chance = random.Random(f"{seed} {strategy}")
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self._start = time.monotonic()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self.servers = [farm.start() for _ in range(SHARDS)]
        self.lines = [Proxy(address) for _, address in self.servers]
        self.ranks: list[int] = []
        self._round = 0
        self._progress = (-1, self._start)

    # -- the supervisor --------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Trouble for so long; then the job must end by itself, with the right rows."""
        self._start_ranks()
        dawn = time.monotonic() + seconds
        self._after(2.0, self._trouble)
        while self.ranks:
            now = time.monotonic()
            if now > dawn and not (self.where / "stop").exists():
                self._dawn()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self._look_at_ranks()
            self._look_at_progress()
            time.sleep(0.02)
        self._judge()

    def close(self) -> None:
        for rank in self.ranks:
            self.farm.kill(rank)
        for pid, _ in self.servers:
            self.farm.kill(pid)
        for line in self.lines:
            line.close()

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), call))

    def _note(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self._start:7.2f} {what}")

    def _start_ranks(self) -> None:
        self._round += 1
        options = {
            "addresses": [line.address for line in self.lines], "strategy": self.strategy,
            "seed": self.seed, "round": self._round, "layout": self.chance.choice(LAYOUTS),
        }  # fmt: skip
        self.ranks = [
            self.farm.call(
                "tests.faults.night:work", str(self.where), json.dumps({**options, "rank": rank}),
                log=self.where / f"rank-{rank}.log",
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        self._note(f"round {self._round}")

    def _look_at_ranks(self) -> None:
        codes = {rank: self.farm.ended(pid) for rank, pid in enumerate(self.ranks) if pid}
        for rank, code in codes.items():
            if code == 0:
                self.ranks[rank] = 0
        if not any(self.ranks):
            self.ranks = []
            return
        failed = {rank: code for rank, code in codes.items() if code}
        if not failed:
            return
        for rank, code in failed.items():
            self.ranks[rank] = 0
            self._note(f"rank {rank} has ended with {code}")
            self.counts[f"ranks ended with {code}"] += 1
            if code != -signal.SIGKILL and code not in {kind.exit_code for kind in TRANSIENT}:
                raise AssertionError(self._report(f"rank {rank} ended with {code}"))
        for pid in self.ranks:
            if pid:
                self.farm.kill(pid)
        self._start_ranks()

    def _look_at_progress(self) -> None:
        try:
            step = int((self.where / "progress").read_text())
        except FileNotFoundError:
            step = 0
        now = time.monotonic()
        if step != self._progress[0]:
            self._progress = (step, now)
        elif now - self._progress[1] > HANGS_AFTER:
            for pid in self.ranks:
                if pid:
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(1)  # they write down where they are
            raise HangError(self._report(f"no step since step {step}"))

    def _report(self, what: str) -> str:
        logs = "".join(
            f"\n--- rank {rank}\n" + (self.where / f"rank-{rank}.log").read_text()[-4000:]
            for rank in range(RANKS)
        )
        return f"seed {self.seed}, {self.strategy}: {what}\n" + "\n".join(self.story[-40:]) + logs

    # -- trouble ---------------------------------------------------------------------------------

    def _trouble(self) -> None:
        if (self.where / "stop").exists():
            return
        kinds: list[tuple[int, Callable[[], str]]] = [
            (3, self._kill_server), (3, self._stop_server), (5, self._disturb_line),
            (2, self._kill_rank), (2, self._stop_rank), (2, self._fill_disk),
        ]  # fmt: skip
        weights, calls = zip(*kinds, strict=True)
        what = self.chance.choices(calls, weights)[0]()
        self._note(what)
        self.counts[what.split(" of ")[0]] += 1
        self._after(self.chance.uniform(0.2, 4.0), self._trouble)

    def _kill_server(self) -> str:
        shard = self.chance.randrange(SHARDS)
        self.farm.kill(self.servers[shard][0])
        self._after(self.chance.uniform(0, LEASE), lambda: self._restart(shard))
        return f"server killed of shard {shard}"

    def _restart(self, shard: int) -> None:
        self.farm.kill(self.servers[shard][0])  # one that was started meanwhile, or nothing
        self.servers[shard] = self.farm.start()
        self.lines[shard].point(self.servers[shard][1])
        self._note(f"another server for shard {shard}")

    def _stop_server(self) -> str:
        shard = self.chance.randrange(SHARDS)
        return f"server stopped of shard {shard}, " + self._pause(self.servers[shard][0])

    def _pause(self, pid: int) -> str:
        seconds = self.chance.uniform(0.1, 2.5) * LEASE
        if not _signalled(pid, signal.SIGSTOP):
            return "which was gone"
        self._after(seconds, lambda: _signalled(pid, signal.SIGCONT))
        return f"{seconds:.1f} s"

    def _disturb_line(self) -> str:
        shard = self.chance.randrange(SHARDS)
        line, seconds = self.lines[shard], self.chance.uniform(0.1, 2.5) * LEASE
        delay = timedelta(seconds=self.chance.uniform(0.001, 0.1))
        name, disturb = self.chance.choice(
            [
                ("cut", line.cut), ("requests cut", lambda: line.cut("requests")),
                ("answers cut", lambda: line.cut("answers")), ("blackhole", line.blackhole),
                ("half-open", line.half_open), ("reset", line.reset),
                ("delay", lambda: line.delay(delay)), ("answer lost", line.lose_answer),
            ]
        )  # fmt: skip
        disturb()
        self._after(seconds, line.heal)
        return f"line, {name}, of shard {shard}, {seconds:.1f} s"

    def _kill_rank(self) -> str:
        rank = self.chance.randrange(RANKS)
        if self.ranks[rank]:
            os.kill(self.ranks[rank], signal.SIGKILL)
        return f"worker killed of rank {rank}"

    def _stop_rank(self) -> str:
        rank = self.chance.randrange(RANKS)
        pid = self.ranks[rank]
        return f"worker stopped of rank {rank}, " + (self._pause(pid) if pid else "which was gone")

    def _fill_disk(self) -> str:
        if not self.disk.mounted:
            return "disk left alone, for want of a small one,"
        filler = self.where / "disk" / "filler"
        try:
            with open(filler, "ab", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        self._after(self.chance.uniform(0.2, 3.0), lambda: filler.unlink(missing_ok=True))
        return "disk full of something"

    def _dawn(self) -> None:
        """All is well again."""
        self._note("dawn")
        (self.where / "stop").touch()
        for _, _, call in sorted(self._due, key=lambda one: one[:2]):
            call()
        self._due.clear()
        for line in self.lines:
            line.heal()

    # -- judgement -------------------------------------------------------------------------------

    def _judge(self) -> None:
        result = json.loads((self.where / "result").read_text())
        step, pls = result["step"], result["pls"]
        with np.load(self.where / "rows.npz") as saved:
            rows = dict(saved)
        steps_S = witnessed(rows)
        every = set(range(1, step + 1))
        missing = sum(len(every - steps) for steps in steps_S)
        expected = replayed(self.seed, steps_S)
        self.counts.update({"steps": step, "rounds": self._round, "updates lost": missing})
        self._same(rows, expected, "the servers")
        if any(steps - every for steps in steps_S):
            raise WrongRowsError(self._report("a step was applied that no rank has made"))
        if self.strategy == "partial":
            counted = pls * MOST_STEPS * SHARDS
            if abs(counted - missing) > 1e-6:
                raise WrongRowsError(self._report(f"{missing} updates are lost, PLS has {counted}"))
        elif missing:
            raise WrongRowsError(self._report(f"{missing} updates are lost"))
        repository = Repository.open(LocalStore(self.where / "disk" / "repository"))
        if not verify(repository).ok:
            raise WrongRowsError(self._report("a healthy repository is called damaged"))
        again = local(shards=2, threads=1).open(TABLES, OPTIMIZER, seed=1)
        restored = Checkpointer(repository, again).restore()
        assert restored is not None
        self._same(rows_of(again), expected, f"version {restored.manifest.version}")
        again.close()

    def _same(self, rows: dict[str, Any], expected: dict[str, Any], whose: str) -> None:
        for name, values in expected.items():
            if rows[name].shape != values.shape:
                raise WrongRowsError(
                    self._report(f"{whose}: {len(rows[name])} of {len(values)} rows in {name}")
                )
            if rows[name].tobytes() != values.tobytes():
                differ = np.flatnonzero((rows[name] != values).reshape(len(values), -1).any(1))
                ids = expected[name.partition("/")[0] + "/"][differ]
                raise WrongRowsError(self._report(f"{whose}: rows {ids} of {name} are wrong"))


def _signalled(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class SmallDisk:
    """A file system of its own that can fill up; a plain directory where none may be mounted."""

    def __init__(self, where: Path) -> None:
        self._where = where
        where.mkdir()
        given = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "emberkeep-night", str(where)]
        self.mounted = subprocess.run(given, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self._where)], check=True)


def night(where: Path, seed: int, strategy: str, seconds: float) -> Counter[str]:
    """What happened; raises if the job did not end as it must."""
    farm = Farm()
    disk = SmallDisk(where / "disk")
    job = Night(farm, disk, where, seed, strategy)
    try:
        job.run(seconds)
    finally:
        job.close()
        disk.close()
        farm.close()
    return job.counts


def main() -> None:
    import tempfile

    seed, strategy, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    with tempfile.TemporaryDirectory() as where:
        print(dict(night(Path(where), seed, strategy, seconds)))


if __name__ == "__main__":
    main()

"""A soak with real processes, after RocksDB's db_stress: lives that are killed, stopped and run
out of disk, over a repository and a tier that both outlive them.

What a run holds after step n follows from the seed and n alone. So every life knows what it must
find: it writes the digest of each step that it is about to save to a file of its own, and each
version that was acknowledged to another; the next life, with other options, holds what comes back
against them. `run` is the parent; `live` is one life, in a process forked by a `Nursery`.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from emberkeep.blobs import LocalStore
from emberkeep.blobs.system_disk import Disk
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import FencedError, SaveError, StorageError, TierError
from emberkeep.repository import KeepAll, KeepLast, KeepNamed, Repository, verify
from emberkeep.repository.policies import LAYOUTS, Grid
from emberkeep.tables import Adagrad, Table
from emberkeep.tiers import durable_open
from tests.contracts.engine import grads_of, state, wanted_of
from tests.faults.findings import Counts, HangError, LostVersionError, WrongRowsError
from tests.faults.lives import Nursery
from tests.unit.tiers.test_tiered_slab import tiered

TABLES = [Table("fixed", rows=80, dim=4), Table("dynamic", rows=None, capacity=300, dim=4)]
OPTIMIZER = Adagrad(lr=0.1)
WRONG, LOST, HUNG = 3, 4, 5
LIFE_SECONDS = 120.0


class FullDisk(Disk):
    """Has room for so many bytes; after a while somebody makes room."""

    left = 0
    refusals = 6

    def write(self, handle: int, view: memoryview) -> None:
        self._take(len(view))
        super().write(handle, view)

    def allocate(self, handle: int, offset: int, nbytes: int) -> None:
        self._take(nbytes)
        super().allocate(handle, offset, nbytes)

    def _take(self, nbytes: int) -> None:
        cls = type(self)
        if cls.refusals and cls.left < nbytes:
            cls.refusals -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        cls.left -= nbytes


class Ledger:
    """Lines that a process has written, in a file that nothing else depends on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def read(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        lines = self._path.read_text().split("\n")[:-1]  # without one that was cut off
        return [line.split() for line in lines]

    def write(self, *words: object) -> None:
        with self._lock, open(self._path, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")


def digest(cluster: LocalCluster) -> str:
    found = xxhash.xxh3_128()
    for name, parts in sorted(state(cluster).items()):
        found.update(name.encode())
        for plane, content in sorted(parts.items()):
            found.update(plane.encode() + content)
    return found.hexdigest()


def train(cluster: LocalCluster, seed: int, step: int) -> None:
    chance = np.random.default_rng([seed, step])
    batch = {
        "fixed": chance.choice(80, 12, replace=False).tolist(),
        "dynamic": chance.choice(120, 12, replace=False).tolist(),
    }
    grads = {name: chance.standard_normal((len(ids), 4)) for name, ids in batch.items()}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)
    if step % 4 == 0:
        cluster.delete("dynamic", np.unique(chance.integers(0, 200, 6)))


# -- one life --------------------------------------------------------------------------------------


class Life:
    """What a process does between its birth and its death."""

    def __init__(self, where: Path, seed: int, options: dict[str, Any]) -> None:
        self.where, self.seed, self.options = where, seed, options
        self.steps = Ledger(where / "steps")
        self.acknowledged = Ledger(where / "acknowledged")
        disk = FullDisk() if options["room"] is not None else Disk()
        FullDisk.left = options["room"] or 0
        durable_open.SEGMENT_NBYTES = 8192
        durable_open.DISK = type(disk)  # type: ignore[misc]
        tables = TABLES
        if options["tier"]:
            path = where / f"tier-{options['shards']}"
            tables = tiered(TABLES, OPTIMIZER, path, 60 * options["shards"])
        self.cluster = local(shards=options["shards"], threads=1).open(tables, OPTIMIZER, seed=1)
        store = LocalStore(where / "repository", disk=disk)
        if not Repository.exists(store):
            Repository.create(store, schema=self.cluster.schema())
        self.repository = Repository.open(store)
        layout = options["layout"]
        policy = KeepAll() if options["keep"] is None else KeepLast(n=options["keep"]) | KeepNamed()
        self.checkpointer = Checkpointer(
            self.repository,
            self.cluster,
            spec=VersionSpec(layout=layout, grid=Grid(ratio=0.1) if layout == "grid" else None),
            settings=SaveSettings(
                retention=policy, grace=timedelta(0), overlap=options["overlap"], threads=1,
                nice=0, max_failures=1000,
            ),
            on_event=self._hear,
        )  # fmt: skip
        self.step = 0

    def _hear(self, event: str, details: dict[str, Any]) -> None:
        if event == "saved":
            self.acknowledged.write("version", details["version"], details["step"])

    def expect(self, step: int, what: str) -> None:
        known = {int(at): content for at, content in self.steps.read()}
        if digest(self.cluster) != known[step]:
            print(f"{what} holds step {step} as it never was")
            sys.exit(WRONG)

    def find(self) -> None:
        """What earlier lives have left is what they wrote down."""
        batch = self.cluster.tier_batch() if self.options["tier"] else None
        durable = [
            int(step) for kind, shards, step in self.acknowledged.read()
            if kind == "tier" and int(shards) == self.options["shards"]
        ]  # fmt: skip
        if self.options["tier"]:
            if durable and (batch is None or batch not in {*durable[-1:], *self._started()}):
                print(f"the tier holds step {batch}, and {durable[-1]} was durable")
                sys.exit(LOST)
            if batch is not None:
                self.expect(batch, "the tier")
                self.step = batch
        versions = self.repository.versions()
        numbers = [int(n) for kind, n, _ in self.acknowledged.read() if kind == "version"]
        if numbers and (not versions or versions[-1].number < max(numbers)):
            print(f"version {max(numbers)} was acknowledged; {versions} are there")
            sys.exit(LOST)
        tags = self.repository.tags()
        if not {*tags.values()} <= {*versions}:
            print(f"{tags} are tagged; {versions} are there")
            sys.exit(LOST)
        if versions and (batch is None or self.options["rewind"]):
            chosen = versions[-1] if self.options["back"] is None else None
            number = (chosen or versions[int(self.options["back"] * len(versions))]).number
            restored = self.checkpointer.restore(number)
            assert restored is not None
            self.step = restored.manifest.step
            self.expect(self.step, f"version {number}")
            if self.options["tag"] and f"step-{self.step}" not in tags:
                self.repository.tag(f"step-{self.step}", number)
        if self.options["verify"] and not verify(self.repository).ok:
            print("a healthy repository is called damaged")
            sys.exit(WRONG)

    def _started(self) -> set[int]:
        """Steps whose tier checkpoint was started and may have been decided when its life ended."""
        own = str(self.options["shards"])
        return {
            int(step)
            for kind, shards, step in self.acknowledged.read()
            if kind == "started" and shards == own
        }

    def go_on(self) -> None:
        for _ in range(self.options["length"]):
            self.step += 1
            train(self.cluster, self.seed, self.step)
            if self.step % self.options["every"]:
                continue
            self.steps.write(self.step, digest(self.cluster))
            try:
                self.checkpointer.save(self.step)
                if self.options["tier"]:
                    self.make_durable()
            except (SaveError, StorageError, TierError) as error:
                # A full disk: a later save has room. A tier that failed ends the process.
                if self.options["room"] is None or isinstance(error, TierError):
                    raise
        try:
            self.checkpointer.close()
        except (SaveError, StorageError):
            if self.options["room"] is None:
                raise

    def make_durable(self) -> None:
        self.acknowledged.write("started", self.options["shards"], self.step)
        try:
            for future in self.cluster.prepare_tiers(self.step):
                future.result(LIFE_SECONDS)
            self.cluster.commit_tiers()
        except StorageError:
            self.cluster.abandon_tiers()
            raise
        self.acknowledged.write("tier", self.options["shards"], self.step)


def live(where: str, seed: str, options: str) -> None:
    """One life, to its end; exits with a code of its own if it finds something wrong."""
    faulthandler.dump_traceback_later(LIFE_SECONDS, exit=True)
    warnings.simplefilter("ignore")
    given = json.loads(options)
    try:
        life = Life(Path(where), int(seed), given)
        life.find()
        life.go_on()
    except FencedError:
        sys.exit(FencedError.exit_code)
    except (StorageError, TierError):
        if given["room"] is None:
            raise


# -- the parent ------------------------------------------------------------------------------------


def options_of(chance: random.Random) -> dict[str, Any]:
    """What one life is like."""
    return {
        "layout": chance.choice(LAYOUTS),
        "shards": chance.choice((1, 2)),
        "tier": chance.random() < 0.5,
        "keep": chance.choice((None, 1, 3)),
        "overlap": chance.choice(("wait", "cancel")),
        "every": chance.choice((1, 2, 3)),
        "length": chance.randint(4, 16),
        "back": chance.random() if chance.random() < 0.3 else None,
        "rewind": chance.random() < 0.3,
        "tag": chance.random() < 0.2,
        "verify": chance.random() < 0.2,
        "room": chance.randint(0, 40_000) if chance.random() < 0.2 else None,
    }


def end_of(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.75:
        return {"disk_call": chance.randint(1, 300)}
    return {"seconds": chance.uniform(0.0, 0.3)}


class Stress:
    """One run that many lives share."""

    def __init__(self, nursery: Nursery, where: Path, seed: int) -> None:
        self.nursery, self.where, self.seed = nursery, where, seed
        self.chance = random.Random(seed)
        self.counts: Counts = Counts()
        self.log = where / "life.log"

    def one(self) -> None:
        if self.chance.random() < 0.08:
            self.stop_one()
            return
        options, end = options_of(self.chance), end_of(self.chance)
        self._judge(self.nursery.live(*self._life(options), log=self.log, end=end), options)
        if options["room"] is not None:
            self.counts["full disks"] += 1

    def stop_one(self) -> None:
        """A process sleeps while another takes over, and wakes up."""
        options = {**options_of(self.chance), "tier": False, "room": None, "length": 60}
        old_log, known = self.where / "old.log", self.where / "acknowledged"
        before = known.stat().st_size if known.exists() else 0
        old = self.nursery.start(*self._life(options), log=old_log)
        until = time.monotonic() + LIFE_SECONDS
        # In the middle of its work: when it has saved for the first time.
        while not (known.exists() and known.stat().st_size > before):
            if time.monotonic() > until or not os.path.exists(f"/proc/{old}"):
                break
            time.sleep(0.002)
        os.kill(old, signal.SIGSTOP)
        following = {**options_of(self.chance), "room": None}
        self._judge(self.nursery.live(*self._life(following), log=self.log), following)
        os.kill(old, signal.SIGCONT)
        code = self.nursery.wait(old)
        if code not in (0, FencedError.exit_code):
            self.log = old_log
            self._judge(code, options)
        self.counts["stops"] += 1
        self.counts["fenced"] += code == FencedError.exit_code

    def _life(self, options: dict[str, Any]) -> tuple[str, ...]:
        return "call", f"{__name__}:live", str(self.where), str(self.seed), json.dumps(options)

    def _judge(self, code: int, options: dict[str, Any]) -> None:
        self.counts["lives"] += 1
        if code == -signal.SIGKILL:
            self.counts["kills"] += 1
            self.counts[f"kills, {options['layout']}"] += 1
            self.counts["kills, tier"] += options["tier"]
        elif code == 0:
            self.counts["ends"] += 1
        else:
            kinds = {WRONG: WrongRowsError, LOST: LostVersionError}
            text = self.log.read_text()
            kind = HangError if "Timeout (" in text else kinds.get(code, AssertionError)
            raise kind(f"seed {self.seed}, code {code}, {options}: {text[-3000:]}")


def run(where: Path, seed: int, kills: int, seconds: float = float("inf")) -> Counts:
    """Lives until so many were killed, or until the time is over; a new run now and then."""
    counts: Counts = Counts()
    until = time.monotonic() + seconds
    with Nursery() as nursery:
        while counts["kills"] < kills and time.monotonic() < until:
            place = where / str(seed)
            place.mkdir()
            stress = Stress(nursery, place, seed)
            for _ in range(25):
                stress.one()
            counts += stress.counts
            counts["runs"] += 1
            seed += 1
    return counts

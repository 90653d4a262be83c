"""What both halves of `tier.py` share: filled files, turns and their ratios, recoveries."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import emberkeep as ek
from _baselines import Kind
from _tiers import Contender, Shape, Taken
from emberkeep.blobs import open_store
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.data import Synthetic
from emberkeep.repository import Repository

Turn = Callable[[], Taken]
COLUMNS = ["", "step ms", "core ms", "beside memory", "95% interval"]


class Bench:
    """One kind of ids, its rows in memory and in a file from which contenders get copies."""

    def __init__(self, root: Path, shape: Shape, skew: Any = "retail") -> None:
        self.root, self.shape = root, shape
        self.source = Synthetic(rows_total=shape.rows, skew=skew)
        self.rows = sum(self.source.rows.values())
        self._copies = 0
        cluster = self._open(self._tier("filled", 0.1))
        shape.fill(cluster)
        for future in cluster.prepare_tiers(1):
            future.result()
        cluster.commit_tiers()
        for shard in cluster.shards:
            shard.kill()

    def memory(self, wait_s: float | None = None) -> Contender:
        one = Contender(self.shape, self.source, wait_s=wait_s)
        self.shape.fill(one.cluster)
        return one

    def contender(
        self, kind: Kind = "pipelined", share: float = 0.1, wait_s: float | None = None, *,
        last: bool = False,
    ) -> Contender:  # fmt: skip
        """One over a copy of the file; the last one may have the file itself."""
        name = "filled"
        if not last:
            self._copies += 1
            name = str(self._copies)
            shutil.copytree(self.root / "filled", self.root / name)
        tier = self._tier(name, share)
        return Contender(self.shape, self.source, tier, kind, wait_s=wait_s)

    def drop(self, one: Contender) -> None:
        """Closes a contender and removes its copy."""
        path = one.slab.log.path
        one.close()
        shutil.rmtree(os.path.dirname(path))

    def recovery(self, ram: Contender) -> tuple[float, float]:
        """Seconds to come back from the tier's file, and to load a full checkpoint of the same
        rows; neither is in the page cache: both of the tier's files are read past it, also the
        index, and the checkpoint's are dropped from it."""
        store = self.root / "repository"
        repository = Repository.create(open_store(str(store)), schema=ram.cluster.schema())
        Checkpointer(repository, ram.cluster).save(1).committed.result()
        for file in (*store.rglob("*"), *(self.root / "filled").rglob("*")):
            if file.is_file():
                handle = os.open(file, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        fresh = self._open(None)
        loader = Checkpointer(Repository.open(open_store(str(store))), fresh)
        start = time.perf_counter()
        loader.restore()
        loaded = time.perf_counter() - start
        start = time.perf_counter()
        back = self._open(self._tier("filled", 0.1))
        found = time.perf_counter() - start
        assert back.tier_batch()
        for shard in back.shards:
            shard.kill()
        shutil.rmtree(store)
        return found, loaded

    def _open(self, tier: ek.Tier | None) -> LocalCluster:
        return local().open(self.shape.tables(self.source, tier), self.shape.optimizer, seed=0)

    def _tier(self, name: str, share: float) -> ek.Tier:
        return ek.Tier(self.root / name, memory=int(share * self.rows * self.shape.row_nbytes))


class Cycles:
    """What a step took, for each contender in each cycle, in which all take turns."""

    def __init__(self, contenders: Mapping[str, Turn], *, cycles: int, turns: int = 1) -> None:
        self._taken: dict[str, list[Taken]] = {name: [] for name in contenders}
        order = list(contenders)
        for number in range(1, cycles + 1):
            cycle: dict[str, list[Taken]] = {name: [] for name in contenders}
            for _ in range(turns):
                for name in order:
                    cycle[name].append(contenders[name]())
                order.reverse()
            for name, turns_taken in cycle.items():
                ms = statistics.mean(taken.ms for taken in turns_taken)
                core_ms = statistics.mean(taken.core_ms for taken in turns_taken)
                self._taken[name].append(Taken(ms, core_ms))
            summary = ", ".join(f"{name} {all_[-1].ms:.1f}" for name, all_ in self._taken.items())
            print(f"cycle {number} of {cycles}, ms a step: {summary}", file=sys.stderr, flush=True)

    def ms(self, name: str) -> float:
        return statistics.median(taken.ms for taken in self._taken[name])

    def core_ms(self, name: str) -> float:
        return statistics.median(taken.core_ms for taken in self._taken[name])

    def ratio(self, name: str, other: str) -> float:
        """The median, over cycles, of the ratio within one cycle."""
        return float(np.median(self._ratios(name, other)))

    def interval(self, name: str, other: str) -> tuple[float, float]:
        """The 95% interval of that median, by resampling cycles 2,000 times."""
        ratios = self._ratios(name, other)
        drawn = np.random.default_rng(0).choice(ratios, (2000, ratios.size))
        low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
        return float(low), float(high)

    def _ratios(self, name: str, other: str) -> np.ndarray:
        pairs = zip(self._taken[name], self._taken[other], strict=True)
        return np.array([taken.ms / base.ms for taken, base in pairs])

    def row(self, name: str, title: str, beside: str = "ram") -> list[str]:
        """The contender's row of the table."""
        low, high = self.interval(name, beside)
        return [
            title, f"{self.ms(name):.1f}", f"{self.core_ms(name):.1f}",
            f"{self.ratio(name, beside):.2f}", f"{low:.2f} to {high:.2f}",
        ]  # fmt: skip


def beside_memory(
    ram: Contender, contenders: Mapping[str, Contender], *, steps: int = 10, cycles: int = 3
) -> Cycles:
    """All take short turns beside training in memory, without checkpoints."""
    turns: dict[str, Turn] = {"ram": partial(ram.train, steps)}
    turns |= {name: partial(one.train, steps) for name, one in contenders.items()}
    return Cycles(turns, cycles=cycles)


class Counted:
    """What a tier did since."""

    def __init__(self, one: Contender) -> None:
        self._slab, self._one = one.slab, one
        self._before, self._number = self._slab.status(), one.number

    def miss_rate(self) -> float:
        now = self._slab.status()
        return (now.missed - self._before.missed) / (now.pulled - self._before.pulled)

    def reads_per_batch(self) -> float:
        return (self._slab.log.reads - self._before.reads) / (self._one.number - self._number)

    def waits(self) -> int:
        return self._slab.waits - self._before.waits

    def wait_ms(self) -> float:
        """Milliseconds of a step that pulls and pushes stood still."""
        taken = self._slab.status().wait_seconds - self._before.wait_seconds
        return taken / (self._one.number - self._number) * 1e3

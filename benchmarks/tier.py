"""Training with rows in a file behind a cache, beside rows in memory and an ordinary cache.

The network is DLRM in its Kaggle shape, rows are spread as Criteo's Kaggle data is, ids follow the
`retail` skew. All rows were written beforehand; the cache holds a tenth of them and is full when
the clock starts. Files are read and written directly, so the page cache takes no part. Contenders
take turns of 25 steps; a figure is the median, over cycles, of the ratio within one cycle.

- *memory*: every row in DRAM;
- *tier*: ours, the next batch's misses read ahead, upkeep between pull and push;
- *ordinary cache*: the same file format, but misses are read as they are met (one at a time by each
  thread), victims are written and the list of uses is kept inside pull and push; checkpoints dump
  what changed while training waits;
- *ordinary cache, our reads*: the same with our 64 reads under way at once.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import emberkeep as ek
from _common import Options, options, report
from _tiers import (
    BATCH,
    DIM,
    LR,
    Contender,
    Dumping,
    Kind,
    Tiering,
    probe,
    tables,
    warm_up,
)
from emberkeep.blobs import open_store
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.data import Synthetic
from emberkeep.repository import Repository

ROWS, SHARE = 2_000_000, 0.10
ROW_NBYTES = 2 * 4 * DIM + 48  # weight, accumulator, and what a frame costs
TURN, EVERY = 25, 50
SWEEP_SHARES = (0.01, 0.02, 0.05, 0.20)
LEAST_SHARE = 0.005
INTERVALS = (10, 25, 50, 100)
SKEWS: dict[str, Any] = {"more skewed (Zipf 1.5)": 1.5, "less skewed (criteo)": "criteo"}
Turn = Callable[[], float]


def fill(cluster: LocalCluster) -> None:
    """Writes every row of every table once."""
    random = np.random.default_rng(0)
    for table in cluster.tables:
        for start in range(0, table.slots, 1 << 18):
            ids = np.arange(start, min(table.slots, start + (1 << 18)))
            weight = random.random((ids.size, DIM), np.float32) * np.float32(0.1)
            planes = {"weight": weight, "accumulator": np.ones_like(weight)}
            cluster.install(table.name, ids, planes)


class Bench:
    """One kind of ids, its rows in memory and in a file from which contenders get copies."""

    def __init__(self, root: Path, skew: Any = "retail") -> None:
        self.root = root
        self.source = Synthetic(rows_total=ROWS, skew=skew)
        self.rows = sum(self.source.rows.values())
        self._copies = 0
        cluster = local().open(tables(self.source, self._tier("filled")), ek.Adagrad(lr=LR), seed=0)
        fill(cluster)
        for future in cluster.prepare_tiers(1):
            future.result()
        cluster.commit_tiers()
        for shard in cluster.shards:
            shard.kill()

    def memory(self) -> Contender:
        one = Contender(self.source)
        fill(one.cluster)
        return one

    def contender(self, kind: Kind = "pipelined", share: float = SHARE) -> Contender:
        self._copies += 1
        name = str(self._copies)
        shutil.copytree(self.root / "filled", self.root / name)
        return Contender(self.source, self._tier(name, share), kind)

    def reopened(self, name: str = "filled") -> LocalCluster:
        return local().open(tables(self.source, self._tier(name)), ek.Adagrad(lr=LR), seed=0)

    def _tier(self, name: str, share: float = SHARE) -> ek.Tier:
        return ek.Tier(self.root / name, memory=int(share * self.rows * ROW_NBYTES))


class Cycles:
    """Milliseconds of a step, for each contender in each cycle."""

    def __init__(self, contenders: Mapping[str, Turn], *, cycles: int, turns: int) -> None:
        self._taken: dict[str, list[float]] = {name: [] for name in contenders}
        order = list(contenders)
        for number in range(1, cycles + 1):
            cycle: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(turns):
                for name in order:
                    cycle[name].append(contenders[name]())
                order.reverse()
            for name, times in cycle.items():
                self._taken[name].append(statistics.mean(times))
            summary = ", ".join(f"{name} {times[-1]:.1f}" for name, times in self._taken.items())
            print(f"cycle {number} of {cycles}, ms a step: {summary}", file=sys.stderr, flush=True)

    def ms(self, name: str) -> float:
        return statistics.median(self._taken[name])

    def ratio(self, name: str, other: str) -> float:
        pairs = zip(self._taken[name], self._taken[other], strict=True)
        return statistics.median(ms / base for ms, base in pairs)


def recovery(bench: Bench, ram: Contender) -> tuple[float, float]:
    """Seconds to come back from the tier's file, and to load a full checkpoint of the same rows;
    neither is in the page cache."""
    store = bench.root / "repository"
    repository = Repository.create(open_store(str(store)), schema=ram.cluster.schema())
    Checkpointer(repository, ram.cluster).save(1).committed.result()
    for file in store.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    fresh = local().open(tables(bench.source, None), ek.Adagrad(lr=LR), seed=0)
    loader = Checkpointer(Repository.open(open_store(str(store))), fresh)
    start = time.perf_counter()
    loader.restore()
    loaded = time.perf_counter() - start
    start = time.perf_counter()
    back = bench.reopened()
    found = time.perf_counter() - start
    assert back.tier_batch()
    for shard in back.shards:
        shard.kill()
    shutil.rmtree(store)
    return found, loaded


def beside_memory(
    ram: Contender, contenders: Mapping[str, Contender], *, steps: int = 10, cycles: int = 3
) -> Cycles:
    """All take short turns beside training in memory, without checkpoints."""
    turns: dict[str, Turn] = {"ram": partial(ram.train, steps)}
    turns |= {name: partial(one.train, steps) for name, one in contenders.items()}
    return Cycles(turns, cycles=cycles, turns=1)


def table_row(taken: Cycles, name: str, title: str) -> list[str]:
    return [title, f"{taken.ms(name):.1f}", f"{taken.ratio(name, 'ram'):.2f}"]


def caches(bench: Bench, ram: Contender) -> Iterator[list[str]]:
    """Figure 8, caches of several sizes, and Figure 9, what cache and pipeline do alone."""
    cases: list[tuple[str, Kind, float]] = [
        *((f"cache {share:.0%}", "pipelined", share) for share in SWEEP_SHARES),
        ("no cache, no pipeline", "inline", LEAST_SHARE),
        ("pipeline alone", "pipelined", LEAST_SHARE),
        ("cache alone", "inline", SHARE),
    ]
    for title, kind, share in cases:
        one = bench.contender(kind, share)
        warm_up([one])
        yield table_row(beside_memory(ram, {"one": one}), "one", title)
        one.close()


def intervals(one: Contender) -> Iterator[list[str]]:
    """Figure 12: checkpoints at several intervals against none."""

    def kept(every: int) -> float:
        tiering = Tiering(one, every)
        taken = one.train(100, before=tiering)
        tiering.finish()
        return taken

    turns: dict[str, Turn] = {"none": partial(one.train, 100)}
    turns |= {str(every): partial(kept, every) for every in INTERVALS}
    taken = Cycles(turns, cycles=3, turns=1)
    for every in map(str, INTERVALS):
        change = 100 * (taken.ratio(every, "none") - 1)
        yield [f"checkpoint every {every}", f"{taken.ms(every):.1f}", f"{change:+.1f}% to none"]


def skews(root: Path) -> Iterator[list[str]]:
    """Figures 10 and 11."""
    for title, skew in SKEWS.items():
        bench = Bench(root / "skew", skew)
        ours, ordinary = bench.contender(), bench.contender("ordinary")
        warm_up([ours, ordinary])
        counted = Counted(ours)
        taken = beside_memory(bench.memory(), {"ours": ours, "ordinary": ordinary})
        misses = f"{counted.reads_per_batch():,.0f} reads a batch ({counted.miss_rate():.1%})"
        yield table_row(taken, "ours", f"{title}, {misses}: tier")
        yield table_row(taken, "ordinary", f"{title}, {misses}: ordinary cache")
        for one in (ours, ordinary):
            one.close()
        shutil.rmtree(root / "skew")


class Counted:
    """What a tier did since."""

    def __init__(self, one: Contender) -> None:
        self._slab = one.slab
        self._reads, self._rows = self._slab.log.reads, self._slab.pushed
        self._waits, self._number = self._slab.waits, one.number
        self._one = one

    def miss_rate(self) -> float:
        return (self._slab.log.reads - self._reads) / (self._slab.pushed - self._rows)

    def reads_per_batch(self) -> float:
        return (self._slab.log.reads - self._reads) / (self._one.number - self._number)

    def waits(self) -> int:
        return self._slab.waits - self._waits


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    root = Path(tempfile.mkdtemp(prefix="emberkeep-tier-", dir=os.environ.get("EMBERKEEP_TMP")))
    try:
        run(given, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(given: Options, root: Path) -> None:
    cycles = 1 if given.quick else 10
    bench = Bench(root / "retail")
    ram, plain, kept = bench.memory(), bench.contender(), bench.contender()
    ordinary = bench.contender("ordinary")
    iops = {"tier": probe(plain, 20_000), "ordinary": probe(ordinary, 5_000)}
    keeping: dict[str, tuple[Contender, Tiering | Dumping]] = {
        "kept": (kept, Tiering(kept, EVERY)),
        "ordinary": (ordinary, Dumping(ordinary, EVERY, root / "dump")),
    }
    if not given.quick:
        inline = bench.contender("inline")
        keeping["inline"] = (inline, Dumping(inline, EVERY, root / "dump"))
    tiers = [plain, *(one for one, _ in keeping.values())]
    warm_up(tiers)
    for one, saving in keeping.values():
        saving.first()
        one.train(2)
    turns: dict[str, Turn] = {"ram": partial(ram.train, TURN), "plain": partial(plain.train, TURN)}
    for name, (one, saving) in keeping.items():
        turns[name] = partial(one.train, TURN, before=saving)
    for one in (ram, *tiers):
        one.train(1)
        one.embedding_s = 0.0
    counted = Counted(plain)
    taken = Cycles(turns, cycles=cycles, turns=EVERY // TURN)
    keeping["kept"][1].finish()
    steps = cycles * EVERY
    embedding_ms = {
        name: one.embedding_s / steps * 1e3
        for name, one in (("ram", ram), ("tier", plain), ("ordinary", ordinary))
    }
    # Of a step of the ordinary cache: what no embeddings at all and no checkpoints would leave.
    least = (taken.ms("ram") - embedding_ms["ram"]) / taken.ms("ordinary")
    per_batch, miss_rate, waits = counted.reads_per_batch(), counted.miss_rate(), counted.waits()
    direct, file_nbytes = plain.slab.log.direct, os.path.getsize(plain.slab.log.path)
    cache_nbytes = plain.slab.frames.count * ROW_NBYTES
    for one in tiers:
        one.close()
    back_s, load_s = recovery(bench, ram)
    rest: list[list[str]] = []
    more: dict[str, float] = {}
    if not given.quick:
        more["time_vs_ordinary_cache_with_our_reads"] = taken.ratio("kept", "inline")
        rest.append(table_row(taken, "inline", "ordinary cache with our reads, with checkpoints"))
        rest += caches(bench, ram)
        swept = bench.contender()
        warm_up([swept])
        rest += intervals(swept)
        swept.close()
        rest += skews(root)
    report(
        given,
        config={
            "rows": bench.rows, "dim": DIM, "batch": BATCH, "optimizer": "adagrad",
            "ids": "retail", "cache_share": SHARE, "checkpoint_every_batches": EVERY,
            "file_mb": round(file_nbytes / 1e6), "cache_mb": round(cache_nbytes / 1e6),
            "page_cache": "kept out by direct I/O" if direct else "in use",
            "steps": steps,
        },
        figures={
            "time_vs_dram": taken.ratio("plain", "ram"),
            "embedding_time_vs_dram": embedding_ms["tier"] / embedding_ms["ram"],
            "miss_rate": miss_rate,
            "checkpoint_overhead_pct": 100 * (taken.ratio("kept", "plain") - 1),
            "time_vs_ordinary_cache": taken.ratio("kept", "ordinary"),
            "embedding_time_vs_ordinary_cache": embedding_ms["tier"] / embedding_ms["ordinary"],
            "recovery_speedup_vs_checkpoint": load_s / back_s,
            "step_ms": taken.ms("plain"),
            "dram_step_ms": taken.ms("ram"),
            "ordinary_step_ms": taken.ms("ordinary"),
            "file_reads_per_batch": per_batch,
            "disk_reads_per_second": iops["tier"],
            **more,
        },
        columns=["", "step ms", "beside memory"],
        rows=[
            ["memory", f"{taken.ms('ram'):.1f}", "1.00"],
            table_row(taken, "plain", "tier, 10% cache"),
            table_row(taken, "kept", "tier, 10% cache, with checkpoints"),
            table_row(taken, "ordinary", "ordinary cache with checkpoints"),
            *rest,
        ],
        notes=[
            (f"{per_batch:,.0f} file reads a batch. The disk makes {iops['tier']:,.0f} reads a "
            f"second with 64 under way and {iops['ordinary']:,.0f} one by one from each thread: "
            f"they take {per_batch / iops['tier'] * 1e3:.1f} ms of a step of the tier, beside the "
            f"network, and {per_batch / iops['ordinary'] * 1e3:.1f} ms of one of the ordinary "
            f"cache, before it. Pulls and pushes of the tier waited for room {waits} times in "
            f"{steps} steps."),
            (f"Pulls, pushes and prefetches take {embedding_ms['tier']:.1f} ms of a "
            f"step of the tier, {embedding_ms['ram']:.1f} ms in memory and "
            f"{embedding_ms['ordinary']:.1f} ms with the ordinary cache. The rest of a step "
            "is the network, on the same cores as upkeep: what upkeep computes, it takes from it. "
            f"Embeddings that cost nothing at all would take {1 - least:.0%} off the step of the "
            "ordinary cache; the more of a step the network is, the less there is to gain."),
            (f"Coming back takes {back_s:.2f} s from the file and {load_s:.2f} s from a full "
            "checkpoint that was not in the page cache."),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""Training with rows in a file behind a cache, beside rows in memory and an ordinary cache.

The network is DLRM in its Kaggle shape, rows are spread as Criteo's Kaggle data is, ids follow the
`retail` skew. All rows were written beforehand; the cache holds a tenth of them. Files are read
and written directly, so the page cache takes no part. Contenders take turns, step by step:

- *memory*: every row in DRAM;
- *tier*: ours, the next batch's misses read ahead, upkeep between pull and push;
- *ordinary cache*: the same file format and the same queue depth, but misses are read, victims
  written and the LRU list maintained inside pull and push; checkpoints dump what changed while
  training waits. (Victims are written together, which is kinder than one by one.)
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import emberkeep as ek
from _common import options, report
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local import LocalCluster, local
from emberkeep.data import Synthetic
from emberkeep.models import DLRM, KAGGLE
from emberkeep.repository import Repository
from emberkeep.tiered.slab import TieredSlab

ROWS, BATCH, SHARE = 2_000_000, 2048, 0.10
DIM, LR = KAGGLE.dim, 0.01
ROW_NBYTES = 2 * 4 * DIM + 48  # weight, accumulator, and what a frame costs
WARM_UP, EVERY = 60, 25
SKEWS = {"more skewed": 1.3, "retail": "retail", "less skewed": "criteo"}
Step = Callable[[], float]


def tables(source: Synthetic, tier: ek.Tier | None) -> list[ek.Table]:
    return [ek.Table(name, rows=rows, dim=DIM, tier=tier) for name, rows in source.rows.items()]


def fill(cluster: LocalCluster) -> None:
    """Writes every row of every table once."""
    random = np.random.default_rng(0)
    for table in cluster.tables:
        for start in range(0, table.slots, 1 << 18):
            ids = np.arange(start, min(table.slots, start + (1 << 18)))
            weight = random.random((ids.size, DIM), np.float32) * np.float32(0.1)
            planes = {"weight": weight, "accumulator": np.ones_like(weight)}
            cluster.install(table.name, ids, planes)


class Contender:
    """A model over one kind of embeddings, and its place in the stream of batches."""

    def __init__(
        self, source: Synthetic, tier: ek.Tier | None, *, ahead: bool = True, ordinary: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.bags = ek.EmbeddingBags(tables(source, tier), optimizer=ek.Adagrad(lr=LR))
        self.model = DLRM(self.bags, KAGGLE)
        dense = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.optimizers = [self.bags.optimizer, torch.optim.Adagrad(dense, lr=LR)]
        self.loss = nn.BCEWithLogitsLoss()
        self.ahead, self.ordinary = ahead and not ordinary, ordinary
        self.source, self.number = source, 0
        self.next = self._read()
        self.embedding_s = 0.0
        self.slab = self.cluster.shards[0].slabs[0]
        if ordinary:
            _make_ordinary(self.slab)
        forward, push = self.bags.forward, self.bags.optimizer.step
        self.bags.forward = self._timed(forward)
        self.bags.optimizer.step = self._timed(push)

    @property
    def cluster(self) -> LocalCluster:
        cluster = self.bags.cluster
        assert isinstance(cluster, LocalCluster)
        return cluster

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.embedding_s += time.perf_counter() - start

        return timed

    def _read(self) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        batch = self.source.batch(self.number * BATCH, BATCH)
        self.number += 1
        ids = {name: torch.from_numpy(np.asarray(given)) for name, given in batch.ids.items()}
        return torch.from_numpy(batch.dense), ids, torch.from_numpy(batch.labels)

    def step(self) -> float:
        """One training step, in seconds; making the batch is not part of it."""
        (dense, ids, labels), self.next = self.next, self._read()
        start = time.perf_counter()
        vectors = self.bags(ids)
        if self.ahead:
            self.bags.prefetch(self.next[1])
        self.loss(self.model.head(dense, vectors), labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    def warm_up(self, batches: int = WARM_UP) -> None:
        """Fills the cache with what this stream uses; nothing dense."""
        gradient = torch.full((BATCH, len(self.bags.features), DIM), 1e-5)
        for _ in range(batches):
            (_, ids, _), self.next = self.next, self._read()
            self.bags(ids).backward(gradient)
            self.bags.optimizer.step()

    def close(self) -> None:
        for shard in self.cluster.shards:
            shard.kill()


def _make_ordinary(slab: TieredSlab) -> None:
    """No upkeep of its own, nothing ahead, and the list of uses is kept inside pull and push."""
    slab._upkeep.stop()
    order: dict[int, None] = {}
    fetch, check = slab.fetch, slab.check_push

    def touch(wanted: Any) -> None:
        found, _ = slab.resolve(wanted)
        for frame in slab.frames.of(found).tolist():
            order.pop(frame, None)
            order[frame] = None

    def ordinary_fetch(wanted: Any, *, ahead: bool = False) -> None:
        fetch(wanted)
        slab.reserve = 0
        touch(wanted)

    def ordinary_check(wanted: Any, *given: Any, **named: Any) -> Any:
        touch(wanted)
        return check(wanted, *given, **named)

    slab.fetch = ordinary_fetch  # type: ignore[method-assign]
    slab.check_push = ordinary_check  # type: ignore[method-assign]


class Tiering:
    """Checkpoints of the tier itself."""

    def __init__(self, one: Contender) -> None:
        self.one, self.batch, self.waiting = one, 0, []

    def request(self) -> None:
        self.finish()
        self.batch += 1
        self.waiting = self.one.cluster.prepare_tiers(self.batch)

    def look(self) -> None:
        if self.waiting and all(future.done() for future in self.waiting):
            self.finish()

    def finish(self) -> None:
        for future in self.waiting:
            future.result()
        if self.waiting:
            self.one.cluster.commit_tiers()
        self.waiting = []


def dump(one: Contender, path: Path) -> None:
    """The incremental checkpoint of the ordinary cache: what changed, while training waits."""
    slab = one.slab
    changed = np.flatnonzero(np.unpackbits(slab.dirty.view(np.uint8), bitorder="little"))
    with slab.lock:
        planes = slab._held_by(changed)
        slab.dirty[:] = 0
    with open(path, "wb") as file:
        for values in planes.values():
            file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())


def probe(one: Contender) -> float:
    """Random reads per second of this disk, as the tier makes them."""
    slab = one.slab
    random = np.random.default_rng(1)
    rows = np.unique(random.choice(np.flatnonzero(slab.positions), 20_000))
    records = slab.positions[rows].astype(np.int64) - 1
    framed = [plane for name, plane in slab.planes.items() if name != "used"]
    held = [np.empty((rows.size, p.shape[1]), p.dtype) for p in framed]
    layout = slab.log.layout.onto(held)
    turn = slab.log.begin_reading()
    start = time.perf_counter()
    slab.reads.read(records, rows, np.arange(rows.size), np.empty(rows.size, np.int64), layout)
    taken = time.perf_counter() - start
    slab.log.end_reading(turn)
    slab.log.reads -= rows.size
    return len(np.unique(records // slab.log.per_block)) / taken


def interleaved(contenders: dict[str, Step], steps: int) -> dict[str, float]:
    """Mean milliseconds of a step; contenders take turns, and each leaves out its slowest tenth,
    which is the machine's doing."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(steps):
        for name in order if number % 2 == 0 else reversed(order):
            taken[name].append(contenders[name]() * 1e3)
    return {n: statistics.mean(sorted(t)[: max(1, len(t) * 9 // 10)]) for n, t in taken.items()}


class Bench:
    def __init__(self, root: Path, skew: Any = "retail") -> None:
        self.root = root
        self.source = Synthetic(rows_total=ROWS, skew=skew)
        self.rows = sum(self.source.rows.values())

    def tier(self, name: str, share: float = SHARE) -> ek.Tier:
        return ek.Tier(self.root / name, memory=int(share * self.rows * ROW_NBYTES))

    def filled(self, name: str) -> None:
        """A tier with every row in it, durable."""
        cluster = local().open(tables(self.source, self.tier(name)), ek.Adagrad(lr=LR), seed=0)
        fill(cluster)
        for future in cluster.prepare_tiers(1):
            future.result()
        cluster.commit_tiers()
        for shard in cluster.shards:
            shard.kill()

    def copied(self, source: str, name: str) -> ek.Tier:
        shutil.copytree(self.root / source, self.root / name)
        return self.tier(name)


def measure_skew(root: Path, skew: Any, steps: int) -> dict[str, float]:
    bench = Bench(root / "skew", skew)
    bench.filled("ours")
    bench.copied("ours", "ordinary")
    ram = Contender(bench.source, None)
    fill(ram.cluster)
    ours = Contender(bench.source, bench.tier("ours"))
    ordinary = Contender(bench.source, bench.tier("ordinary"), ordinary=True)
    for one in (ram, ours, ordinary):
        one.warm_up()
    reads, rows = ours.slab.log.reads, ours.slab.pushed
    taken = interleaved({"ram": ram.step, "ours": ours.step, "ordinary": ordinary.step}, steps)
    taken["miss"] = (ours.slab.log.reads - reads) / (ours.slab.pushed - rows)
    for one in (ours, ordinary):
        one.close()
    shutil.rmtree(root / "skew")
    return taken


def recovery(bench: Bench, ram: Contender, name: str) -> tuple[float, float]:
    """Seconds to come back from the tier's file, and to load a full checkpoint of the same rows."""
    store = bench.root / "repository"
    repository = Repository.create(ek_store(store), schema=ram.cluster.schema())
    saver = Checkpointer(repository, ram.cluster)
    saver.save(1).committed.result()
    for file in store.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)
    fresh = local().open(tables(bench.source, None), ek.Adagrad(lr=LR), seed=0)
    loader = Checkpointer(Repository.open(ek_store(store)), fresh)
    start = time.perf_counter()
    loader.restore()
    loaded = time.perf_counter() - start
    start = time.perf_counter()
    back = local().open(tables(bench.source, bench.tier(name)), ek.Adagrad(lr=LR), seed=0)
    found = time.perf_counter() - start
    assert back.tier_batch()
    for shard in back.shards:
        shard.kill()
    return found, loaded


def ek_store(path: Path) -> Any:
    from emberkeep.blobs import open_store

    return open_store(str(path))


def with_checkpoints(one: Contender, every: int, start: Callable[[], None],
                     look: Callable[[], None]) -> Step:  # fmt: skip
    """A step whose time includes the request of a checkpoint, where one is due."""
    count = iter(range(1 << 60))

    def step() -> float:
        began = time.perf_counter()
        if next(count) % every == 0:
            start()
        look()
        return time.perf_counter() - began + one.step()

    return step


def sweeps(bench: Bench, ram: Contender, base_ms: float) -> Iterator[list[str]]:
    """The paper's Figures 8 to 12, each beside training in memory in the same turns."""
    for share in (0.01, 0.02, 0.05, 0.20, 0.40):
        one = Contender(bench.source, bench.tier("ours", share))
        one.warm_up()
        taken = interleaved({"ram": ram.step, "one": one.step}, 20)
        yield [f"cache {share:.0%}", f"{taken['one']:.1f}", f"{taken['one'] / taken['ram']:.2f}"]
        one.close()
    for title, share, ahead in (
        ("no cache, no pipeline", 0.005, False),
        ("pipeline alone", 0.005, True),
        ("cache alone", SHARE, False),
    ):
        one = Contender(bench.source, bench.tier("ours", share), ahead=ahead)
        if not ahead:
            _make_ordinary(one.slab)
        one.warm_up()
        taken = interleaved({"ram": ram.step, "one": one.step}, 20)
        yield [title, f"{taken['one']:.1f}", f"{taken['one'] / taken['ram']:.2f}"]
        one.close()
    one = Contender(bench.source, bench.tier("ours"))
    one.warm_up()
    for every in (10, 25, 50, 100):
        tiering = Tiering(one)
        tiering.batch = (one.cluster.tier_batch() or 0) + 1
        kept = with_checkpoints(one, every, tiering.request, tiering.look)
        taken = interleaved({"none": one.step, "kept": kept}, 100)
        tiering.finish()
        change = 100 * (taken["kept"] / taken["none"] - 1)
        yield [f"checkpoint every {every}", f"{taken['kept']:.1f}", f"{change:+.1f}% against none"]
    one.close()
    for title, skew in SKEWS.items():
        taken = measure_skew(bench.root, skew, 20)
        yield [
            f"{title}, miss rate {taken['miss']:.1%}", f"{taken['ours']:.1f}",
            f"{taken['ours'] / taken['ram']:.2f} (ordinary {taken['ordinary'] / taken['ram']:.2f})",
        ]  # fmt: skip


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    steps = 25 if given.quick else 150
    root = Path(tempfile.mkdtemp(prefix="emberkeep-tier-", dir=os.environ.get("EMBERKEEP_TMP")))
    try:
        run(given, root, steps)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(given: Any, root: Path, steps: int) -> None:
    bench = Bench(root)
    bench.filled("ours")
    bench.copied("ours", "ordinary")
    ram = Contender(bench.source, None)
    fill(ram.cluster)
    ours = Contender(bench.source, bench.tier("ours"))
    ordinary = Contender(bench.source, bench.tier("ordinary"), ordinary=True)
    iops = probe(ours)
    for one in (ram, ours, ordinary):
        one.warm_up()
        one.step()
        one.embedding_s = 0.0
    reads, rows, waits = ours.slab.log.reads, ours.slab.pushed, ours.slab.waits
    tiering = Tiering(ours)
    tiering.batch = 1
    taken = interleaved({"ram": ram.step, "ours": ours.step}, steps)
    embedding = {"ram": ram.embedding_s / steps * 1e3, "ours": ours.embedding_s / steps * 1e3}
    reads, rows = ours.slab.log.reads - reads, ours.slab.pushed - rows
    waits = ours.slab.waits - waits
    kept = with_checkpoints(ours, EVERY, tiering.request, tiering.look)
    dumping = with_checkpoints(ordinary, EVERY, lambda: dump(ordinary, root / "dump"), lambda: None)
    saved = interleaved(
        {"none": ours.step, "ours": kept, "ordinary": dumping}, max(steps, 2 * EVERY)
    )
    tiering.finish()
    for one in (ours, ordinary):
        one.close()
    back_s, load_s = recovery(bench, ram, "ours")
    rest = [] if given.quick else list(sweeps(bench, ram, taken["ram"]))
    per_batch = reads / steps
    report(
        given,
        config={
            "rows": bench.rows, "dim": DIM, "batch": BATCH, "optimizer": "adagrad",
            "ids": "retail", "cache_share": SHARE, "checkpoint_every_batches": EVERY,
            "page_cache": "kept out by direct I/O" if ours.slab.log.direct else "in use",
            "steps": steps,
        },
        figures={
            "time_vs_dram": taken["ours"] / taken["ram"],
            "embedding_time_vs_dram": embedding["ours"] / embedding["ram"],
            "miss_rate": reads / rows,
            "checkpoint_overhead_pct": 100 * (saved["ours"] / saved["none"] - 1),
            "time_vs_ordinary_cache": saved["ours"] / saved["ordinary"],
            "recovery_speedup_vs_checkpoint": load_s / back_s,
            "step_ms": taken["ours"],
            "dram_step_ms": taken["ram"],
            "ordinary_step_ms": saved["ordinary"],
            "file_reads_per_batch": per_batch,
            "disk_reads_per_second": iops,
        },
        columns=["", "step ms", "beside memory"],
        rows=[
            ["memory", f"{taken['ram']:.1f}", "1.00"],
            ["tier, 10% cache", f"{taken['ours']:.1f}", f"{taken['ours'] / taken['ram']:.2f}"],
            ["tier with checkpoints", f"{saved['ours']:.1f}", ""],
            ["ordinary cache with checkpoints", f"{saved['ordinary']:.1f}", ""],
            *rest,
        ],
        notes=[
            (f"{per_batch:,.0f} file reads a batch; the disk makes {iops:,.0f} reads a second, so "
            f"they keep it busy for {per_batch / iops * 1e3:.1f} ms of a step. Pulls and pushes "
            f"waited for room {waits} times in {steps} steps."),
            (f"Embeddings take {embedding['ours']:.1f} ms of a step, in memory "
            f"{embedding['ram']:.1f} ms."),
            (f"Coming back takes {back_s:.2f} s from the file and {load_s:.2f} s from a full "
            "checkpoint that was not in the page cache."),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""What parity costs a training step, and what a lost shard costs with it.

One run, interleaved: no protection, parity with k = 2 and 4, and what the paper compares with and
exists here alone: *gradient propagation* (workers send gradients to parity rows, too) and
*replication* (every push goes to a second copy). Then a shard is lost under training, with every
row trained, and the same rows are restored from a checkpoint.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import emberkeep as ek
from _common import RESULTS, interleaved_ms, options, report
from emberkeep.blobs import open_store
from emberkeep.checkpoint import LOSSLESS, Checkpointer
from emberkeep.data import skewed_ids
from emberkeep.kernels import rows as row_kernels
from emberkeep.lookup import unique_ids
from emberkeep.models import DLRM, KAGGLE
from emberkeep.repository import Repository
from emberkeep.slab import RowIds

TABLES, ROWS, BATCH, DENSE, SHARDS = 26, 200_000, 2048, 13, 6
DIM = KAGGLE.dim
LR = 0.01
FEATURES = tuple(f"C{table + 1}" for table in range(TABLES))
BATCHES = 16  # different ones in turn, so that no batch is found in the processor's caches
MTBF_SECONDS = 28 * 3600.0
Batch = tuple[Tensor, dict[str, Tensor], Tensor]


def batches() -> list[Batch]:
    random = np.random.default_rng(0)
    made = []
    for number in range(BATCHES):
        ids = {
            name: torch.from_numpy(
                skewed_ids(ROWS, BATCH, skew=1.05, seed=table, start=number * BATCH)
            )
            for table, name in enumerate(FEATURES)
        }
        dense = torch.from_numpy(random.random((BATCH, DENSE), np.float32))
        labels = torch.from_numpy((random.random(BATCH) < 0.25).astype(np.float32))
        made.append((dense, ids, labels))
    return made


def tables(rows: int = ROWS) -> list[ek.Table]:
    return [ek.Table(name, rows=rows, dim=DIM) for name in FEATURES]


def bags_with(parity: ek.Parity | None) -> ek.EmbeddingBags:
    return ek.EmbeddingBags(
        tables(), optimizer=ek.Adagrad(lr=LR), cluster=ek.local(shards=SHARDS, parity=parity)
    )


def with_replication() -> ek.EmbeddingBags:
    """Every push is applied to a second copy of all rows."""
    bags, copy = bags_with(None), bags_with(None)
    push = bags.cluster.push

    def both(wanted: Sequence[RowIds], grads: Any, **how: Any) -> None:
        push(wanted, grads, **how)
        copy.cluster.push(wanted, grads, **how)

    bags.cluster.push = both  # type: ignore[method-assign]
    return bags


def with_gradients(k: int) -> ek.EmbeddingBags:
    """The gradients of every k rows are applied to a parity row of theirs as well.

    Cheaper than it would have to be: a correct one keeps a copy of the optimizer state of every
    row beside its parity.
    """
    bags = bags_with(None)
    parity = ek.local(shards=SHARDS).open(tables(-(-ROWS // k)), ek.Adagrad(lr=LR), seed=0)
    push = bags.cluster.push

    def both(wanted: Sequence[RowIds], grads: Any, **how: Any) -> None:
        push(wanted, grads, **how)
        (mine,), (grads_UD,) = wanted, grads
        stripes, inverse = unique_ids(mine.ids // k, mine.offsets, parity.pool)
        at = np.repeat(stripes.offsets[:-1], np.diff(mine.offsets)) + inverse.astype(np.int64)
        summed = np.zeros((stripes.ids.size, DIM), np.float32)
        row_kernels.scatter_add(grads_UD, np.arange(at.size), at, summed)
        parity.push([stripes], [summed], **how)

    bags.cluster.push = both  # type: ignore[method-assign]
    return bags


def feed(made: list[Batch]) -> Callable[[], Batch]:
    turn = iter(range(1 << 60))
    return lambda: made[next(turn) % BATCHES]


def whole_step(bags: ek.EmbeddingBags, made: list[Batch]) -> Callable[[], None]:
    model = DLRM(bags, KAGGLE)
    dense_optimizer = torch.optim.Adagrad(
        [*model.bottom.parameters(), *model.top.parameters()], lr=LR
    )
    loss_of, following = nn.BCEWithLogitsLoss(), feed(made)

    def run() -> None:
        dense, ids, labels = following()
        loss_of(model(dense, ids), labels).backward()
        for optimizer in (bags.optimizer, dense_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    return run


def embedding_step(bags: ek.EmbeddingBags, made: list[Batch]) -> Callable[[], None]:
    gradient, following = torch.randn(BATCH, TABLES, DIM).mul_(1e-4), feed(made)

    def run() -> None:
        bags(following()[1]).backward(gradient)
        bags.optimizer.step()

    return run


def resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train_all_rows(cluster: Any) -> None:
    """Every row exists and was trained: planes are written, touched bits are set."""
    ids = np.arange(ROWS)
    block = cluster.read(FEATURES[0], ids)
    block["accumulator"][:] = 0.1
    for name in FEATURES:
        cluster.install(name, ids, block)


def memory_overhead(k: int) -> float:
    """Resident bytes of parity by those of the rows that it protects, all of them trained."""
    start = resident_nbytes()
    bags = bags_with(None)
    train_all_rows(bags.cluster)
    rows = resident_nbytes() - start
    bags.cluster.protect(ek.Parity(k=k, r=1))
    bags.cluster.rebuild()
    parity = resident_nbytes() - start - rows
    bags.cluster.close()
    return parity / rows


def imbalance(bags: ek.EmbeddingBags, made: list[Batch]) -> tuple[float, float]:
    """The updates of the busiest shard by those of the idlest: of rows alone, with parity."""
    rows = np.zeros(SHARDS, np.int64)
    before = np.array(bags.cluster.parity.updates)
    step = embedding_step(bags, made)
    for _, ids, _ in made:
        for values in ids.values():
            rows += np.bincount(values.unique().numpy() % SHARDS, minlength=SHARDS)
        step()
    both = rows + np.array(bags.cluster.parity.updates) - before
    return rows.max() / rows.min(), both.max() / both.min()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """One loss under training."""

    first_step_seconds: float
    seconds: float
    """Until everything is protected again."""
    steps: int
    normal_step_seconds: float
    nbytes: int
    ends: list[float]
    """When each step ended, from the loss on."""

    @property
    def throughput(self) -> float:
        return self.steps * self.normal_step_seconds / self.seconds

    @property
    def delay_seconds(self) -> float:
        """By how much training is behind once all is rebuilt."""
        return max(1e-3, self.seconds - self.steps * self.normal_step_seconds)


def lose_a_shard(step: Callable[[], None], cluster: Any, shard: int, settle: int) -> Rebuild:
    times = []
    for _ in range(settle):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    before = cluster.parity.rebuilt_nbytes
    start = time.perf_counter()
    cluster.kill(shard)
    ends: list[float] = []
    while not ends or not cluster.parity.protected:
        step()
        ends.append(time.perf_counter() - start)
    rows = cluster.parity.rebuilt_nbytes - before
    return Rebuild(
        first_step_seconds=ends[0],
        seconds=ends[-1],
        steps=len(ends),
        normal_step_seconds=float(np.median(times)),
        # The parity that the shard held for others comes back, too.
        nbytes=rows + rows * cluster.parity.r // cluster.parity.k,
        ends=ends,
    )


def checkpoint_seconds(cluster: Any) -> tuple[float, float]:
    """Saving all rows, and restoring them, without training beside."""
    with tempfile.TemporaryDirectory() as directory:
        repository = Repository.create(open_store(directory), schema=cluster.schema())
        saver = Checkpointer(repository, cluster, strategy=LOSSLESS)
        start = time.perf_counter()
        saver.save(1)
        saver.wait()
        saved = time.perf_counter() - start
        start = time.perf_counter()
        saver.restore()
        return saved, time.perf_counter() - start


def main() -> None:
    given = options(__file__, (__doc__ or "").splitlines()[0])
    torch.manual_seed(0)
    made = batches()
    contenders = {
        "none": bags_with(None),
        "parity k=2": bags_with(ek.Parity(k=2, r=1)),
        "parity k=4": bags_with(ek.Parity(k=4, r=1)),
        "gradient propagation k=4": with_gradients(4),
        "replication": with_replication(),
    }
    whole = interleaved_ms(
        {name: whole_step(bags, made) for name, bags in contenders.items()},
        repeats=8 if given.quick else 60,
        warmup=3,
    )
    embedding = interleaved_ms(
        {name: embedding_step(bags, made) for name, bags in contenders.items()},
        repeats=25 if given.quick else 200,
        warmup=5,
    )
    alone, balanced = imbalance(contenders["parity k=4"], made)
    sent = contenders["parity k=4"].cluster.parity
    del contenders
    gc.collect()
    memory = {2: math.nan, 4: memory_overhead(4)}
    if not given.quick:
        memory[2] = memory_overhead(2)

    protected = bags_with(None)
    train_all_rows(protected.cluster)
    saved, restored = checkpoint_seconds(protected.cluster)
    protected.cluster.protect(ek.Parity(k=4, r=1))
    protected.cluster.rebuild()
    step = whole_step(protected, made)
    rebuilds = [
        lose_a_shard(step, protected.cluster, shard, settle=8)
        for shard in ((1,) if given.quick else (1, 4, 2))
    ]
    rebuild = sorted(rebuilds, key=lambda r: r.seconds)[len(rebuilds) // 2]
    interval = math.sqrt(2 * saved * MTBF_SECONDS)
    curve = [(lost, (restored + lost) / rebuild.delay_seconds) for lost in (0, 60, interval / 2)]

    def over(taken: dict[str, float], name: str) -> float:
        return (taken[name] / taken["none"] - 1) * 100

    rows = [
        [
            name,
            f"{whole[name]:.1f}",
            f"{over(whole, name):+.1f}%",
            f"{embedding[name]:.2f}",
            f"{over(embedding, name):+.0f}%",
        ]
        for name in whole
    ]
    notes = [
        f"Resident memory of parity by that of the rows: {memory[4]:.3f} at k = 4"
        + ("" if given.quick else f", {memory[2]:.3f} at k = 2")
        + f". Busiest by idlest shard: {alone:.3f} without parity, {balanced:.3f} with k = 4; "
        f"{sent.messages} messages, {sent.sent_nbytes / 1e6:.0f} MB in all steps of k = 4.",
        (
            f"A shard lost with every row trained ({rebuild.nbytes / 1e6:.0f} MB of rows and "
            f"parity): first step after {rebuild.first_step_seconds:.2f} s, whole after "
            f"{rebuild.seconds:.2f} s in {rebuild.steps} steps; a checkpoint of all rows takes "
            f"{saved:.1f} s to save and {restored:.1f} s to restore."
        ),
        "Behind by "
        f"{rebuild.delay_seconds:.2f} s with parity; from a checkpoint "
        + ", ".join(f"{ratio:.0f}× as much with {lost:.0f} s lost" for lost, ratio in curve)
        + f" ({interval / 2:.0f} s: half of the best interval at an MTBF of 28 h).",
    ]
    if not given.quick:
        notes += effects(step, protected.cluster, rebuilds, interval, restored)
    report(
        given,
        config={
            "shards": SHARDS, "tables": TABLES, "rows_per_table": ROWS, "dim": DIM, "batch": BATCH,
            "optimizer": "adagrad", "ids": "zipf 1.05", "mtbf_hours": MTBF_SECONDS / 3600,
            "threads": torch.get_num_threads(),
        },
        figures={
            "overhead_pct_k4": over(whole, "parity k=4"),
            "overhead_pct_k2": over(whole, "parity k=2"),
            "overhead_pct_gradients": over(whole, "gradient propagation k=4"),
            "overhead_pct_replication": over(whole, "replication"),
            "embedding_overhead_pct_k4": over(embedding, "parity k=4"),
            "memory_overhead_k4": memory[4],
            "imbalance_vs_none": balanced / alone,
            "rebuild_throughput": rebuild.throughput,
            "rebuild_mb_per_s": rebuild.nbytes / 1e6 / rebuild.seconds,
            "recovery_speedup_vs_checkpoint": curve[-1][1],
            "recovery_speedup_no_lost_work": curve[0][1],
            "seconds_to_first_step": rebuild.first_step_seconds,
        },
        columns=["protection", "DLRM step ms", "overhead", "embedding step ms", "overhead"],
        rows=rows,
        notes=notes,
    )  # fmt: skip


def effects(
    step: Callable[[], None], cluster: Any, rebuilds: list[Rebuild], interval: float,
    restored: float,
) -> list[str]:  # fmt: skip
    """The effect of the chunk size, and the plots."""
    told = []
    protection = cluster._protection
    for chunk_rows in (1024, 8192, 65536):
        object.__setattr__(protection.spec, "chunk_rows", chunk_rows)
        rebuild = lose_a_shard(step, cluster, 3, settle=8)
        told.append(
            f"chunks of {chunk_rows} rows: whole after {rebuild.seconds:.2f} s at "
            f"{rebuild.throughput:.0%} of the normal throughput"
        )
    plot(rebuilds[0], interval, restored)
    return ["; ".join(told) + ".", "![a loss under training](parity.png)"]


def plot(rebuild: Rebuild, interval: float, restored: float) -> None:
    """Steps ended after a loss: with parity, and from a checkpoint at its best and on average."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rate, progress) = plt.subplots(2, 1, figsize=(7, 6), sharex=True)
    ends = np.array([0.0, *rebuild.ends])
    rate.plot(ends[1:], rebuild.normal_step_seconds / np.diff(ends) * 100)
    rate.set_ylabel("% of normal throughput")
    progress.plot(ends, np.arange(ends.size), label="parity, k = 4")
    until = ends[-1] + restored
    for name, lost in (("checkpoint, nothing lost", 0.0), ("checkpoint, average", interval / 2)):
        at = np.linspace(0, until, 50)
        behind = restored + lost
        progress.plot(at, np.maximum(0, at - behind) / rebuild.normal_step_seconds, label=name)
    progress.set_ylabel("steps since the loss")
    progress.set_xlabel("seconds since the loss")
    progress.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "parity.png", dpi=120)


if __name__ == "__main__":
    main()

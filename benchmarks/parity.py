"""What parity costs a training step, and what a lost shard costs with it.

One run, interleaved: no protection, parity with k = 2 and 4, and what the paper compares with and
exists here alone: *gradient propagation* (workers send gradients to parity rows, too) and
*replication* (every push goes to a second copy). Then a shard is lost under training, with every
row trained, and the same rows are restored from a checkpoint, which costs a share of the time
between two of them.
"""

from __future__ import annotations

import gc
import math
import os
import sys
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
from _common import RESULTS, criteo_batches, interleaved_ms, options, report, timed
from emberkeep._types import RowIds
from emberkeep.blobs import open_store
from emberkeep.checkpoint import LOSSLESS, Checkpointer
from emberkeep.kernels import batch_rows as row_kernels
from emberkeep.models import DLRM, KAGGLE
from emberkeep.repository import Repository
from emberkeep.rows.lookup import unique_ids

TABLES, ROWS, BATCH, DENSE, SHARDS = 26, 200_000, 2048, 13, 6
DIM = KAGGLE.dim
LR = 0.01
FEATURES = tuple(f"C{table + 1}" for table in range(TABLES))
BATCHES = 16  # different ones in turn, so that no batch is found in the processor's caches
MTBF_SECONDS = 28 * 3600.0
# A rebuild is watched for so long at most; what is left of it then is brought back at once.
WATCH_SECONDS, QUICK_WATCH_SECONDS = 60.0, 4.0
Batch = tuple[Tensor, dict[str, Tensor], Tensor]


def batches() -> list[Batch]:
    return criteo_batches(FEATURES, rows=ROWS, batch=BATCH, dense=DENSE, count=BATCHES)


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
        (row_ids,), (grads_UD,) = wanted, grads
        stripes, inverse = unique_ids(row_ids.ids // k, row_ids.offsets, parity.pool)
        at = np.repeat(stripes.offsets[:-1], np.diff(row_ids.offsets)) + inverse.astype(np.int64)
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
    _, parity = protected(bags, ek.Parity(k=k, r=1))
    bags.cluster.close()
    return parity / rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The updates of the busiest shard by those of the idlest: of rows alone, and with parity.

    By step, on average, because a step waits for its busiest shard; and over all steps together.
    """

    alone: float
    both: float
    total_alone: float
    total_both: float


def balance(bags: ek.EmbeddingBags, made: list[Batch]) -> Balance:
    step, rows, both = embedding_step(bags, made), [], []
    for _, ids, _ in made:
        before = np.array(bags.cluster.parity.updates)
        step()
        shards = [values.unique().numpy() % SHARDS for values in ids.values()]
        rows.append(sum(np.bincount(places, minlength=SHARDS) for places in shards))
        both.append(rows[-1] + np.array(bags.cluster.parity.updates) - before)
    return Balance(
        alone=float(np.mean([counts.max() / counts.min() for counts in rows])),
        both=float(np.mean([counts.max() / counts.min() for counts in both])),
        total_alone=float(np.max(sum(rows)) / np.min(sum(rows))),
        total_both=float(np.max(sum(both)) / np.min(sum(both))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """One loss under training, watched until all is protected again or the time was over."""

    first_step_seconds: float
    seconds: float
    steps: int
    normal_step_seconds: float
    """The median of steps before the loss and after the rebuild."""
    nbytes: int
    """Rebuilt while it was watched: rows, and the parity that the shard held for others."""
    part: float
    """Of all that was lost, what was rebuilt while it was watched."""
    ends: list[float]
    """When each step ended, from the loss on."""

    @property
    def throughput(self) -> float:
        return self.steps * self.normal_step_seconds / self.seconds

    @property
    def mb_per_second(self) -> float:
        return self.nbytes / 1e6 / self.seconds

    @property
    def whole_seconds(self) -> float:
        """Until everything is protected again, at the pace that was seen."""
        return self.seconds / self.part

    @property
    def delay_seconds(self) -> float:
        """By how much training is behind once all is rebuilt; never less than the first step is
        late, however well the others went."""
        late = self.first_step_seconds - self.normal_step_seconds
        behind = (1 - self.throughput) * self.whole_seconds
        return max(1e-3, late, behind)


def lose_a_shard(
    step: Callable[[], None], cluster: Any, shard: int, *, watch_seconds: float, settle: int = 6
) -> Rebuild:
    times = timed(step, settle)
    rows = sum(slab.rows * 4 * 2 * DIM for slab in cluster.shards[shard].slabs)
    lost = rows + rows * cluster.parity.r // cluster.parity.k
    before = cluster.parity.rebuilt_nbytes
    start = time.perf_counter()
    cluster.kill(shard)
    ends: list[float] = []
    while not ends or not (cluster.parity.protected or ends[-1] > watch_seconds):
        step()
        ends.append(time.perf_counter() - start)
    rebuilt = cluster.parity.rebuilt_nbytes - before
    if whole := cluster.parity.protected:
        rebuilt += rebuilt * cluster.parity.r // cluster.parity.k
    cluster.rebuild()
    times += timed(step, settle)
    found = Rebuild(
        first_step_seconds=ends[0],
        seconds=ends[-1],
        steps=len(ends),
        normal_step_seconds=float(np.median(times)),
        nbytes=rebuilt,
        part=1.0 if whole else rebuilt / lost,
        ends=ends,
    )
    say(
        f"a shard lost and rebuilt: {found.mb_per_second:.0f} MB/s at {found.throughput:.0%}, "
        f"first step after {found.first_step_seconds:.2f} s"
    )
    return found


def say(text: str) -> None:
    """Progress, kept out of the results."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def trained(made: list[Batch]) -> tuple[ek.EmbeddingBags, Callable[[], None]]:
    """A model with every row trained, and its step."""
    bags = bags_with(None)
    train_all_rows(bags.cluster)
    return bags, whole_step(bags, made)


def protected(bags: ek.EmbeddingBags, parity: ek.Parity) -> tuple[Any, int]:
    """The cluster of a model, once all its parity is there, and what that takes of memory."""
    before = resident_nbytes()
    bags.cluster.protect(parity)
    bags.cluster.rebuild()
    return bags.cluster, resident_nbytes() - before


def checkpoint_seconds(cluster: Any) -> tuple[float, float]:
    """Saving all rows, and restoring them after the loss of a shard, without training beside."""
    with tempfile.TemporaryDirectory() as directory:
        repository = Repository.create(open_store(directory), schema=cluster.schema())
        saver = Checkpointer(repository, cluster, spec=LOSSLESS)
        start = time.perf_counter()
        saver.save(1)
        saver.wait()
        saved = time.perf_counter() - start
        cluster.kill(1)
        start = time.perf_counter()
        cluster.renew(1)
        saver.restore()
        cluster.serve(1)
        return saved, time.perf_counter() - start


def main() -> None:
    given = options(__file__, (__doc__ or "").splitlines()[0])
    torch.manual_seed(0)
    made = batches()
    watch_seconds = QUICK_WATCH_SECONDS if given.quick else WATCH_SECONDS
    say("steps of the embeddings alone")
    contenders = {
        "none": bags_with(None),
        "parity k=2": bags_with(ek.Parity(k=2, r=1)),
        "parity k=4": bags_with(ek.Parity(k=4, r=1)),
        "gradient propagation k=4": with_gradients(4),
        "replication": with_replication(),
    }
    embedding = interleaved_ms(
        {name: embedding_step(bags, made) for name, bags in contenders.items()},
        repeats=12 if given.quick else 200,
        warmup=BATCHES,  # until the rows of all batches have got their memory
        lead=1,
    )
    say("whole steps")
    whole = interleaved_ms(
        {name: whole_step(bags, made) for name, bags in contenders.items()},
        repeats=6 if given.quick else 150,
        warmup=1,
        lead=1,
    )
    balanced = balance(contenders["parity k=4"], made)
    sent = contenders["parity k=4"].cluster.parity
    del contenders
    gc.collect()
    say("a checkpoint, saved and restored")
    before = resident_nbytes()
    bags, step = trained(made)
    rows_nbytes = resident_nbytes() - before
    saved, restored = checkpoint_seconds(bags.cluster)
    cluster, parity_nbytes = protected(bags, ek.Parity(k=4, r=1))
    memory = parity_nbytes / rows_nbytes
    rebuilds = [
        lose_a_shard(step, cluster, shard, watch_seconds=watch_seconds)
        for shard in ((1,) if given.quick else (1, 4, 2))
    ]
    cluster.close()
    rebuild = sorted(rebuilds, key=lambda r: r.delay_seconds)[len(rebuilds) // 2]
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
    every = saved / interval * 100
    rows.append(
        [f"a checkpoint every {interval / 60:.0f} min", "", f"{every:+.2f}%", "", f"{every:+.2f}%"]
    )
    notes = [
        (
            f"Resident memory of parity by that of the rows: {memory:.3f} at k = 4. "
            f"Busiest by idlest shard in a step: {balanced.alone:.3f} without parity, "
            f"{balanced.both:.3f} with k = 4 (over all steps {balanced.total_alone:.3f} and "
            f"{balanced.total_both:.3f}: rows are spread evenly as they are); "
            f"{sent.messages} messages, {sent.sent_nbytes / 1e6:.0f} MB in all steps of k = 4."
        ),
        (
            "A shard lost with every row trained "
            f"({rebuild.nbytes / rebuild.part / 1e6:.0f} MB of rows and parity): first step after "
            f"{rebuild.first_step_seconds:.2f} s, whole after {rebuild.whole_seconds:.1f} s"
            + ("" if rebuild.part == 1 else f", having watched {rebuild.part:.0%} of it")
            + f"; a checkpoint of all rows takes {saved:.1f} s to save and {restored:.1f} s to "
            "restore."
        ),
        "Behind by "
        f"{rebuild.delay_seconds:.2f} s with parity; from a checkpoint "
        + ", ".join(f"{ratio:.0f}× as much with {lost:.0f} s lost" for lost, ratio in curve)
        + f" ({interval / 2:.0f} s: half of the best interval at an MTBF of 28 h).",
    ]
    if not given.quick:
        del bags, cluster, step
        gc.collect()
        say("memory at k = 2")
        notes[0] = notes[0].replace(" at k = 4.", f" at k = 4, {memory_overhead(2):.3f} at k = 2.")
        notes += effects(made, rebuild, interval, restored)
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
            "memory_overhead_k4": memory,
            "imbalance_vs_none": balanced.both / balanced.alone,
            "rebuild_throughput": rebuild.throughput,
            "rebuild_mb_per_s": rebuild.mb_per_second,
            "recovery_speedup_vs_checkpoint": curve[-1][1],
            "recovery_speedup_no_lost_work": curve[0][1],
            "seconds_to_first_step": rebuild.first_step_seconds,
        },
        columns=["protection", "DLRM step ms", "overhead", "embedding step ms", "overhead"],
        rows=rows,
        notes=notes,
    )  # fmt: skip


def effects(made: list[Batch], rebuild: Rebuild, interval: float, restored: float) -> list[str]:
    """The effect of k, of the chunk size and of how much a rebuild takes; the plots."""
    found = {name_of(ek.Parity()): rebuild}
    for spec in (
        ek.Parity(k=2), ek.Parity(chunk_rows=1024), ek.Parity(chunk_rows=65536),
        ek.Parity(rebuild_share=0.1), ek.Parity(rebuild_share=0.5), ek.Parity(rebuild_share=1),
    ):  # fmt: skip
        bags, step = trained(made)
        cluster, _ = protected(bags, spec)
        say(name_of(spec))
        found[name_of(spec)] = lose_a_shard(step, cluster, 3, watch_seconds=WATCH_SECONDS)
        cluster.close()
        del bags, cluster, step
        gc.collect()
    summaries = [
        f"{name}: first step after {loss.first_step_seconds:.2f} s, whole after "
        f"{loss.whole_seconds:.1f} s at {loss.throughput:.0%} of the normal throughput, "
        f"{loss.mb_per_second:.0f} MB/s"
        for name, loss in found.items()
    ]
    plot_loss(found, restored)
    plot_recovery(found, interval, restored)
    return [
        "; ".join(summaries) + ".",
        "![throughput after a loss](parity-loss.png)",
        "![recovery over lost work](parity-recovery.png)",
    ]


def name_of(spec: ek.Parity) -> str:
    return f"k = {spec.k}, chunks of {spec.chunk_rows} rows, share {spec.rebuild_share:g}"


def plot_loss(found: dict[str, Rebuild], restored: float) -> None:
    """Throughput from a loss on, and steps that have ended since."""
    plt = pyplot()
    figure, (rate, progress) = plt.subplots(2, 1, figsize=(7, 7), sharex=True)
    for name, rebuild in found.items():
        ends = np.array([0.0, *rebuild.ends])
        # Over some steps each: single ones of a shared machine are all over the place.
        at = np.unique([*ends[:: max(1, round(0.4 / rebuild.normal_step_seconds))], ends[-1]])
        steps = np.diff(np.searchsorted(ends, at))
        rates = rebuild.normal_step_seconds * steps / np.diff(at) * 100
        (line,) = progress.plot(ends, np.arange(ends.size))
        rate.stairs(rates, at, baseline=None, color=line.get_color(), label=name)
    until = max(rebuild.ends[-1] for rebuild in found.values())
    normal = next(iter(found.values())).normal_step_seconds
    at = np.linspace(0, until, 200)
    behind = np.maximum(0, at - restored) / normal
    progress.plot(at, behind, "k--", label="a checkpoint of the last step, restored")
    rate.axhline(100, color="0.8", zorder=0)
    rate.set_ylim(0, 120)
    rate.set_ylabel("% of normal throughput")
    progress.set_ylabel("steps since the loss")
    progress.set_xlabel("seconds since the loss")
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    figure.set_layout_engine("constrained")
    figure.savefig(RESULTS / "parity-loss.png", dpi=120)
    plt.close(figure)


def plot_recovery(found: dict[str, Rebuild], interval: float, restored: float) -> None:
    """How far training is behind after a loss, by the work that a checkpoint loses."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    lost = np.geomspace(1, interval, 60)
    axes.plot(lost, restored + lost, "k--", label="checkpoint: restore and repeat")
    for i, (name, rebuild) in enumerate(found.items()):
        axes.axhline(rebuild.delay_seconds, color=f"C{i}", label=f"parity, {name}", linewidth=1)
    axes.axvline(interval / 2, color="0.7")
    axes.annotate(
        "half the best interval\nat an MTBF of 28 h", (interval / 2, 10 * restored), fontsize=8,
        ha="right",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("seconds of work since the last checkpoint")
    axes.set_ylabel("seconds behind after the recovery")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(RESULTS / "parity-recovery.png", dpi=120)
    plt.close(figure)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


if __name__ == "__main__":
    main()

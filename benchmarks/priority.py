"""Which rows matter most: what it costs to know, and how well update counts tell it.

Memory is what a ranking allocates, beside the weights of all rows. The overhead is that of an
embedding-only step (forward, backward, update), the same tables with and without the ranking
taking turns; a whole training step is many times longer. Selection runs beside training, in the
thread that writes versions; its time over growing tables shows that it is linear.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import emberkeep as ek
from _common import options, report
from emberkeep.cluster.local import LocalCluster
from emberkeep.data import Synthetic, skewed_ids
from emberkeep.models import DLRM, DLRMShape
from emberkeep.pool import shared
from emberkeep.priority import Kind, Priority

TABLES, ROWS, DIM, BATCH = 26, 200_000, 16, 2048
SKEW = 1.05
TURN = 8
BATCHES = 16
KINDS: tuple[Kind, ...] = ("mfu", "ssu", "scar")
SIZES = (1_000_000, 2_000_000, 4_000_000, 8_000_000)
CORRELATION = {"samples": 1_000_000, "rows_total": 200_000, "batch": 2048}


def bags_with(priority: Priority | None, rows: int = ROWS, tables: int = TABLES) -> Any:
    specs = [ek.Table(f"C{t}", rows=rows, dim=DIM) for t in range(tables)]
    bags = ek.EmbeddingBags(specs, optimizer=ek.RowWiseAdagrad(lr=0.01))
    block = bags.cluster.read("C0", np.arange(min(rows, 100_000)))
    for table in specs:  # every row exists and was trained
        for start in range(0, rows, 100_000):
            ids = np.arange(start, min(start + 100_000, rows))
            bags.cluster.install(table.name, ids, {n: v[: ids.size] for n, v in block.items()})
    bags.cluster.track(priority)
    bags.cluster.forget_changes(keep_since_baseline=False)
    return bags


def batch_of(number: int) -> dict[str, torch.Tensor]:
    return {
        f"C{t}": torch.from_numpy(skewed_ids(ROWS, BATCH, skew=SKEW, seed=t, start=number * BATCH))
        for t in range(TABLES)
    }


def step_of(bags: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    grad = torch.randn(BATCH, TABLES, DIM, generator=torch.manual_seed(0)) * 1e-3

    def step(batch: dict[str, torch.Tensor]) -> None:
        bags(batch).backward(grad)
        bags.optimizer.step()

    return step


def step_times(
    steps: dict[str, Callable[..., None]], batches: list[Any], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of a step, by turn, so that contenders can be compared turn by turn."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for batch in batches:
            step(batch)
    for turn in range(rounds):
        order = list(steps) if turn % 2 == 0 else list(reversed(steps))
        for name in order:
            mine = []
            for count in range(TURN + 1):
                batch = batches[(turn * TURN + count) % len(batches)]
                start = time.perf_counter()
                steps[name](batch)
                if count:
                    mine.append((time.perf_counter() - start) * 1e3)
            taken[name].append(statistics.mean(sorted(mine)[: TURN - 2]))
    return taken


def ranking_of(cluster: LocalCluster) -> Any:
    found = cluster.shards[0].slabs[0].ranking
    assert found is not None
    return found


def selection_ms(kind: Kind, rows: int, repeats: int) -> float:
    """To choose an eighth of `rows` rows, half of which were updated, some often."""
    cluster = ek.local().open([ek.Table("t", rows=rows, dim=DIM)], ek.SGD(lr=0.1), seed=0)
    cluster.track(Priority(kind=kind, period=1))
    ranking = ranking_of(cluster)
    random = np.random.default_rng(0)
    weight = cluster.shards[0].slabs[0].planes["weight"]
    for share in (0.5, 0.2, 0.1):
        ids = np.sort(random.choice(rows, int(rows * share), replace=False)).astype(np.int64)
        ranking.updating(ids, 0, ids.size)
        weight[ids] += random.random((ids.size, 1), np.float32)
        ranking.updated(ids, np.array([0, ids.size]))
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        ranking.select()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


def correlations(samples: int) -> tuple[float, float, float]:
    """Of each row's accesses and pushes with how far it moved, trained from the start (Figure 6);
    and how many of the rows that moved most are among those that were pushed most."""
    data = Synthetic(samples=samples, rows_total=CORRELATION["rows_total"], seed=0)
    tables = [ek.Table(name, rows=rows, dim=DIM) for name, rows in data.rows.items()]
    bags = ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=0.1))
    shape = DLRMShape(bottom=(64, DIM), top=(64, 1))
    network = DLRM(bags, shape, features=len(tables), dense=13, seed=0)
    dense = torch.optim.SGD(network.parameters(), lr=0.1)
    criterion = torch.nn.BCEWithLogitsLoss()
    accesses = {table.name: np.zeros(table.rows or 0, np.int64) for table in tables}
    pushes = {table.name: np.zeros(table.rows or 0, np.int64) for table in tables}
    first = {t.name: bags.cluster.read(t.name, np.arange(t.rows or 0))["weight"] for t in tables}
    for start in range(0, samples, CORRELATION["batch"]):
        batch = data.batch(start, min(CORRELATION["batch"], samples - start))
        ids = {name: torch.from_numpy(np.asarray(given)) for name, given in batch.ids.items()}
        loss = criterion(
            network(torch.from_numpy(batch.dense), ids), torch.from_numpy(batch.labels)
        )
        loss.backward()
        for optimizer in (bags.optimizer, dense):
            optimizer.step()
            optimizer.zero_grad()
        for name, given in batch.ids.items():
            np.add.at(accesses[name], np.asarray(given), 1)
            pushes[name][np.unique(given)] += 1
    moved = {
        t.name: np.linalg.norm(
            bags.cluster.read(t.name, np.arange(t.rows or 0))["weight"] - first[t.name], axis=1
        )
        for t in tables
    }
    names = [table.name for table in tables]
    distance = np.concatenate([moved[name] for name in names])
    accessed = np.concatenate([accesses[name] for name in names])
    pushed = np.concatenate([pushes[name] for name in names])
    trained = pushed > 0
    top = distance.size // 8
    farthest = np.argpartition(-distance, top)[:top]
    most = np.argpartition(-pushed, top)[:top]
    return (
        float(np.corrcoef(accessed[trained], distance[trained])[0, 1]),
        float(np.corrcoef(pushed[trained], distance[trained])[0, 1]),
        float(np.isin(farthest, most).mean()),
    )


def main() -> None:
    given = options(__file__, __doc__ or "")
    rounds = 6 if given.quick else 30
    samples = 300_000 if given.quick else CORRELATION["samples"]
    rows: list[list[str]] = []
    figures: dict[str, float] = {}

    batches = [batch_of(number) for number in range(BATCHES)]
    contenders = {"none": bags_with(None), **{k: bags_with(Priority(kind=k)) for k in KINDS}}
    weights_nbytes = TABLES * ROWS * DIM * 4
    memory = {k: 100 * contenders[k].cluster.shards[0].ranking_nbytes / weights_nbytes
              for k in KINDS}  # fmt: skip
    taken = step_times({k: step_of(bags) for k, bags in contenders.items()}, batches, rounds)
    overhead = {
        k: 100 * (statistics.median(
            mine / plain for mine, plain in zip(taken[k], taken["none"], strict=True)) - 1)
        for k in KINDS
    }  # fmt: skip
    chosen = {k: ranking_of(contenders[k].cluster).select().size for k in KINDS}
    del contenders
    gc.collect()
    sizes = SIZES[:3] if given.quick else SIZES
    selection = {
        k: [selection_ms(k, size, 3 if given.quick else 7) for size in sizes] for k in KINDS
    }
    for kind in KINDS:
        per_million = [ms / (size / 1e6) for ms, size in zip(selection[kind], sizes, strict=True)]
        rows.append(
            [kind, f"{memory[kind]:.2f}%", f"{overhead[kind]:+.1f}%", f"{chosen[kind]:,}",
             " ".join(f"{ms:.1f}" for ms in selection[kind]),
             f"{max(per_million) / min(per_million):.2f}×"]
        )  # fmt: skip
    figures["mfu_memory_pct"] = memory["mfu"]
    figures["ssu_memory_pct"] = memory["ssu"]
    figures["mfu_embedding_overhead_pct"] = overhead["mfu"]
    figures["ssu_embedding_overhead_pct"] = overhead["ssu"]
    figures["scar_memory_pct"] = memory["scar"]
    by_access, by_push, shared_top = correlations(samples)
    figures["frequency_update_correlation"] = by_access
    figures["push_update_correlation"] = by_push
    figures["top_eighth_shared_pct"] = 100 * shared_top
    told = (
        f"Accesses and distance moved correlate with {by_access:.3f}, pushes with {by_push:.3f}; "
        f"{shared_top:.0%} of the eighth of the rows that moved farthest are in the eighth that "
        "was pushed most (CPR, Figure 6: 0.983 on Criteo Kaggle)."
    )
    report(
        given,
        config={
            "tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "ids": f"Zipf {SKEW}",
            "fraction": 0.125, "period": 2, "repeats": rounds * TURN, "threads": shared().threads,
            "selection_rows": list(sizes), "correlation_samples": samples,
            "correlation_rows": CORRELATION["rows_total"],
        },
        figures=figures,
        columns=["ranking", "memory of weights", "on the embedding step", "rows listed",
                 "selection, ms", "time per row, largest to smallest"],
        rows=rows,
        notes=[
            f"Step without a ranking: {statistics.median(taken['none']):.2f} ms.",
            told,
        ],
    )  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

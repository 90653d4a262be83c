"""Which rows matter most: what it costs to know, and how well update counts tell it.

Memory is what a ranking allocates, beside all rows with their optimizer state. The overhead is that
of an embedding-only step (forward, backward, update), the same tables with and without the ranking
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
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import Synthetic, skewed_ids
from emberkeep.models import DLRM, DLRMShape
from emberkeep.rows.priority import Kind, Priority, prioritised
from emberkeep.runtime.pool import shared

TABLES, ROWS, DIM, BATCH = 26, 200_000, 16, 2048
SKEW = 1.05
TURN = 8
BATCHES = 16
KINDS: tuple[Kind, ...] = ("mfu", "ssu", "scar")
SIZES = (1_000_000, 2_000_000, 4_000_000, 8_000_000)
# As in the paper: 4096 steps of 128 samples, SGD with a learning rate of 0.1.
CORRELATION = {"steps": 4096, "batch": 128, "rows_total": 200_000}


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
            times = []
            for count in range(TURN + 1):
                batch = batches[(turn * TURN + count) % len(batches)]
                start = time.perf_counter()
                steps[name](batch)
                if count:
                    times.append((time.perf_counter() - start) * 1e3)
            taken[name].append(statistics.mean(sorted(times)[: TURN - 2]))
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


class Followed:
    """What happened to each row: accesses, pushes, and the sizes of its updates added up."""

    def __init__(self, bags: Any) -> None:
        self.cluster, self.tables = bags.cluster, bags.tables
        self.first = self._weights()
        self.bases = np.cumsum([0, *(table.rows for table in self.tables)])
        self.pushes, self.accesses = (np.zeros(self.bases[-1], np.int64) for _ in range(2))
        self.updates = np.zeros(self.bases[-1])
        self._push = bags.cluster.push
        bags.cluster.push = self

    def __call__(self, wanted: Any, grads: Any, *, lr: float, finite: bool = False) -> None:
        (ids,), (grads_UD,) = wanted, grads
        rows = ids.ids + np.repeat(self.bases[:-1], np.diff(ids.offsets))
        self.pushes[rows] += 1
        self.updates[rows] += lr * np.linalg.norm(grads_UD, axis=1)  # what plain SGD does
        self._push(wanted, grads, lr=lr, finite=finite)

    def saw(self, ids: dict[str, Any]) -> None:
        for base, table in zip(self.bases, self.tables, strict=False):
            np.add.at(self.accesses, base + np.asarray(ids[table.name]), 1)

    def _weights(self) -> Any:
        every = [self.cluster.read(t.name, np.arange(t.rows))["weight"] for t in self.tables]
        return np.concatenate(every)

    def moved(self) -> Any:
        return np.linalg.norm(self._weights() - self.first, axis=1)


def correlations(steps: int) -> dict[str, float]:
    """Of how often rows are used with how much they change, trained from the start (Figure 6).

    In the tables whose rows a ranking orders, unless the name says all; small ones are saved whole.
    """
    samples = steps * CORRELATION["batch"]
    data = Synthetic(samples=samples, rows_total=CORRELATION["rows_total"], seed=0)
    tables = [ek.Table(name, rows=rows, dim=DIM) for name, rows in data.rows.items()]
    bags = ek.EmbeddingBags(tables, optimizer=ek.SGD(lr=0.1))
    shape = DLRMShape(bottom=(64, DIM), top=(64, 1))
    network = DLRM(bags, shape, features=len(tables), dense=13, seed=0)
    dense = torch.optim.SGD(network.parameters(), lr=0.1)
    criterion = torch.nn.BCEWithLogitsLoss()
    followed = Followed(bags)
    for start in range(0, samples, CORRELATION["batch"]):
        batch = data.batch(start, CORRELATION["batch"])
        ids = {name: torch.from_numpy(np.asarray(given)) for name, given in batch.ids.items()}
        logits = network(torch.from_numpy(batch.dense), ids)
        criterion(logits, torch.from_numpy(batch.labels)).backward()
        for optimizer in (bags.optimizer, dense):
            optimizer.step()
            optimizer.zero_grad()
        followed.saw(batch.ids)
    moved, used = followed.moved(), followed.pushes > 0
    sizes = [table.rows for table in tables]
    ordered = prioritised(sizes)
    ranked = used & np.repeat([t in ordered for t in range(len(tables))], sizes)
    top = moved.size // 8
    farthest, most = (np.argpartition(-values, top)[:top] for values in (moved, followed.pushes))

    def correlation(one: Any, other: Any, rows: Any) -> float:
        return float(np.corrcoef(one[rows], other[rows])[0, 1])

    return {
        "frequency_update_correlation": correlation(followed.accesses, followed.updates, ranked),
        "push_update_correlation": correlation(followed.pushes, followed.updates, ranked),
        "push_distance_correlation": correlation(followed.pushes, moved, ranked),
        "frequency_update_correlation_all": correlation(followed.accesses, followed.updates, used),
        "push_update_correlation_all": correlation(followed.pushes, followed.updates, used),
        "top_eighth_shared_pct": 100 * float(np.isin(farthest, most).mean()),
    }


def main() -> None:
    given = options(__file__, __doc__ or "")
    rounds = 6 if given.quick else 30
    correlated_steps = 1024 if given.quick else CORRELATION["steps"]
    rows: list[list[str]] = []
    figures: dict[str, float] = {}

    batches = [batch_of(number) for number in range(BATCHES)]
    contenders = {"none": bags_with(None), **{k: bags_with(Priority(kind=k)) for k in KINDS}}
    planes = contenders["none"].cluster.shards[0].slabs[0].planes
    rows_nbytes = sum(plane.nbytes for plane in planes.values())
    memory = {k: 100 * contenders[k].cluster.shards[0].ranking_nbytes / rows_nbytes
              for k in KINDS}  # fmt: skip
    taken = step_times({k: step_of(bags) for k, bags in contenders.items()}, batches, rounds)
    overhead = {
        k: 100 * (statistics.median(
            ranked / plain for ranked, plain in zip(taken[k], taken["none"], strict=True)) - 1)
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
    found = correlations(correlated_steps)
    figures.update(found)
    meaning = (
        "In the tables that are ranked, which hold 99% of the rows, accesses and the added-up "
        f"sizes of a row's updates correlate with {found['frequency_update_correlation']:.3f} "
        "(CPR, Figure 6: 0.983 on Criteo Kaggle), pushes, which MFU counts, with "
        f"{found['push_update_correlation']:.3f}; over the rows of all tables with "
        f"{found['frequency_update_correlation_all']:.3f} and "
        f"{found['push_update_correlation_all']:.3f}. With the distance that a row has come in the "
        f"end pushes correlate with {found['push_distance_correlation']:.3f}. "
        f"{found['top_eighth_shared_pct']:.0f}% of the eighth of the rows that came "
        "farthest are in the eighth that was pushed most."
    )
    report(
        given,
        config={
            "tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "ids": f"Zipf {SKEW}",
            "fraction": 0.125, "period": 2, "repeats": rounds * TURN, "threads": shared().threads,
            "selection_rows": list(sizes), "correlation_steps": correlated_steps,
            "correlation_rows": CORRELATION["rows_total"],
        },
        figures=figures,
        columns=["ranking", "memory of rows", "on the embedding step", "rows listed",
                 "selection, ms", "time per row, largest to smallest"],
        rows=rows,
        notes=[
            f"Step without a ranking: {statistics.median(taken['none']):.2f} ms.",
            meaning,
        ],
    )  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

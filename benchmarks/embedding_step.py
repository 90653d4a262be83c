"""Forward, backward and update of embedding tables, through autograd, beside the peers.

Peers in the same run, taking turns: torch with one `EmbeddingBag(sparse=True)` per table, torch
with one stacked `EmbeddingBag` (the fair peer), FBGEMM's CPU table-batched embeddings where
`fbgemm-gpu-cpu` is installed. Every row of every table exists and was trained before measuring.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import emberkeep as ek
from _common import options, report
from emberkeep.data import skewed_ids
from emberkeep.runtime.pool import shared, spans
from emberkeep.tables import Optimizer

LR = 0.01
BATCHES = 16  # different ones in turn, so that no batch is found in the processor's caches
SKEW = 1.05  # Zipf exponent
TURN = 8  # steps of one contender before the next has its turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is looked up in what."""

    tables: int = 26
    rows: int = 200_000
    dim: int = 16
    batch: int = 2048
    hots: int = 1

    def __str__(self) -> str:
        rows = f"{self.rows // 10**6}M" if self.rows >= 10**6 else f"{self.rows // 1000}k"
        return f"{self.tables} × {rows} × {self.dim}, {self.hots} per bag"


NOTE = (
    "The memory limit is the bytes that must move (ids, rows, bags, gradients, updated planes) "
    "over the copy bandwidth measured in this run."
)
MAIN = Shape()
EXTRA = [Shape(dim=64), Shape(dim=128), Shape(hots=10), Shape(tables=4, rows=10_000_000)]


class Batch:
    """The same ids in the form that each contender wants; made before the clock starts."""

    def __init__(self, shape: Shape, number: int) -> None:
        lookups = shape.batch * shape.hots
        per_table = [
            torch.from_numpy(
                skewed_ids(shape.rows, lookups, skew=SKEW, seed=table, start=number * lookups)
            )
            for table in range(shape.tables)
        ]
        square = (shape.batch,) if shape.hots == 1 else (shape.batch, shape.hots)
        self.by_feature = {f"C{t}": ids.reshape(square) for t, ids in enumerate(per_table)}
        self.by_table = [ids.reshape(shape.batch, shape.hots) for ids in per_table]
        shifts = torch.arange(shape.tables) * shape.rows
        self.stacked = (torch.stack(self.by_table, dim=1) + shifts[:, None]).reshape(-1, shape.hots)
        self.table_major = torch.cat(per_table)
        self.offsets = torch.arange(0, self.table_major.numel() + 1, shape.hots)
        self.unique = sum(int(ids.unique().numel()) for ids in per_table)


def emberkeep_step(shape: Shape, optimizer: Optimizer) -> Callable[[Batch], object]:
    tables = [ek.Table(f"C{t}", rows=shape.rows, dim=shape.dim) for t in range(shape.tables)]
    bags = ek.EmbeddingBags(tables, optimizer=optimizer)
    # Every row exists and was trained: planes are written, touched bits are set.
    block = bags.cluster.read(tables[0].name, np.arange(min(shape.rows, 100_000)))
    for table in tables:
        for start in range(0, shape.rows, 100_000):
            ids = np.arange(start, min(start + 100_000, shape.rows))
            bags.cluster.install(table.name, ids, {n: v[: ids.size] for n, v in block.items()})
    grad = torch.randn(shape.batch, shape.tables, shape.dim, generator=torch.manual_seed(0)) * 1e-3

    def step(batch: Batch) -> None:
        bags(batch.by_feature).backward(grad)
        bags.optimizer.step()

    return step


def torch_step(
    shape: Shape, optimizer: type[torch.optim.Optimizer], *, stacked: bool
) -> Callable[[Batch], object]:
    count = 1 if stacked else shape.tables
    bags = []
    for _ in range(count):
        weight = torch.empty(shape.rows * (shape.tables if stacked else 1), shape.dim)
        weight.uniform_(-0.05, 0.05)
        bags.append(nn.EmbeddingBag(*weight.shape, mode="sum", sparse=True, _weight=weight))
    update = optimizer([bag.weight for bag in bags], lr=LR)
    grad = torch.randn(shape.batch, shape.tables, shape.dim, generator=torch.manual_seed(0)) * 1e-3

    def step(batch: Batch) -> None:
        if stacked:
            out = bags[0](batch.stacked).reshape(grad.shape)
        else:
            out = torch.stack(
                [bag(ids) for bag, ids in zip(bags, batch.by_table, strict=True)], dim=1
            )
        update.zero_grad()
        out.backward(grad)
        update.step()

    return step


def fbgemm_step(shape: Shape, optimizer: str) -> Callable[[Batch], object] | None:
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except ImportError:
        return None
    kinds = {"SGD": EmbOptimType.EXACT_SGD, "row-wise": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    if optimizer not in kinds:
        return None
    place = (shape.rows, shape.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    bags = SplitTableBatchedEmbeddingBagsCodegen(
        [place] * shape.tables, optimizer=kinds[optimizer], learning_rate=LR, eps=1e-10
    )
    bags.init_embedding_weights_uniform(-0.05, 0.05)
    grad = torch.randn(shape.batch, shape.tables * shape.dim, generator=torch.manual_seed(0)) * 1e-3

    def step(batch: Batch) -> None:
        bags(batch.table_major, batch.offsets).backward(grad)

    return step


def contenders(shape: Shape, optimizer: str) -> dict[str, Callable[[Batch], object]]:
    specs = {
        "SGD": ek.SGD(lr=LR),
        "Adagrad": ek.Adagrad(lr=LR),
        "row-wise": ek.RowWiseAdagrad(lr=LR),
    }
    found = {"emberkeep": emberkeep_step(shape, specs[optimizer])}
    peers = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}
    if optimizer in peers:
        found["torch stacked"] = torch_step(shape, peers[optimizer], stacked=True)
        if shape.dim == MAIN.dim and shape.rows == MAIN.rows:
            found["torch"] = torch_step(shape, peers[optimizer], stacked=False)
    fbgemm = fbgemm_step(shape, optimizer)
    if fbgemm is not None:
        found["fbgemm"] = fbgemm
    return found


def medians_ms(
    steps: dict[str, Callable[[Batch], object]], batches: list[Batch], rounds: int
) -> dict[str, float]:
    """Median milliseconds of a step. The contenders take turns of `TURN` steps each.

    A turn begins with a step that is not counted: the contender before leaves threads that spin
    for work for a while, and caches full of its own rows.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for batch in batches:
            step(batch)
    for turn in range(rounds):
        order = list(steps) if turn % 2 == 0 else list(reversed(steps))
        for name in order:
            for count in range(TURN + 1):
                batch = batches[(turn * TURN + count) % len(batches)]
                start = time.perf_counter()
                steps[name](batch)
                if count:
                    taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def copy_bytes_per_second() -> float:
    """Bytes read plus bytes written per second, copying with as many threads as the kernels use."""
    source, target = np.ones(2**25, np.float64), np.zeros(2**25, np.float64)
    pool, best = shared(), 0.0
    parts = spans(source.size, pool.threads)
    for _ in range(5):
        start = time.perf_counter()
        pool.run([lambda a=a, b=b: np.copyto(target[a:b], source[a:b]) for a, b in parts])
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start))
    return best


def least_bytes(shape: Shape, optimizer: str, unique: float) -> float:
    """What any implementation must move: ids in, rows in, bags out, gradients in, rows updated."""
    lookups = shape.tables * shape.batch * shape.hots
    bags = 2 * shape.tables * shape.batch * shape.dim * 4
    row = shape.dim * 4
    planes = {"SGD": row, "Adagrad": 2 * row, "row-wise": row + 4}[optimizer]
    return lookups * 8 + bags + unique * (row + 2 * planes)


def main() -> None:
    given = options(__file__, __doc__ or "")
    rounds = 5 if given.quick else 20
    bandwidth = copy_bytes_per_second()
    rows: list[list[str]] = []
    taken: dict[tuple[str, str], float] = {}
    figures: dict[str, float] = {}
    for shape in [MAIN] if given.quick else [MAIN, *EXTRA]:
        batches = [Batch(shape, number) for number in range(BATCHES if shape is MAIN else 4)]
        unique = float(np.mean([batch.unique for batch in batches]))
        for optimizer in ("SGD", "Adagrad", "row-wise") if shape is MAIN else ("Adagrad",):
            steps = contenders(shape, optimizer)
            milliseconds = medians_ms(steps, batches, rounds if shape is MAIN else 3)
            ours = milliseconds["emberkeep"]
            limit = least_bytes(shape, optimizer, unique) / bandwidth * 1e3
            for name, value in milliseconds.items():
                if shape is MAIN:
                    taken[optimizer, name] = value / ours
                rows.append(
                    [str(shape), optimizer, name, f"{value:.2f}", f"{value / ours:.1f}×",
                     f"{value / limit:.1f}×"]
                )  # fmt: skip
            if shape is MAIN and optimizer == "Adagrad":
                figures["adagrad_vs_memory_limit"] = ours / limit
            del steps
            gc.collect()
    for figure, (optimizer, name) in {
        "adagrad_vs_torch_stacked": ("Adagrad", "torch stacked"),
        "sgd_vs_torch_stacked": ("SGD", "torch stacked"),
        "adagrad_vs_torch": ("Adagrad", "torch"),
        "sgd_vs_torch": ("SGD", "torch"),
        "sgd_vs_fbgemm": ("SGD", "fbgemm"),
        "rowwise_vs_fbgemm": ("row-wise", "fbgemm"),
    }.items():
        if (optimizer, name) in taken:
            figures[figure] = taken[optimizer, name]
    report(
        given,
        config={
            "tables": MAIN.tables, "rows": MAIN.rows, "dim": MAIN.dim, "batch": MAIN.batch,
            "ids": f"Zipf {SKEW}", "repeats": rounds * TURN, "threads": shared().threads,
            "torch_threads": torch.get_num_threads(),
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
        },
        figures=figures,
        columns=["shape", "optimizer", "who", "ms per step", "to ours", "to the memory limit"],
        rows=rows,
        notes=[NOTE],
        packages=["fbgemm-gpu-cpu"],
    )  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

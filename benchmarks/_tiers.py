"""Who trains in `tier.py`: rows in memory, behind our cache, behind others, behind none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import emberkeep as ek
from _baselines import Kind, LocalOf, StorageHash
from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import Synthetic
from emberkeep.models import DLRM, KAGGLE, DeepFM
from emberkeep.tables import Optimizer
from emberkeep.tiers.tiered_slab import TieredSlab

LR = 0.01
# What a frame costs beside its planes.
_FRAME_NBYTES = 48
# Rows that are written at a time when tables are filled.
_FILLED = 1 << 16
Batch = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is trained: which network over how many rows, in which batches."""

    network: str
    rows: int
    dim: int
    batch: int
    optimizer: Optimizer

    @property
    def width(self) -> int:
        """DeepFM has the first-order weight of an id beside its vector."""
        return self.dim + (self.network == "DeepFM")

    @property
    def row_nbytes(self) -> int:
        """What a row takes in memory, as a frame or in a table."""
        return 4 * (self.width + sum(self.optimizer.planes(self.width).values())) + _FRAME_NBYTES

    def tables(self, source: Synthetic, tier: ek.Tier | None) -> list[ek.Table]:
        return [
            ek.Table(name, rows=rows, dim=self.width, tier=tier)
            for name, rows in source.rows.items()
        ]

    def model(self, bags: ek.EmbeddingBags) -> DLRM | DeepFM:
        return DeepFM(bags, dim=self.dim) if self.network == "DeepFM" else DLRM(bags, KAGGLE)

    def fill(self, cluster: LocalCluster) -> None:
        """Writes every row of every table once."""
        random = np.random.default_rng(0)
        weight = random.random((_FILLED, self.width), np.float32) * np.float32(0.1)
        planes = {"weight": weight}
        for name, width in self.optimizer.planes(self.width).items():
            planes[name] = np.ones((_FILLED, width), np.float32)
        for table in cluster.tables:
            for start in range(0, table.slots, _FILLED):
                ids = np.arange(start, min(table.slots, start + _FILLED))
                cluster.install(table.name, ids, {n: v[: ids.size] for n, v in planes.items()})


KAGGLE_SHAPE = Shape(
    network="DLRM", rows=2_000_000, dim=KAGGLE.dim, batch=2048, optimizer=ek.Adagrad(lr=LR)
)
# The paper's: DeepFM, batches of 4096, vectors of 64 (section VI-A).
PAPER_SHAPE = Shape(
    network="DeepFM", rows=4_000_000, dim=64, batch=4096, optimizer=ek.RowWiseAdagrad(lr=LR)
)


class Contender:
    """A model over one kind of embeddings, and its place in the stream of batches.

    The network is computed, or with `wait_s` a step waits for as long in its place, as the process
    that feeds a GPU does: whatever `prefetch` does, and threads beside it, is done meanwhile. The
    gradient is then a constant one.
    """

    def __init__(
        self, shape: Shape, source: Synthetic, tier: ek.Tier | None = None,
        kind: Kind = "pipelined", *, wait_s: float | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.shape, self.source, self.wait_s = shape, source, wait_s
        self.bags = ek.EmbeddingBags(
            shape.tables(source, tier), optimizer=shape.optimizer, cluster=LocalOf(kind)
        )
        self.cluster.choose_rows()  # those that the benchmark has filled the file with
        self.model = shape.model(self.bags)
        parts = self.model.named_parameters()
        dense = [value for name, value in parts if not name.startswith("embeddings.")]
        self.optimizers = [self.bags.optimizer, torch.optim.Adagrad(dense, lr=LR)]
        self.loss = nn.BCEWithLogitsLoss()
        random = torch.Generator().manual_seed(1)
        self.grad = 1e-3 * torch.randn(shape.batch, len(source.rows), shape.width, generator=random)
        self.embedding_s = 0.0
        self.batch = 1  # of the last checkpoint
        for owner, name in (
            (self.bags, "forward"), (self.bags, "prefetch"), (self.bags.optimizer, "step")
        ):  # fmt: skip
            setattr(owner, name, self._timed(getattr(owner, name)))
        self.start_over()

    def start_over(self) -> None:
        """Goes back to the first batch."""
        self.number = 0
        self.next = self._read()

    @property
    def cluster(self) -> LocalCluster:
        cluster = self.bags.cluster
        assert isinstance(cluster, LocalCluster)
        return cluster

    @property
    def slab(self) -> TieredSlab:
        slab = self.cluster.shards[0].slabs[0]
        assert isinstance(slab, TieredSlab)
        return slab

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.embedding_s += time.perf_counter() - start

        return timed

    def _read(self) -> Batch:
        size = self.shape.batch
        batch = self.source.batch(self.number * size, size)
        self.number += 1
        ids = {name: torch.from_numpy(np.asarray(given)) for name, given in batch.ids.items()}
        return torch.from_numpy(batch.dense), ids, torch.from_numpy(batch.labels)

    def train(self, steps: int, *, before: Callable[[int], None] | None = None) -> Taken:
        """What a step takes, over so many; the batches are made before the clock starts.

        `before` is called with the number of each step, within the time.
        """
        batches = [self.next, *(self._read() for _ in range(steps))]
        self.next = batches[-1]
        start, cores = time.perf_counter(), time.process_time()
        for i in range(steps):
            if before is not None:
                before(i)
            self._step(batches[i], batches[i + 1])
        taken, cores = time.perf_counter() - start, time.process_time() - cores
        return Taken(taken / steps * 1e3, cores / steps * 1e3)

    def _step(self, batch: Batch, following: Batch) -> None:
        dense, ids, labels = batch
        vectors = self.bags(ids)
        end = time.perf_counter() + (self.wait_s or 0.0)
        self.bags.prefetch(following[1])
        if self.wait_s is None:
            self.loss(self.model.head(dense, vectors), labels).backward()
        else:
            time.sleep(max(0.0, end - time.perf_counter()))
            vectors.backward(self.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def rows_of(self, batches: int) -> list[bytes]:
        """All planes of all rows of the last so many batches that it trained on."""
        last = self.number - 1  # one was read ahead
        size, found = self.shape.batch, []
        sample = self.source.batch((last - batches) * size, batches * size)
        for name in self.source.rows:
            ids = np.unique(np.asarray(sample.ids[name]))
            found += [values.tobytes() for values in self.cluster.read(name, ids).values()]
        return found

    def close(self) -> None:
        for shard in self.cluster.shards:
            shard.kill()


@dataclass(frozen=True, slots=True)
class Taken:
    """Milliseconds of a step, by the clock and of all cores together."""

    ms: float
    core_ms: float


def warm_up(contenders: Sequence[Contender], *, most: int = 100) -> None:
    """Fills caches with what the stream of batches uses, and lets evictions begin.

    Ends when every cache is full, or after `most` pieces of the stream, each of several batches.
    Meanwhile everybody reads as fast as the disk can.
    """
    behind = [one for one in contenders if one.cluster.tiered]
    cached = [one for one in behind if not isinstance(one.slab, StorageHash)]
    deep = [one.slab.loads.reads.deep for one in behind]
    for one in behind:
        one.slab.loads.reads.deep = True
    shape, source = contenders[0].shape, contenders[0].source
    samples = min(8 * shape.batch, min(one.slab.frames.count for one in behind) // 4)
    for piece in range(most):
        batch = source.batch((1 << 40) + piece * samples, samples)
        unique = [np.unique(np.asarray(batch.ids[name])) for name in source.rows]
        wanted = [RowIds(np.concatenate(unique), np.cumsum([0, *map(len, unique)]))]
        grads = [np.full((wanted[0].ids.size, shape.width), 1e-6, np.float32)]
        for one in contenders:
            one.cluster.fetch(wanted)
            one.cluster.push(wanted, grads, lr=LR)
        if all(one.slab.frames.free < 4096 for one in cached):
            break
    for one, before in zip(behind, deep, strict=True):
        one.slab.loads.reads.deep = before


class Tiering:
    """Checkpoints of the tier itself: requested every so many steps, committed beside training."""

    def __init__(self, one: Contender, every: int) -> None:
        self._one, self._every, self._steps = one, every, 0
        self._commit: threading.Thread | None = None

    def __call__(self, _: int) -> None:
        if self._steps % self._every == 0:
            self.finish()
            self._one.batch += 1
            prepared = self._one.cluster.prepare_tiers(self._one.batch)
            self._commit = threading.Thread(target=self._when, args=(prepared,))
            self._commit.start()
        self._steps += 1

    def _when(self, prepared: Sequence[Any]) -> None:
        for future in prepared:
            future.result()
        self._one.cluster.commit_tiers()

    def first(self) -> None:
        """Saves all that was ever trained, so that later ones find what changed since."""
        self(0)
        self.finish()
        self._steps = 0

    def finish(self) -> None:
        """Waits for the checkpoint under way."""
        if self._commit is not None:
            self._commit.join()
            self._commit = None


class Dumping:
    """The incremental checkpoint of an ordinary cache: what changed, while training waits."""

    def __init__(self, one: Contender, every: int, path: Path) -> None:
        self._one, self._every, self._steps = one, every, 0
        self._path = path

    def __call__(self, _: int) -> None:
        if self._steps % self._every == 0:
            self._dump()
        self._steps += 1

    def _dump(self) -> None:
        slab = self._one.slab
        changed = np.flatnonzero(np.unpackbits(slab.dirty.view(np.uint8), bitorder="little"))
        with slab.lock:
            planes = slab._held_by(changed)
            slab.dirty[:] = 0
        with open(self._path, "wb") as file:
            for values in (changed, *planes.values()):
                file.write(values.data)
            file.flush()
            os.fsync(file.fileno())

    def first(self) -> None:
        """Takes all that was ever trained for saved, so that later ones find what changed since."""
        self._one.slab.dirty[:] = 0

    def finish(self) -> None:
        """Nothing is ever under way."""


def probe(one: Contender, reads: int) -> float:
    """Random reads per second of the disk, made as this contender makes them."""
    slab = one.slab
    random = np.random.default_rng(1)
    rows = np.unique(random.choice(np.flatnonzero(slab.positions), reads))
    records = slab.positions[rows].astype(np.int64) - 1
    # One record of each block, so that every record is a read of its own.
    records, first = np.unique(records // slab.log.per_block, return_index=True)
    rows = rows[first]
    records = slab.positions[rows].astype(np.int64) - 1
    framed = [plane for name, plane in slab.planes.items() if name != "used"]
    held = [np.empty((rows.size, p.shape[1]), p.dtype) for p in framed]
    layout = slab.log.layout.onto(held)
    turn = slab.log.begin_reading()
    start = time.perf_counter()
    slab.loads.reads.read(
        records, rows, np.arange(rows.size), np.empty(rows.size, np.int64), layout
    )
    taken = time.perf_counter() - start
    slab.log.end_reading(turn)
    slab.log.reads -= rows.size
    return rows.size / taken

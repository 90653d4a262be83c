"""Who trains in `tier.py`: rows in memory, behind our cache, behind an ordinary one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
import torch
from torch import nn

import emberkeep as ek
from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import Synthetic
from emberkeep.models import DLRM, KAGGLE
from emberkeep.tiers.reads import Reads
from emberkeep.tiers.tiered_slab import TieredSlab

BATCH, DIM, LR = 2048, KAGGLE.dim, 0.01
Batch = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]
Kind = Literal["pipelined", "inline", "ordinary"]


def tables(source: Synthetic, tier: ek.Tier | None) -> list[ek.Table]:
    return [ek.Table(name, rows=rows, dim=DIM, tier=tier) for name, rows in source.rows.items()]


class Contender:
    """A model over one kind of embeddings, and its place in the stream of batches.

    A tier is *pipelined* as it is made; *inline*, everything that upkeep does happens inside pull
    and push; *ordinary*, misses are also read as they are met, one at a time by each thread.
    """

    def __init__(
        self, source: Synthetic, tier: ek.Tier | None = None, kind: Kind = "pipelined"
    ) -> None:
        torch.manual_seed(0)
        self.bags = ek.EmbeddingBags(tables(source, tier), optimizer=ek.Adagrad(lr=LR))
        self.model = DLRM(self.bags, KAGGLE)
        dense = [*self.model.bottom.parameters(), *self.model.top.parameters()]
        self.optimizers = [self.bags.optimizer, torch.optim.Adagrad(dense, lr=LR)]
        self.loss = nn.BCEWithLogitsLoss()
        self.source, self.number = source, 0
        self.ahead = kind == "pipelined"
        self.embedding_s = 0.0
        self.batch = 1  # of the last checkpoint
        if tier is not None and kind != "pipelined":
            OrdinaryCache(self.slab, one_by_one=kind == "ordinary")
        for owner, name in (
            (self.bags, "forward"), (self.bags, "prefetch"), (self.bags.optimizer, "step")
        ):  # fmt: skip
            setattr(owner, name, self._timed(getattr(owner, name)))
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
        batch = self.source.batch(self.number * BATCH, BATCH)
        self.number += 1
        ids = {name: torch.from_numpy(np.asarray(given)) for name, given in batch.ids.items()}
        return torch.from_numpy(batch.dense), ids, torch.from_numpy(batch.labels)

    def train(self, steps: int, *, before: Callable[[int], None] | None = None) -> float:
        """Milliseconds of a step, over so many; the batches are made before the clock starts.

        `before` is called with the number of each step, within the time.
        """
        batches = [self.next, *(self._read() for _ in range(steps))]
        self.next = batches[-1]
        start = time.perf_counter()
        for i in range(steps):
            if before is not None:
                before(i)
            self._step(batches[i], batches[i + 1])
        return (time.perf_counter() - start) / steps * 1e3

    def _step(self, batch: Batch, following: Batch) -> None:
        dense, ids, labels = batch
        vectors = self.bags(ids)
        if self.ahead:
            self.bags.prefetch(following[1])
        self.loss(self.model.head(dense, vectors), labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def close(self) -> None:
        for shard in self.cluster.shards:
            shard.kill()


def warm_up(contenders: Sequence[Contender], *, most: int = 100) -> None:
    """Fills caches with what the stream of batches uses, and lets evictions begin.

    Ends when every cache is full, or after `most` pieces of the stream, each of several batches.
    Meanwhile everybody reads as fast as the disk can.
    """
    deep = [one.slab.loads.reads.deep for one in contenders]
    for one in contenders:
        one.slab.loads.reads.deep = True
    source = contenders[0].source
    samples = min(8 * BATCH, min(one.slab.frames.count for one in contenders) // 4)
    for piece in range(most):
        batch = source.batch((1 << 40) + piece * samples, samples)
        unique = [np.unique(np.asarray(batch.ids[name])) for name in source.rows]
        wanted = [RowIds(np.concatenate(unique), np.cumsum([0, *map(len, unique)]))]
        grads = [np.full((wanted[0].ids.size, DIM), 1e-6, np.float32)]
        for one in contenders:
            one.cluster.fetch(wanted)
            one.cluster.push(wanted, grads, lr=LR)
        if all(one.slab.frames.free < 4096 for one in contenders):
            break
    for one, before in zip(contenders, deep, strict=True):
        one.slab.loads.reads.deep = before


class OrdinaryCache:
    """Makes a tiered slab an ordinary cache: a list of uses, kept inside pull and push.

    The list is linked through arrays by compiled code. Misses are read and victims written
    before the pull goes on; those of one batch are written together.
    """

    def __init__(self, slab: TieredSlab, *, one_by_one: bool) -> None:
        self._slab = slab
        slab._upkeep.stop()
        if one_by_one:
            slab.loads.reads = Reads(slab.log, threads=slab.pool.threads)
            slab.loads.reads.deep = False
        count = slab.frames.count
        # Frame `count` stands for both ends; -1: in no list.
        self._older = np.full(count + 1, -1, np.int64)
        self._newer = np.full(count + 1, -1, np.int64)
        self._older[count] = self._newer[count] = count
        self._fetch, self._check = slab.fetch, slab.check_push
        slab.fetch = self.fetch  # type: ignore[method-assign]
        slab.check_push = self.check_push  # type: ignore[method-assign]
        slab.frames.oldest = self.oldest  # type: ignore[method-assign]

    def fetch(self, wanted: Any, *, ahead: bool = False) -> None:
        self._fetch(wanted)
        self._touch(wanted)

    def check_push(self, wanted: Any, *given: Any, **named: Any) -> Any:
        checked = self._check(wanted, *given, **named)
        self._touch(wanted)
        return checked

    def oldest(self, count: int, before: int) -> np.ndarray:
        frames = self._slab.frames
        out = np.empty(count, np.int64)
        taken = _take_oldest(self._older, self._newer, frames.busy, frames.used, before, out)
        return out[:taken]

    def _touch(self, wanted: Any) -> None:
        found, _ = self._slab.resolve(wanted)
        _move_to_end(self._older, self._newer, self._slab.frames.of(found))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _move_to_end(older: np.ndarray, newer: np.ndarray, frames: np.ndarray) -> None:
    end = older.size - 1
    for frame in frames:
        if frame < 0:
            continue
        if older[frame] >= 0:
            newer[older[frame]] = newer[frame]
            older[newer[frame]] = older[frame]
        last = older[end]
        older[frame], newer[frame] = last, end
        newer[last] = frame
        older[end] = frame


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _take_oldest(
    older: np.ndarray, newer: np.ndarray, busy: np.ndarray, used: np.ndarray, before: int,
    out: np.ndarray,
) -> int:  # fmt: skip
    end = older.size - 1
    found = 0
    frame = newer[end]
    while frame != end and found < out.size:
        following = newer[frame]
        if busy[frame] == 0 and used[frame] < before:
            newer[older[frame]] = following
            older[following] = older[frame]
            older[frame] = newer[frame] = -1
            out[found] = frame
            found += 1
        frame = following
    return found


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

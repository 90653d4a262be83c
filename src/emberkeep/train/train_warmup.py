"""Runs every kernel once on tiny tables, so that all of them are compiled and cached."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import get_args

import numpy as np
import torch

from emberkeep._types import RowIds
from emberkeep.blobs import BlobStore, LocalStore, MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import local
from emberkeep.data import Synthetic
from emberkeep.nn.embeddings import EmbeddingBags, Embeddings
from emberkeep.repository import KeepAll, Repository
from emberkeep.rows.priority import Kind, Priority
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.server.server_warmup import OPTIMIZERS
from emberkeep.server.server_warmup import warm_up as serve_once
from emberkeep.tables import SGD, Adagrad, Adam, Normal, Optimizer, Table, Tier
from emberkeep.train.work_warmup import work_parts

_OPTIMIZERS: tuple[Optimizer, ...] = (*OPTIMIZERS, Adam(lr=0.1, step="row"))


def warm_up(*, reverse: bool = False) -> None:
    """Trains, serves, ranks, saves and restores a few rows, and brings them back from parity.

    Two processes that do so at once, one of them in reverse, compile about half each.
    """
    parts = list(_parts())
    for part in reversed(parts) if reverse else parts:
        part()


def _parts() -> Iterator[Callable[[], object]]:
    for optimizer in _OPTIMIZERS:
        yield partial(serve_once, (optimizer,))
    for optimizer in _OPTIMIZERS:
        yield partial(_train, optimizer)
    for kind in get_args(Kind):
        yield partial(_rank, Priority(kind=kind, fraction=0.5, period=1))
    yield lambda: Synthetic(samples=16, rows_total=200).batch(0, 16)
    yield _tier
    yield _save_files
    yield partial(
        _save, VersionSpec(layout="one_shot", bits=8, quantize_optimizer=True), MemoryStore()
    )
    yield from work_parts()


def _train(optimizer: Optimizer) -> None:
    """On fixed and dynamic tables, pooled and not."""
    ids = torch.arange(4)
    tables = [
        Table("fixed", rows=8, dim=4),
        Table("dynamic", capacity=8, dim=4, init=Normal(), on_full="evict_oldest"),
    ]
    bags = EmbeddingBags(tables, optimizer=optimizer)
    for dynamic in (ids, (ids, torch.tensor([0, 1, 1, 3]))):
        bags({"fixed": ids, "dynamic": dynamic}).sum().backward()
        bags.optimizer.step()
        bags.optimizer.zero_grad()
    rows = Embeddings(tables, optimizer=optimizer)
    sum(out.sum() for out in rows({"fixed": ids, "dynamic": ids}).values()).backward()
    rows.optimizer.step()


def _save_files() -> None:
    """A grid in files, which are read otherwise than objects."""
    with tempfile.TemporaryDirectory() as directory:
        _save(VersionSpec(layout="grid"), LocalStore(directory))


def _save(spec: VersionSpec, store: BlobStore) -> None:
    """A few versions, brought back from where they were saved."""
    tables = [Table("fixed", rows=64, dim=8), Table("dynamic", capacity=64, dim=8)]
    cluster = local(shards=2, threads=1).open(tables, Adagrad(lr=0.1), seed=0)
    repository = Repository.create(store, schema=cluster.schema())
    settings = SaveSettings(retention=KeepAll(), grace=timedelta(0), threads=1, nice=0)
    keeper = Checkpointer(repository, cluster, spec=spec, settings=settings)
    random = np.random.default_rng(0)
    for step in range(1, 4):
        ids = np.concatenate([np.arange(8 * step), 1000 * np.arange(8)])
        wanted = [RowIds(ids, np.array([0, 8 * step, ids.size]))]
        cluster.push(wanted, [random.standard_normal((ids.size, 8)).astype(np.float32)], lr=0.1)
        cluster.delete("dynamic", np.array([1000 * step]))
        keeper.save(step)
        keeper.wait()
    keeper.settle()
    keeper.restore()
    keeper.close()
    cluster.close()


def _tier() -> None:
    """Rows that are written to files and read from them."""
    with tempfile.TemporaryDirectory() as directory:
        table = Table("t", rows=20_000, dim=16, tier=Tier(directory, memory="600KB"))
        cluster = local(threads=1).open([table], Adagrad(lr=0.1), seed=0)
        for start in (0, 8_000, 4_000, 0):
            ids = [RowIds(np.arange(start, start + 2_000), np.array([0, 2_000]))]
            cluster.push(ids, [np.ones_like(cluster.pull(ids)[0])], lr=0.1)
        cluster.close()


def _rank(priority: Priority) -> None:
    """Saves the rows that matter most, once and again after a failure."""
    tables = [Table("fixed", rows=64, dim=4), Table("dynamic", capacity=64, dim=4)]
    bags = EmbeddingBags(tables, optimizer=SGD(lr=0.1), cluster=local(shards=2))
    bags.cluster.track(priority)
    ids = torch.arange(32)
    for advanced in ((), (PRIORITISED,)):
        bags({"fixed": ids, "dynamic": ids}).sum().backward()
        bags.optimizer.step()
        for rows in (rows for shard in bags.cluster.freeze(PRIORITISED, 2**20) for rows in shard):
            for _ in rows.chunks(64):
                pass
            rows.close(advanced)

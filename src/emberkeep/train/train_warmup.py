"""Runs every kernel once on tiny tables, so that all of them are compiled and cached."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

import torch

from emberkeep.cluster.local.local_cluster import local
from emberkeep.data import Synthetic
from emberkeep.nn.embeddings import EmbeddingBags, Embeddings
from emberkeep.rows.priority import Kind, Priority
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.server.server_warmup import OPTIMIZERS
from emberkeep.server.server_warmup import warm_up as serve_once
from emberkeep.tables import SGD, Adam, Normal, Optimizer, Table
from emberkeep.train.work_warmup import warm_work

_OPTIMIZERS: tuple[Optimizer, ...] = (*OPTIMIZERS, Adam(lr=0.1, step="row"))


def warm_up() -> None:
    """Trains a few rows with every optimizer, on fixed and dynamic tables, pooled and not; serves
    some, and brings them back from parity."""
    serve_once(_OPTIMIZERS)
    Synthetic(samples=16, rows_total=200).batch(0, 16)
    ids = torch.arange(4)
    for optimizer in _OPTIMIZERS:
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
    for kind in get_args(Kind):
        _rank(Priority(kind=kind, fraction=0.5, period=1))
    with tempfile.TemporaryDirectory() as directory:
        warm_work(Path(directory))


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

"""Runs what a served shard runs once on a tiny one, so that its first requests do not wait for
kernels to be loaded, or compiled where nobody did before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import product
from typing import Literal

import numpy as np

from emberkeep._types import RowIds
from emberkeep.cluster.local.local_cluster import local
from emberkeep.cluster.shard import Shard
from emberkeep.erasure.codes import Parity
from emberkeep.kernels import hash_index
from emberkeep.rows.lookup import merge, unique_ids
from emberkeep.runtime.pool import Pool
from emberkeep.tables import SGD, Adagrad, Adam, Momentum, Optimizer, RowWiseAdagrad, Table

OPTIMIZERS: tuple[Optimizer, ...] = (
    SGD(lr=0.1),
    Momentum(lr=0.1),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
)


def warm_up(optimizers: Sequence[Optimizer] = OPTIMIZERS) -> None:
    """Pulls, pushes, freezes, deletes and loses a few rows with each optimizer."""
    pool = Pool(1)
    ids = RowIds(np.arange(4), np.array([0, 2, 4]))
    unique_ids(ids.ids, ids.offsets, pool)
    rows_UD = np.ones((4, 4), np.float32)
    merge(ids, rows_UD, ids, rows_UD, pool)
    counts_ST, order = np.zeros((1, 2), np.int64), np.empty(4, np.int64)
    hash_index.route(ids.ids, ids.offsets, np.array([False, True]), 1, counts_ST, order)
    ends: tuple[Literal["error", "evict_oldest"], ...] = ("error", "evict_oldest")
    for optimizer, on_full in product(optimizers, ends):
        tables = [
            Table("fixed", rows=8, dim=4),
            Table("dynamic", capacity=8, dim=4, on_full=on_full),
        ]
        shard = Shard(tables, optimizer, pool=pool)
        shard.track()
        shard.pull([ids], [np.empty((4, 4), np.float32)])
        for _ in range(2):
            shard.apply(shard.check([ids], [rows_UD]), 0.1)
            frozen = shard.freeze(None, 2**20)
            shard.apply(shard.check([ids], [rows_UD]), 0.1)
            for snapshot in frozen:
                for _chunk in snapshot.chunks(4096, threading.Event()):
                    pass
                snapshot.close(())
        shard.install("fixed", *shard.read_all("fixed"))
        shard.delete("dynamic", np.array([3]))
    for optimizer in optimizers:
        _warm_parity(optimizer)


def _warm_parity(optimizer: Optimizer) -> None:
    """Pushes, loses a shard and brings it back, with fixed tables alone and with dynamic ones."""
    for table in (Table("t", rows=16, dim=4), Table("t", capacity=16, dim=4)):
        spec = local(shards=3, threads=1, parity=Parity(k=1, r=2))
        cluster = spec.open([table], optimizer, seed=0)
        ids = [RowIds(np.arange(8), np.array([0, 8]))]
        for _ in range(2):
            cluster.push(ids, [np.ones((8, 4), np.float32)], lr=0.1)
        cluster.kill(1)
        cluster.pull(ids)
        cluster.rebuild()
        cluster.close()

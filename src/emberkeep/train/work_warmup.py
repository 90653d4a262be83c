"""Runs once, on tiny tables, whatever a keeper, a follower and the commands over a repository run:
the kernels behind versions, grids, tiers and files of samples."""

from __future__ import annotations

import gzip
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import local
from emberkeep.data import Category, Criteo, Parquet, Synthetic
from emberkeep.data.synthetic import skewed_ids
from emberkeep.erasure.codes import Parity
from emberkeep.inference.follower import Follower
from emberkeep.inspect.difference import compare
from emberkeep.inspect.summary import check
from emberkeep.keeper.keeper import Keeper
from emberkeep.kernels import galois, job_events, log_index, log_records
from emberkeep.nn.embeddings import EmbeddingBags
from emberkeep.repository import KeepAll, Repository
from emberkeep.repository.policies import LAYOUTS
from emberkeep.runtime.pool import Job, Pool
from emberkeep.strategies import Strategy, incremental
from emberkeep.tables import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, Table, Tier

_BATCH = 300
_NOW = SaveSettings(grace=timedelta(0))


def work_parts() -> Iterator[Callable[[], object]]:
    """Parts of that work, which may run in any order."""
    optimizers = (Adam(lr=0.1, step="row"), SGD(lr=0.1))
    parts: list[Callable[[], object]] = [
        _samples, _lookups, *(partial(_versions, spec) for spec in _specs()), _parity,
        *(partial(_tier, optimizer) for optimizer in optimizers), _torch_tables, _rare,
    ]  # fmt: skip
    for part in parts:
        yield partial(_quietly, part)


def _quietly(part: Callable[[], object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a keeper without a reader, and the like
        part()


def _samples() -> None:
    with tempfile.TemporaryDirectory() as directory:
        _read_samples(Path(directory))


def _read_samples(directory: Path) -> None:
    Synthetic(samples=64, rows_total=2000).batch(0, 64)
    skewed_ids(100, 10)
    line = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))])
    criteo = directory / "criteo.txt.gz"
    criteo.write_bytes(gzip.compress(f"{line}\n".encode() * 8))
    for sizes in (100, None):
        source = Criteo(criteo, sizes=sizes)
        source.open(0).read(4)
        source.open(3).read(2)
        source.count()
    columns: dict[str, Any] = {"i": [1, 2, None], "s": ["a", "", None], "x": ["1", "", "2"]}
    columns["l"] = [[1, 2], [], [3]]
    pq.write_table(pa.table(columns), directory / "samples.parquet")
    for size in (100, None):
        categories = [Category(column=name, size=size) for name in "isl"]
        Parquet(directory / "samples.parquet", label=None, dense=["x"], categories=categories).open(
            0
        ).read(3)


def _lookups() -> None:
    """Every pooling, with and without weights, for rows that are found directly and by index."""
    bags = (torch.arange(6), torch.tensor([0, 2, 2]))
    for kind in ({"rows": 16}, {"capacity": 16}):
        for shards in (1, 2):
            tables = [
                Table(pooling, dim=4, pooling=pooling, **kind)  # type: ignore[arg-type]
                for pooling in ("sum", "mean", "max")
            ]
            module = EmbeddingBags(
                tables, optimizer=SGD(lr=0.1, max_norm=1.0), cluster=local(shards=shards)
            )
            batches: list[Any] = [bags, torch.arange(6).reshape(3, 2), torch.arange(3)]
            for batch in batches:
                for scaled in (False, True):
                    count = batch[0].numel() if isinstance(batch, tuple) else batch.numel()
                    weights = torch.ones(count, requires_grad=True)
                    given = {"per_sample_weights": {"sum": weights}} if scaled else {}
                    module({t.name: batch for t in tables}, **given).sum().backward()
                module.optimizer.step()
            module.eval()
            module({t.name: bags for t in tables})


def _specs() -> Iterator[VersionSpec]:
    for layout in LAYOUTS:
        yield VersionSpec(layout=layout)
    for bits in (8, 4, 3, 2):
        yield VersionSpec(layout="intermittent", bits=bits, quantize_optimizer=True)
    yield VersionSpec(layout="grid", bits=4, quantize_optimizer=True)


def _run(optimizer: Optimizer, tier: Tier | None = None, shards: int = 2) -> EmbeddingBags:
    tables = [
        Table("fixed", rows=2000, dim=4, tier=tier),
        Table("dynamic", capacity=1500, dim=4, on_full="evict_oldest", tier=tier),
        Table("wide", rows=500, dim=8, tier=tier, optimizer=RowWiseAdagrad(lr=0.1)),
    ]
    return EmbeddingBags(tables, optimizer=optimizer, cluster=local(shards=shards), output="dict")


def _train(bags: EmbeddingBags, step: int) -> None:
    random = np.random.default_rng(step)
    ids = {
        table.name: torch.from_numpy(random.integers(0, table.rows or 2**40, _BATCH))
        for table in bags.tables
    }
    sum(out.square().sum() for out in bags(ids).values()).backward()
    bags.optimizer.step()


def _versions(spec: VersionSpec) -> None:
    """Saves, restores, follows, compares and verifies."""
    store = MemoryStore()
    bags = _run(Adagrad(lr=0.1))
    keeper = Keeper(
        store,
        bags,
        bags.optimizer,
        strategy=Strategy(spec=spec, retention=KeepAll()),
        settings=_NOW,
    )
    keeper.resume()
    for step in range(5):
        _train(bags, step)
        if step == 3:
            bags.delete("fixed", torch.arange(50))
            bags.delete("dynamic", bags.touched_ids("dynamic")[:20])
        keeper.step()
        keeper.save()
        keeper.wait()
        if step == 2:
            follower = Follower(store)
            follower.refresh()
    keeper.resume()
    keeper.resume(2)
    keeper.close(save=False)
    follower.refresh()
    for table in ("fixed", "dynamic"):
        follower.lookup(table, np.arange(100))
    repository, pool = Repository.open(store), Pool(1)
    compare(repository, repository.version(2), repository.version(4), pool)
    check(repository, [repository.version(4)], pool=pool)
    bags.cluster.digest("fixed")
    other = _run(Adagrad(lr=0.1), shards=1)
    Keeper(MemoryStore(), other, other.optimizer).resume(source=store, partial=True)


def _parity() -> None:
    for r in (1, 2):
        for background in (False, True):
            parity = Parity(k=2, r=r, background=background)
            bags = EmbeddingBags(
                [Table("fixed", rows=600, dim=4), Table("dynamic", capacity=6000, dim=4)],
                optimizer=Adagrad(lr=0.1), cluster=local(shards=4, parity=parity), output="dict",
            )  # fmt: skip
            for step in range(3):
                _train(bags, step)
            bags.cluster.kill(*range(r))  # type: ignore[attr-defined]
            _train(bags, 3)
            bags.cluster.rebuild()  # type: ignore[attr-defined]
            bags.cluster.clear()
            bags.cluster.close()  # type: ignore[attr-defined]


def _tier(optimizer: Optimizer) -> None:
    """Rows in files, more of them than fit in memory; committed, and opened again."""
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            _train_in(Path(directory), optimizer)


def _train_in(path: Path, optimizer: Optimizer) -> None:
    bags = _run(optimizer, Tier(path, memory="800kB"), shards=1)
    keeper = Keeper(None, bags, bags.optimizer, strategy=incremental(every=10**9))
    keeper.resume()
    for step in range(6):
        _train(bags, step)
        bags.delete("dynamic", bags.touched_ids("dynamic")[:5])
        keeper.step()
        keeper.save()
        keeper.wait()
    bags.rows("fixed", torch.arange(2000))
    keeper.close()
    bags.cluster.close()  # type: ignore[attr-defined]


def _torch_tables() -> None:
    model = torch.nn.Embedding(200, 4, sparse=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    keeper = Keeper(MemoryStore(), model, optimizer)
    keeper.resume()
    model(torch.arange(20)).sum().backward()
    optimizer.step()
    keeper.step()
    keeper.close()


def _rare() -> None:
    """Kernels for what tiny tables do not get to: segments that are cleaned, sums of many rows."""
    target, rows, at = np.zeros((2, 4), np.uint32), np.zeros((2, 4), np.uint32), np.arange(2)
    parts = [(0, 1), (1, 2)]
    pool = Pool(2)
    pool.together(Job(galois.write_add_product, parts, (target, at, 0, rows, np.uint32(1))))
    bounds, table = np.zeros(3, np.int64), np.zeros((1, 8), np.int64)
    pool.together(Job(galois.write_add_products, parts, (bounds, table)))
    words, numbers = np.zeros(1024, np.uint64), np.zeros(2, np.int64)
    positions = np.zeros(2, np.uint32)
    log_records.list_live(words, 512, 1, 8, 0, numbers, 1, positions, numbers, numbers)
    log_records.move_records(words, 512, 1, 8, 0, words, numbers[:1])
    octets, by_row = np.zeros((1, 8), np.uint8), np.zeros(1, np.bool_)
    log_index.note_records(
        words, 512, 1, 8, 0, 0, numbers, by_row, octets[0], words[:2].reshape(1, 2), octets
    )
    log_index.merge_entry(
        octets[0], words, 0, octets, 0, 1, 0, 0, 0, 1, numbers, positions, words, numbers, numbers,
        by_row,
    )  # fmt: skip
    times, counts = np.ones((1, 1)), np.ones((1, 1), np.int64)
    job_events.run_jobs(
        times, counts, counts, job_events.FULL, 1.0, 1, 1.0, 0.0, 1, 0.0, 0.0, 1.0, 0.0, 1, 1.0, 0,
        0.0, 0.0, 1.0, np.zeros((1, job_events.COLUMNS)),
    )  # fmt: skip

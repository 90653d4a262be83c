"""The kernel that saves rows for a snapshot while it updates them: what is saved is the state at
the freeze, and what becomes of the rows is what becomes of them without a snapshot, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.kernels import saved_updates
from emberkeep.kernels.recorded_updates import RECORDING
from emberkeep.rows import saved_rows
from emberkeep.rows import slab as slabs
from emberkeep.rows.saved_rows import SavesWithUpdate
from emberkeep.rows.snapshot import freeze
from emberkeep.rows.tracker import SINCE_VERSION
from emberkeep.tables import OPTIMIZERS as KINDS
from emberkeep.tables import SGD, Adagrad, Adam, Momentum, Optimizer, RowWiseAdagrad, Table
from tests.contracts.engine import grads_of, wanted_of

OPTIMIZERS: list[Optimizer] = [
    SGD(lr=0.1),
    SGD(lr=0.1, max_norm=0.5),
    Momentum(lr=0.1),
    Momentum(lr=0.1, nesterov=True),
    Adagrad(lr=0.1),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    Adam(lr=0.1, step="row", max_norm=0.5),
]
ROWS = 2000


class Run:
    """A cluster, and the same pushes on a twin that nobody freezes."""

    def __init__(self, optimizer: Optimizer, dim: int, threads: int, evicting: bool) -> None:
        last = Table(
            "last", capacity=ROWS, dim=dim, on_full="evict_oldest" if evicting else "error"
        )
        tables = [Table("fixed", rows=ROWS, dim=dim), Table("keys", capacity=ROWS, dim=dim), last]
        self.dim = dim
        self.pair = [local(threads=threads).open(tables, optimizer, seed=0) for _ in range(2)]
        self.random = np.random.default_rng(dim + threads)
        (self.slab,) = self.pair[0].shards[0].slabs
        self.slab.track()

    def push(self, most: int = ROWS) -> None:
        batch: dict[str, list[int]] = {
            name: self.random.permutation(ROWS)[: int(self.random.integers(1, most))].tolist()
            for name in ("fixed", "keys", "last")
        }
        grads: dict[str, Any] = {
            name: self.random.standard_normal((len(ids), self.dim)) for name, ids in batch.items()
        }
        for cluster in self.pair:
            cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)

    def delete(self) -> None:
        ids = self.random.permutation(ROWS)[:100]
        for cluster in self.pair:
            for name in ("fixed", "keys"):
                cluster.delete(name, ids)


def rows_of(cluster: LocalCluster) -> dict[tuple[str, int], bytes]:
    return {
        (table.name, int(identity)): b"".join(values[i].tobytes() for values in planes.values())
        for table in cluster.tables
        for ids, planes in [cluster.read_all(table.name)]
        for i, identity in enumerate(ids)
    }


@pytest.mark.parametrize("aligned", [False, True], ids=["small", "past the cache"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [3, 16, 48])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_rows_are_saved_and_updated_as_without_a_save(
    optimizer: Optimizer, dim: int, threads: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "_LEAST_ROWS", 64)
    if aligned:
        monkeypatch.setattr(saved_rows, "_LARGE_NBYTES", 1)
    saved_by_kernels = []
    run_both = SavesWithUpdate.run

    def counted(self: SavesWithUpdate, *given: Any) -> None:
        saved_by_kernels.append(self.claimed.saved.rows.size)
        run_both(self, *given)

    monkeypatch.setattr(SavesWithUpdate, "run", counted)
    run = Run(optimizer, dim, threads, evicting=False)
    for _ in range(6):
        run.push()
    base: dict[tuple[str, int], bytes] = {}
    for since in (None, SINCE_VERSION, SINCE_VERSION):
        state = rows_of(run.pair[0])
        (taken,) = freeze([run.slab], since=since)
        run.push(1500)
        run.delete()
        for chunk in taken.chunks(700):
            run.push(400)  # some rows are saved, some copied, some neither
            for i, identity in enumerate(chunk.ids.tolist()):
                key = chunk.table, identity
                if chunk.planes is None:
                    base.pop(key, None)
                else:
                    base[key] = b"".join(values[i].tobytes() for values in chunk.planes.values())
        assert base == state
        taken.close([SINCE_VERSION])
        assert rows_of(run.pair[0]) == rows_of(run.pair[1])
        run.delete()
    assert max(saved_by_kernels) > 100


def test_where_ages_change_first_rows_are_saved_before() -> None:
    """A table that evicts notes when a row was used before the kernel runs."""
    run = Run(Adagrad(lr=0.1), 8, 1, evicting=True)
    run.push()
    state = rows_of(run.pair[0])
    (taken,) = freeze([run.slab], since=None)
    run.push()
    read = {
        (chunk.table, int(identity)): b"".join(v[i].tobytes() for v in chunk.planes.values())
        for chunk in taken.chunks(700)
        for i, identity in enumerate(chunk.ids)
        if chunk.planes is not None
    }
    assert read == state
    taken.close([])
    assert rows_of(run.pair[0]) == rows_of(run.pair[1])


def test_every_optimizer_has_such_a_kernel() -> None:
    assert saved_updates.SAVING.keys() == RECORDING.keys()
    assert {type(optimizer) for optimizer in OPTIMIZERS} == set(KINDS.values())
    for optimizer in OPTIMIZERS:
        assert 1 + len(optimizer.planes(8)) <= saved_updates.MOST_PLANES

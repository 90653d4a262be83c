"""A small run with every kind of table and deletion, saved as asked, for tests that read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import safetensors.numpy

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.checkpoint import Checkpointer, Extras, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.repository import KeepAll, Repository
from emberkeep.repository.policies import Grid
from emberkeep.tables import Adam, Normal, Table
from tests.contracts.engine import grads_of, wanted_of

TABLES = [
    Table("fixed", rows=120, dim=6),
    Table("dynamic", rows=None, capacity=200, dim=6, init=Normal(0.0, 0.1)),
    Table("evicting", rows=None, capacity=30, dim=6, on_full="evict_oldest"),
    Table("wide/odd name", rows=40, dim=9),
]
KEEP = SaveSettings(retention=KeepAll(), grace=timedelta(0))
State = dict[str, tuple[Any, dict[str, Any]]]


@dataclass
class Run:
    """A cluster beside its repository; `states` holds every saved state by version number."""

    layout: Any = "consecutive"
    bits: int | None = None
    shards: int = 2
    seed: int = 0
    store: BlobStore = field(default_factory=MemoryStore)
    states: dict[int, State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.cluster: LocalCluster = local(shards=self.shards, threads=1).open(
            TABLES, Adam(lr=0.05, step="row"), seed=3
        )
        self.repository = Repository.create(self.store, schema=self.cluster.schema())
        self.reopen()

    def reopen(self) -> None:
        """Another epoch of the same run, which goes on with the newest version if there is one."""
        # When a grid takes a new baseline by its rule depends on measured times.
        grid = Grid(resets=False) if self.layout == "grid" else None
        spec = VersionSpec(layout=self.layout, bits=self.bits, grid=grid)
        self.keeper = Checkpointer(self.repository, self.cluster, spec=spec, settings=KEEP)
        self.keeper.restore()

    def train(self) -> None:
        table = TABLES[self.random.integers(0, len(TABLES))]
        self.cluster.delete(table.name, self.random.integers(0, table.rows or 150, 12))
        batch = {
            t.name: np.unique(self.random.integers(0, t.rows or 150, 20)).tolist() for t in TABLES
        }
        grads = {t.name: self.random.standard_normal((len(batch[t.name]), t.dim)) for t in TABLES}
        self.cluster.push(wanted_of(self.cluster, batch), grads_of(self.cluster, grads), lr=0.05)

    def save(self, steps: int = 2) -> int:
        for _ in range(steps):
            self.train()
        state = {t.name: self.cluster.read_all(t.name) for t in TABLES}
        step = 100 * (len(self.states) + 1)
        dense = safetensors.numpy.save({"bias": np.full(3, step, np.float32)})
        extras = Extras(dense=dense, reader={"samples": 7 * step}, user={"step": step})
        self.keeper.save(step, extras)
        manifest = self.keeper.wait()
        assert manifest is not None
        self.states[manifest.version.number] = state
        return manifest.version.number


def flipped(store: BlobStore, name: str, at: int = -5) -> None:
    """Flips one bit of an object."""
    content = bytearray(store.get(name))
    content[at] ^= 1
    store.put(name, bytes(content))

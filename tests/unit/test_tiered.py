"""The engine's contract on tiered slabs, and what is theirs alone."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from emberkeep.blobs.local import Disk
from emberkeep.cluster.local import LocalCluster, local
from emberkeep.tables import Optimizer, Table, Tier
from emberkeep.tiered import opening
from tests.contracts.engine import EngineContract

numbers = itertools.count()


class Unsynced(Disk):
    """Where nothing is at stake, syncing only takes time."""

    def sync(self, handle: int) -> None:
        pass


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: these tests are not about disks."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="emberkeep-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "SEGMENT_NBYTES", 32 * 1024)
    monkeypatch.setattr(opening, "DISK", Unsynced)


def tiered(tables: Sequence[Table], optimizer: Optimizer, path: Path, frames: int) -> list[Table]:
    """The tables in one tier, with a cache of so many rows for those of the first dim."""
    nbytes = {table.dim: 0 for table in tables}
    for table in tables:
        nbytes[table.dim] += table.slots * (table.dim + sum(optimizer.planes(table.dim).values()))
    dim = tables[0].dim
    cost = 4 * (dim + sum(optimizer.planes(dim).values())) + 48
    tier = Tier(path, memory=-(-frames * cost * sum(nbytes.values()) // nbytes[dim]) + 1)
    return [replace(table, tier=tier) for table in tables]


class TestTiered(EngineContract):
    """With caches from one batch to everything, one size after the other."""

    sizes = (30, 45, 90, 20_000)
    # What the largest batch of a test needs where that is more.
    needs: ClassVar[dict[str, tuple[int, ...]]] = {
        "test_thread_counts_give_the_same_bits": (2700,),
        "test_a_refused_push_names_table_and_id_and_changes_no_row": (70,),
    }

    @pytest.fixture(autouse=True)
    def _choose(self, root: Path, request: pytest.FixtureRequest) -> None:
        self.root = root
        self.caches = itertools.cycle(self.needs.get(request.node.originalname, self.sizes))

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> LocalCluster:
        made = tiered(tables, optimizer, self.root / str(next(numbers)), next(self.caches))
        return local(threads=threads).open(made, optimizer, seed=seed)

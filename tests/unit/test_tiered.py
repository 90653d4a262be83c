"""The engine's contract on tiered slabs, and what is theirs alone."""

from __future__ import annotations

import itertools
import shutil
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


class TieredContract(EngineContract):
    """`frames` rows in memory for the tables of the first dim, and in proportion for the others."""

    frames: int
    # What the largest batch of a test needs where that is more than `frames`.
    needs: ClassVar[dict[str, int]] = {}

    @pytest.fixture(autouse=True)
    def _choose(
        self, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        self.root = tmp_path_factory.mktemp("tier")
        self.cache = self.needs.get(request.node.originalname, self.frames)
        yield
        shutil.rmtree(self.root)

    def open(
        self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int = 0, threads: int = 2
    ) -> LocalCluster:
        made = tiered(tables, optimizer, self.root / str(next(numbers)), self.cache)
        return local(threads=threads).open(made, optimizer, seed=seed)


class TestRoomForEverything(TieredContract):
    frames = 20_000


class TestRoomForOneBatch(TieredContract):
    frames = 30
    needs: ClassVar[dict[str, int]] = {
        "test_thread_counts_give_the_same_bits": 2700,
        "test_a_refused_push_names_table_and_id_and_changes_no_row": 70,
    }

"""Rows that were read ahead, are damaged in the file, and are not needed any more: who overwrites,
removes or passes over them hears nothing of it. Who needs them does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emberkeep as ek
from emberkeep._types import I64
from emberkeep.blobs import MemoryStore
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError, DeadlineError
from emberkeep.tables import Adagrad, Table, Tier
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.tiers import durable_open
from emberkeep.tiers.superblock import START
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.contracts.engine import grads_of, state, wanted_of
from tests.unit.tiers.test_tiered_slab import tiered
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*not what was written:RuntimeWarning")
TABLES = [
    Table("a", rows=600, dim=6),
    Table("b", rows=None, capacity=40, dim=6, on_full="evict_oldest"),
]
OPTIMIZER = Adagrad(lr=0.1)
FRAMES = 60


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 8192)


def start(tables: list[Table]) -> LocalCluster:
    return local(threads=1).open(tables, OPTIMIZER, seed=0)


def push(cluster: LocalCluster, table: str, ids: list[int]) -> None:
    grads = grads_of(cluster, {table: np.ones((len(ids), 6))})
    cluster.push(wanted_of(cluster, {table: ids}), grads, lr=0.1)


def pull(cluster: LocalCluster, table: str, ids: list[int]) -> None:
    cluster.pull(wanted_of(cluster, {table: ids}))


def train(cluster: LocalCluster, table: str, ids: list[int]) -> None:
    """A batch that is fetched first, so that upkeep makes room ahead of the next."""
    cluster.fetch(wanted_of(cluster, {table: ids}))
    push(cluster, table, ids)


def in_file_alone(slab: TieredSlab) -> I64:
    return np.flatnonzero((slab.positions > 0) & (slab.frames.frame_of == 0))


def damage_file(slab: TieredSlab) -> None:
    """Every record that is in the file by now; heads stay as they are."""
    path = Path(slab.log.path)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(START)
        file.write(b"\x55" * (len(content) - START))


class Damaged:
    """A cluster that has read a few rows ahead, in vain: their records are damaged."""

    def __init__(self, path: Path, table: str = "a") -> None:
        self.cluster = start(tiered(TABLES, OPTIMIZER, path, FRAMES))
        train(self.cluster, "b", list(range(40)))
        for first in range(0, 200, 20):
            train(self.cluster, "a", list(range(first, first + 20)))
        (self.slab,) = self.cluster.shards[0].tiers()
        until(lambda: self.slab.frames.free >= max(8, self.slab.reserve), "room")
        ids = self.cluster.touched_ids(table)
        found, _ = self.slab.resolve(wanted_of(self.cluster, {table: ids.tolist()})[0])
        self.ids = ids[np.isin(found, in_file_alone(self.slab))][:4].tolist()
        assert len(self.ids) == 4
        damage_file(self.slab)
        self.table = table
        self.cluster.fetch(wanted_of(self.cluster, {table: self.ids}), ahead=True)
        (load,) = self.slab.loads._under_way
        until(load.done.is_set, "the read")
        assert isinstance(load.error, DamageError)

    def check_frames(self) -> None:
        """Every frame is free or has one row, which knows it."""
        frames, free = self.slab.frames, self.slab.frames._free
        bound = np.flatnonzero(frames.row_of >= 0)
        assert np.array_equal(frames.of(frames.row_of[bound]), bound)
        assert sorted([*bound, *frames._stack[:free]]) == list(range(frames.count))


@pytest.fixture
def damaged(tmp_path: Path) -> Damaged:
    return Damaged(tmp_path / "t")


def test_rows_are_cleared(damaged: Damaged) -> None:
    damaged.cluster.clear()
    damaged.check_frames()
    assert damaged.cluster.touched_ids("a").size == damaged.cluster.touched_ids("b").size == 0
    push(damaged.cluster, "a", damaged.ids)
    new = start(TABLES)
    push(new, "a", damaged.ids)
    assert state(damaged.cluster) == state(new)


def test_rows_are_deleted(damaged: Damaged) -> None:
    assert damaged.cluster.delete("a", np.array(damaged.ids)) == 4
    damaged.check_frames()
    assert not np.isin(damaged.ids, damaged.cluster.touched_ids("a")).any()


def test_rows_are_overwritten(damaged: Damaged) -> None:
    planes: dict[str, Any] = {
        name: np.full((4, 6), value, np.float32)
        for name, value in (("weight", 2.0), ("accumulator", 3.0))
    }
    damaged.cluster.install("a", np.array(damaged.ids), planes)
    damaged.check_frames()
    back = damaged.cluster.read("a", np.array(damaged.ids))
    assert {name: values.tolist() for name, values in back.items()} == {
        name: values.tolist() for name, values in planes.items()
    }


def test_rows_make_room_for_others(damaged: Damaged) -> None:
    """A batch that takes all frames waits for reads under way, whatever becomes of them."""
    count = damaged.slab.frames.count
    push(damaged.cluster, "a", list(range(300, 300 + count)))
    damaged.check_frames()
    with pytest.raises(DamageError, match="not what was written"):
        pull(damaged.cluster, "a", damaged.ids)


def test_rows_are_evicted_by_new_ids(tmp_path: Path) -> None:
    """In the middle of a push, of which nothing may fail any more."""
    damaged = Damaged(tmp_path / "t", "b")
    new = list(range(100, 140))
    push(damaged.cluster, "b", new)
    damaged.check_frames()
    assert damaged.cluster.touched_ids("b").tolist() == new


@pytest.mark.parametrize("call", [pull, push, train])
def test_who_needs_the_rows_hears_of_it(damaged: Damaged, call: Callable[..., None]) -> None:
    with pytest.raises(DamageError, match="not what was written"):
        call(damaged.cluster, "a", damaged.ids)
    damaged.check_frames()


def test_a_read_that_never_ends_is_not_waited_for_without_end(
    damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames may still be written to."""
    (load,) = damaged.slab.loads._under_way
    monkeypatch.setattr(load.done, "_clock", VirtualClock(pace=1e6))
    monkeypatch.setattr(load.done, "_set", False)
    with pytest.raises(DeadlineError, match="rows to be read from"):
        damaged.cluster.clear()


class Model(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        tables = [Table("a", rows=600, dim=4, tier=Tier(path, memory=4000))]
        self.bags = ek.EmbeddingBags(tables, optimizer=OPTIMIZER, cluster=local(shards=1))


@pytest.mark.parametrize("fall_back", [False, True])
def test_an_intact_version_takes_the_place_of_damaged_rows(tmp_path: Path, fall_back: bool) -> None:
    model = Model(tmp_path / "t")
    keeper = ek.Keeper(
        MemoryStore(), model, model.bags.optimizer,
        strategy=ek.incremental(every=10, layout="full", keep=9),
    )  # fmt: skip
    keeper.resume()
    for step in range(40):
        model.bags({"a": (torch.arange(16) + 16 * step) % 600}).sum().backward()
        model.bags.optimizer.step()
        keeper.step()
        keeper.wait()
    cluster = model.bags.cluster
    assert isinstance(cluster, LocalCluster)
    before = state(cluster)
    (slab,) = cluster.shards[0].tiers()
    until(lambda: slab.frames.free >= max(8, slab.reserve), "room")
    damage_file(slab)
    model.bags.prefetch({"a": torch.from_numpy(in_file_alone(slab)[:4])})
    (load,) = slab.loads._under_way
    until(load.done.is_set, "the read")
    assert isinstance(load.error, DamageError)
    kept = keeper.resume(fall_back=fall_back)
    assert kept is not None
    assert kept.step == 40
    assert state(cluster) == before
    keeper.close()

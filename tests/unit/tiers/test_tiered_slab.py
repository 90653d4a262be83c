"""The engine's contract on tiered slabs, and what is theirs alone."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import emberkeep as ek
from emberkeep.blobs.system_disk import Disk
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError, ShardLostError, TierError
from emberkeep.rows import snapshot as snapshots
from emberkeep.runtime.pool import ForkLock
from emberkeep.tables import Adagrad, Optimizer, Table, Tier
from emberkeep.tiers import durable_open, upkeep
from emberkeep.tiers import loads as loading
from emberkeep.tiers import reads as reading
from emberkeep.tiers.superblock import START
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.contracts.engine import EngineContract, grads_of, state, wanted_of
from tests.waiting import until

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
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 32 * 1024)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


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


TABLES = [Table("a", rows=600, dim=6), Table("b", rows=None, capacity=100, dim=6)]
OPTIMIZER = Adagrad(lr=0.1)


def trained(cluster: LocalCluster, batches: int = 12) -> LocalCluster:
    random = np.random.default_rng(0)
    for _ in range(batches):
        batch = {
            "a": random.choice(600, 60, replace=False).tolist(),
            "b": random.choice(90, 10, replace=False).tolist(),
        }
        grads = {name: random.standard_normal((len(ids), 6)) for name, ids in batch.items()}
        wanted = wanted_of(cluster, batch)
        cluster.fetch(wanted, ahead=bool(random.integers(2)))
        cluster.fetch(wanted)
        cluster.push(wanted, grads_of(cluster, grads), lr=0.1)
    return cluster


def test_evaluation_admits_nothing_and_leaves_the_order_of_use_alone(root: Path) -> None:
    plain = ek.EmbeddingBags(TABLES, optimizer=OPTIMIZER)
    behind = ek.EmbeddingBags(tiered(TABLES, OPTIMIZER, root / "t", 120), optimizer=OPTIMIZER)
    for bags in (plain, behind):
        assert isinstance(bags.cluster, LocalCluster)
        trained(bags.cluster)
    (slab,) = behind.cluster.shards[0].tiers()

    def seen() -> list[bytes | int]:
        frames = slab.frames
        arrays = (
            frames.row_of, frames.frame_of, frames.used, frames.stamps, frames.busy,
            frames.filled, frames.unsaved, frames.frozen, slab.dirty, slab.touched, slab.positions,
        )  # fmt: skip
        return [*(array.tobytes() for array in arrays), frames.turn, frames.free, slab.stamp]

    # Upkeep makes room ahead; evaluation is not to be blamed for it.
    until(lambda: slab.frames.free >= slab.reserve, "room")
    before, reads = seen(), slab.log.reads
    batch = {"a": torch.arange(600), "b": torch.arange(600)}
    with torch.no_grad():
        assert torch.equal(behind(batch), plain(batch))
    behind.eval()
    assert torch.equal(behind(batch), plain(batch))
    assert slab.log.reads > reads  # some were in the file alone
    assert seen() == before


@pytest.mark.parametrize("missing", ["library", "queues"])
def test_without_a_queue_of_the_system_threads_read_the_same(
    root: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No asynchronous reads at all, or as many queues in use as the system allows."""
    monkeypatch.setattr(reading, "_queues", reading._Queues())
    if missing == "library":
        monkeypatch.setattr(reading.kernels, "HAS_AIO", False)
    else:
        monkeypatch.setattr(reading.kernels, "open_queue", lambda _depth, _context: -11)
    plain = trained(local(threads=2).open(TABLES, OPTIMIZER, seed=0))
    made = tiered(TABLES, OPTIMIZER, root / "t", 75)
    behind = trained(local(threads=2).open(made, OPTIMIZER, seed=0))
    (slab,) = behind.shards[0].tiers()
    assert not slab.loads.reads.deep
    assert slab.log.reads > 100
    assert state(behind) == state(plain)
    # Damage is found there too.
    row = int(np.flatnonzero((slab.positions > 0) & (slab.frames.frame_of == 0))[0])
    with open(slab.log.path, "r+b") as file:
        file.seek(START + (int(slab.positions[row]) - 1) // slab.log.per_block * 4096 + 100)
        file.write(b"damage")
    with pytest.raises(DamageError, match="not what was written"):
        state(behind)


class Guarded(list[int]):
    """A list that only the thread which has the slab's lock may look at or change."""

    lock: ForkLock

    def __iter__(self) -> Iterator[int]:
        self._check()
        return super().__iter__()

    def append(self, item: int) -> None:
        self._check()
        super().append(item)

    def extend(self, items: Iterable[int]) -> None:
        self._check()
        super().extend(items)

    def remove(self, item: int) -> None:
        self._check()
        super().remove(item)

    def pop(self, *place: Any) -> int:
        self._check()
        return super().pop(*place)

    def _check(self) -> None:
        assert self.lock._owner == threading.get_ident(), "without the lock of the slab"


def test_lists_of_free_segments_are_looked_at_under_the_lock_alone(root: Path) -> None:
    """Reads end at any time, in threads of their own, and segments are free then."""
    cluster = local(threads=2).open(tiered(TABLES, OPTIMIZER, root / "t", 120), OPTIMIZER, seed=0)
    (slab,) = cluster.shards[0].tiers()
    with slab.lock:
        for name in ("_free", "_unlisted"):
            guarded = Guarded(getattr(slab.log, name))
            guarded.lock = slab.lock
            setattr(slab.log, name, guarded)
    used_again = 0
    for batch in range(1, 9):
        trained(cluster, 6)
        for future in cluster.prepare_tiers(batch):
            future.result(60)
        cluster.commit_tiers()
        with slab.lock:
            used_again += len(slab.log._unlisted)
    assert used_again  # or this test would be about nothing
    cluster.close()


def test_an_error_of_a_round_gives_up_the_checkpoint_that_it_met_and_no_later_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper may give it up, and begin another, at the same moment."""
    cluster = local(threads=2).open(tiered(TABLES, OPTIMIZER, root / "t", 120), OPTIMIZER, seed=0)
    (slab,) = cluster.shards[0].tiers()
    trained(cluster, 1)
    slab._upkeep_round = lambda _: False
    slab.checkpoint(1, cluster.shards[0].table_state(), "a")
    first = slab.saving
    assert first is not None

    def fail(_: object) -> bool:
        raise TierError("no room")

    set_exception = first.prepared.set_exception

    def begin_another(_: object) -> None:
        monkeypatch.setattr(first.prepared, "set_exception", set_exception)
        slab.abandon()
        slab.checkpoint(1, cluster.shards[0].table_state(), "b")

    monkeypatch.setattr(upkeep, "_save", fail)
    monkeypatch.setattr(first.prepared, "set_exception", begin_another)
    assert not upkeep.run(slab)
    assert slab.saving is not None
    assert slab.saving.nonce == "b"
    assert not slab.saving.prepared.done()
    cluster.close()


def _no_memory(*_: object, **__: object) -> Any:
    raise MemoryError


def _some_read_alone(root: Path) -> tuple[LocalCluster, TieredSlab]:
    """A cluster, many of whose rows are in the file alone; frames are free, and nothing is
    being read."""
    cluster = local(threads=1).open(tiered(TABLES, OPTIMIZER, root / "t", 120), OPTIMIZER, seed=0)
    (slab,) = trained(cluster).shards[0].tiers()
    slab.track()
    until(lambda: slab.frames.free >= max(1, slab.reserve), "room")
    until(lambda: not slab.log._readers, "reads to end", 5)
    return cluster, slab


@pytest.mark.parametrize("what", ["buffers", "reads"])
def test_a_pull_without_memory_leaves_no_reader_behind(
    root: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there is one no segment is used again: the file would grow without bound."""
    cluster, slab = _some_read_alone(root)
    target = (slab.log.layout, "onto") if what == "buffers" else (slab.loads.reads, "read")
    with monkeypatch.context() as patch:
        patch.setattr(type(target[0]), target[1], _no_memory)
        with pytest.raises(MemoryError):
            cluster.pull(wanted_of(cluster, {"a": list(range(600))}))
    until(lambda: not slab.log._readers, "reads to end", 5)
    cluster.pull(wanted_of(cluster, {"a": list(range(600))}))
    cluster.close()


@pytest.mark.parametrize("what", ["the first is read", "ids are listed", "the shard is lost"])
def test_a_snapshot_that_fails_leaves_no_reader_behind(
    root: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes many slices before it reads what is in the file alone."""
    cluster, slab = _some_read_alone(root)
    monkeypatch.setattr(snapshots, "_SLICE_ROWS", 64)
    monkeypatch.setattr(snapshots, "_SLICE_WORDS", 1)
    monkeypatch.setattr(snapshots, "_SHARE_OF_WAIT", float("inf"))  # slices under one lock
    (taken,) = snapshots.freeze([slab], since=None)
    started = list[int]()
    begin, ids_of = slab.log.begin_reading, snapshots.TableRange.ids_of

    def counted() -> int:
        started.append(begin())
        if what == "the shard is lost" and len(started) == 2:
            taken._lost = ShardLostError([0])
        return started[-1]

    with monkeypatch.context() as patch:
        patch.setattr(slab.log, "begin_reading", counted)
        if what == "the first is read":
            patch.setattr(slab.loads.reads, "read", _no_memory)
        elif what == "ids are listed":
            patch.setattr(
                snapshots.TableRange, "ids_of",
                lambda table, rows: ids_of(table, rows) if table.ids is None else _no_memory(),
            )  # fmt: skip
        with pytest.raises((MemoryError, ShardLostError)):
            list(taken.chunks(4096))
    assert len(started) > 1
    until(lambda: not slab.log._readers, "reads to end", 5)
    taken.close([])
    (again,) = snapshots.freeze([slab], since=None)
    rows = sum(chunk.ids.size for chunk in again.chunks(4096))
    assert rows == slab.trained
    again.close([])
    cluster.close()


def test_rows_that_could_not_be_read_ahead_leave_no_reader_behind(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may ever ask for them; who does hears of it."""
    cluster, slab = _some_read_alone(root)
    ids = list(range(600))
    with monkeypatch.context() as patch:
        patch.setattr(slab.loads.reads, "read", _no_memory)
        cluster.fetch(wanted_of(cluster, {"a": ids}), ahead=True)
        (load,) = slab.loads._under_way
        until(load.done.is_set, "the read", 5)
        until(lambda: not slab.log._readers, "reads to end", 5)
    with pytest.raises(MemoryError):
        cluster.pull(wanted_of(cluster, {"a": ids}))
    cluster.pull(wanted_of(cluster, {"a": ids}))
    until(lambda: not slab.log._readers, "reads to end", 5)
    cluster.close()


def test_a_load_without_memory_leaves_no_frame_that_looks_like_its_row(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, _ = _some_read_alone(root)
    before, ids = state(cluster), list(range(600))
    with monkeypatch.context() as patch:
        patch.setattr(loading, "Event", _no_memory)
        with pytest.raises(MemoryError):
            cluster.fetch(wanted_of(cluster, {"a": ids}), ahead=True)
    assert state(cluster) == before
    cluster.close()

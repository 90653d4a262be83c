"""What can happen to a tier's files and its disk: each is reported plainly, and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs.local_store import LocalStore
from emberkeep.blobs.system_disk import Disk
from emberkeep.checkpoint import Checkpointer
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.erasure.codes import Parity
from emberkeep.errors import ConfigError, DamageError, StateError, TierError
from emberkeep.repository import Repository
from emberkeep.tables import SGD, Adagrad, Table
from emberkeep.tiers import durable_open, tiered_slab
from emberkeep.tiers.log import RowLog
from emberkeep.tiers.superblock import SLOT_NBYTES, START, read_head, unpack_bits
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.contracts.engine import grads_of, state, wanted_of
from tests.unit.tiers.test_tiered_slab import tiered

TABLES = [Table("a", rows=2000, dim=6), Table("b", rows=None, capacity=200, dim=6)]
OPTIMIZER = Adagrad(lr=0.1)


class Failing(Disk):
    """Fails the calls that a test names."""

    fails: str | None = None
    code = errno.EIO

    def _maybe(self, what: str) -> None:
        if what == type(self).fails:
            raise OSError(self.code, os.strerror(self.code))

    def allocate(self, handle: int, offset: int, nbytes: int) -> None:
        self._maybe("allocate")
        super().allocate(handle, offset, nbytes)

    def write_at(self, handle: int, view: memoryview, offset: int) -> None:
        self._maybe("write_at")
        super().write_at(handle, view, offset)

    def sync(self, handle: int) -> None:
        self._maybe("sync")


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Failing)
    Failing.fails, Failing.code = None, errno.EIO
    yield
    Failing.fails = None


def start(path: Path, tables: list[Table] = TABLES, **given: Any) -> LocalCluster:
    optimizer = given.get("optimizer", OPTIMIZER)
    shards = given.get("shards", 1)
    made = tiered(tables, optimizer, path, 300 * shards)
    return local(shards=shards, threads=2).open(made, optimizer, seed=given.get("seed", 0))


def end(cluster: LocalCluster) -> None:
    for shard in cluster.shards:
        shard.kill()


def train(cluster: LocalCluster, seed: int) -> None:
    random = np.random.default_rng(seed)
    batch = {
        "a": random.choice(2000, 200, replace=False).tolist(),
        "b": random.choice(150, 20, replace=False).tolist(),
    }
    grads = {name: random.standard_normal((len(ids), 6)) for name, ids in batch.items()}
    cluster.push(wanted_of(cluster, batch), grads_of(cluster, grads), lr=0.1)


def make_durable(cluster: LocalCluster, batch: int) -> Any:
    before = state(cluster)
    for future in cluster.prepare_tiers(batch):
        future.result(60)
    cluster.commit_tiers()
    return before


def trained(path: Path, batches: int = 12) -> Any:
    """A tier with a durable batch, closed; the state that it must come back with."""
    cluster = start(path)
    for seed in range(batches):
        train(cluster, seed)
    before = make_durable(cluster, batches)
    train(cluster, 99)  # not durable
    end(cluster)
    return before


def test_it_comes_back_at_the_durable_batch(tmp_path: Path) -> None:
    before = trained(tmp_path / "t")
    for _ in range(2):  # also after a life that did nothing
        cluster = start(tmp_path / "t")
        assert cluster.tier_batch() == 12
        assert state(cluster) == before
        end(cluster)


def test_without_a_durable_batch_it_starts_over(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t")
    train(cluster, 0)
    end(cluster)
    cluster = start(tmp_path / "t")
    assert cluster.tier_batch() is None
    assert cluster.touched_ids("a").size == 0
    end(cluster)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: start(path, [replace(TABLES[0], rows=2001), TABLES[1]]), ["'a'", "2001"]),
        (lambda path: start(path, [replace(TABLES[0], name="c"), TABLES[1]]), ["'a'"]),
        (lambda path: start(path, seed=5), ["'a'", "seed"]),
        (lambda path: start(path, shards=2), ["number of shards", "1", "2"]),
        (lambda path: start(path, optimizer=SGD(lr=0.1)), ["planes", "accumulator"]),
    ],
)
def test_a_file_of_another_model_is_refused_and_left_alone(
    tmp_path: Path, change: Callable[[Path], Any], words: list[str]
) -> None:
    before = trained(tmp_path / "t")
    with pytest.raises(StateError) as refused:
        change(tmp_path / "t")
    for word in words:
        assert word in str(refused.value)
    cluster = start(tmp_path / "t")
    assert state(cluster) == before
    end(cluster)


def _spoil(path: Path, offset: int, nbytes: int = 600) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(os.urandom(nbytes))


def test_one_torn_head_is_survived_two_are_reported(tmp_path: Path) -> None:
    before = trained(tmp_path / "t")
    file = tmp_path / "t" / "rows-0-0.tier"
    _, newest = read_head(str(file))
    _spoil(file, (newest % 2) * SLOT_NBYTES)  # the older one
    cluster = start(tmp_path / "t")
    assert state(cluster) == before
    end(cluster)
    content = file.read_bytes()
    for slot in (0, SLOT_NBYTES):
        _spoil(file, slot)
    with pytest.raises(DamageError, match="no readable head"):
        start(tmp_path / "t")
    assert file.read_bytes()[START:] == content[START:]


def test_a_short_file_is_reported(tmp_path: Path) -> None:
    trained(tmp_path / "t")
    file = tmp_path / "t" / "rows-0-0.tier"
    os.truncate(file, START + 20_000)
    with pytest.raises(DamageError, match="cut short"):
        start(tmp_path / "t")
    assert file.stat().st_size == START + 20_000


def test_a_damaged_block_is_reported(tmp_path: Path) -> None:
    trained(tmp_path / "t")
    file = tmp_path / "t" / "rows-0-0.tier"
    head, _ = read_head(str(file))
    free = unpack_bits(head.free, head.segments)
    segment = int(np.flatnonzero(~free)[0])
    _spoil(file, START + segment * 16384 + 100)
    with pytest.raises(DamageError, match="damaged"):
        start(tmp_path / "t")


def test_a_missing_file_of_several_is_reported(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t", shards=3)
    train(cluster, 0)
    make_durable(cluster, 1)
    end(cluster)
    os.unlink(tmp_path / "t" / "rows-1-0.tier")
    with pytest.raises(DamageError, match=r"rows-1-0.tier is missing"):
        start(tmp_path / "t", shards=3)


def test_a_batch_that_one_file_has_committed_is_committed_in_all(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t", shards=3)
    for batch in (1, 2):
        train(cluster, batch)
        before = state(cluster)
        for future in cluster.prepare_tiers(batch):
            future.result(60)
        if batch == 1:
            cluster.commit_tiers()
    (slab,) = cluster.shards[1].tiers()
    slab.commit(slab.log.prepared.nonce)  # and there the coordinator dies
    end(cluster)
    cluster = start(tmp_path / "t", shards=3)
    assert cluster.tier_batch() == 2
    assert state(cluster) == before
    end(cluster)


def test_a_file_in_use_is_refused(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t")
    with pytest.raises(TierError, match="in use"):
        start(tmp_path / "t")
    train(cluster, 0)
    end(cluster)


def test_a_full_disk_refuses_the_batch_and_training_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    cluster = start(tmp_path / "t")
    train(cluster, 0)
    before = make_durable(cluster, 1)
    Failing.fails, Failing.code = "allocate", errno.ENOSPC
    for seed in range(1, 60):
        before = state(cluster)
        try:
            train(cluster, seed)
        except TierError:
            break
    with pytest.raises(TierError, match="No space left"):
        train(cluster, seed)
    assert state(cluster) == before
    Failing.fails = None
    train(cluster, 100)
    before = make_durable(cluster, 2)
    end(cluster)
    cluster = start(tmp_path / "t")
    assert state(cluster) == before
    end(cluster)


def without_upkeep(path: Path) -> tuple[LocalCluster, TieredSlab]:
    """A shard of 1800 rows in memory, all of a checkpoint that nobody writes."""
    made = tiered(TABLES, OPTIMIZER, path, 2500)
    cluster = local(threads=2).open(made, OPTIMIZER, seed=0)
    (slab,) = cluster.shards[0].tiers()
    slab._upkeep_round = lambda _: False
    wanted = wanted_of(cluster, {"a": list(range(1800))})
    cluster.push(wanted, grads_of(cluster, {"a": np.ones((1800, 6))}), lr=0.1)
    cluster.prepare_tiers(1)
    return cluster, slab


def take_all_room(slab: TieredSlab) -> None:
    """As upkeep does, from a disk that is full."""
    Failing.fails, Failing.code = "allocate", errno.ENOSPC

    def append() -> None:
        slab.log.make_room(slab.log.per_block)
        slab.log.write(slab.log.extend(slab.log.per_block))

    lengths = (2**n for n in itertools.count(16))
    for take in (append, lambda: slab.log.reserve_head(schema={"long": "x" * next(lengths)})):
        with slab.lock, pytest.raises(TierError, match="No space left"):
            _forever(take)


def _forever(call: Callable[[], object]) -> None:
    while True:
        call()


def test_room_that_a_push_was_promised_is_nobody_elses(tmp_path: Path) -> None:
    """Between its check and its application rows make room, are saved and are moved."""
    cluster, slab = without_upkeep(tmp_path / "t")
    shard = cluster.shards[0]
    wanted = wanted_of(cluster, {"a": list(range(1800))})
    grads = grads_of(cluster, {"a": np.ones((1800, 6))})
    pushes = shard.check(wanted, grads)
    take_all_room(slab)
    shard.apply(pushes, 0.1)
    assert slab.log.failed is None
    assert (shard.read("a", np.arange(1800))["accumulator"] == 2).all()
    with pytest.raises(TierError, match="no row was lost or changed"):
        cluster.push(wanted_of(cluster, {"a": list(range(1999))}),
                     grads_of(cluster, {"a": np.ones((1999, 6))}), lr=0.1)  # fmt: skip
    assert slab.log.failed is None
    Failing.fails = None
    end(cluster)


def test_a_push_that_was_checked_and_let_go_keeps_no_room(tmp_path: Path) -> None:
    cluster, slab = without_upkeep(tmp_path / "t")
    shard, grads = cluster.shards[0], np.ones((1800, 6))
    shard.check(wanted_of(cluster, {"a": list(range(1800))}), grads_of(cluster, {"a": grads}))
    for count in (3, 1):
        wanted = wanted_of(cluster, {"a": list(range(count))})
        shard.apply(shard.check(wanted, grads_of(cluster, {"a": grads[:count]})), 0.1)
    before = slab.log.states.size
    with slab.lock:
        slab.log.make_room(1000)
    assert slab.log.states.size == before  # there is room for 1800
    end(cluster)


@pytest.mark.parametrize("call", ["delete", "clear"])
def test_a_deletion_that_has_no_room_on_a_full_disk_changes_nothing(
    tmp_path: Path, call: str
) -> None:
    """Rows of the checkpoint under way are copied before they go."""
    cluster, slab = without_upkeep(tmp_path / "t")
    take_all_room(slab)
    before = state(cluster)
    with pytest.raises(TierError, match="no row was lost or changed"):
        cluster.delete("a", np.arange(1800)) if call == "delete" else cluster.shards[0].clear()
    assert slab.log.failed is None
    assert state(cluster) == before
    Failing.fails = None
    with slab.lock:
        slab.delete(0, np.arange(900))
        slab.clear()
    assert slab.log.failed is None
    end(cluster)


def test_a_deletion_makes_room_for_all_that_it_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of rows and records that they are gone, in many pieces."""
    monkeypatch.setattr(tiered_slab, "_SLICE", 50)
    cluster, slab = without_upkeep(tmp_path / "t")
    with slab.lock:
        for start in range(0, 1800, 50):  # so that they have records
            part = np.arange(start, start + 50)
            slab.flushes.append_later(part, slab.frames.of(part), part * 0 + 1, deleted=False)
    make_room = RowLog.make_room

    def full_then(log: RowLog, *given: Any, **named: Any) -> None:
        make_room(log, *given, **named)
        Failing.fails, Failing.code = "allocate", errno.ENOSPC

    monkeypatch.setattr(RowLog, "make_room", full_then)
    cluster.delete("a", np.arange(1800))
    assert slab.log.failed is None
    Failing.fails = None
    end(cluster)


@pytest.mark.parametrize("fails", ["sync", "write_at"])
def test_a_failed_sync_or_write_ends_the_shard(tmp_path: Path, fails: str) -> None:
    cluster = start(tmp_path / "t")
    train(cluster, 0)
    before = make_durable(cluster, 1)
    train(cluster, 1)
    Failing.fails = fails
    (future,) = cluster.prepare_tiers(2)
    with pytest.raises(TierError, match="ended"):
        future.result(60)
    cluster.abandon_tiers()
    Failing.fails = None  # it is never retried as if nothing had happened
    with pytest.raises(TierError, match="has failed"):
        cluster.prepare_tiers(2)
    with pytest.raises(TierError, match="has failed"):
        train(cluster, 2)
    end(cluster)
    cluster = start(tmp_path / "t")
    assert state(cluster) == before
    end(cluster)


def test_a_batch_larger_than_the_cache_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t")
    batch = {"a": list(range(400))}
    with pytest.raises(ConfigError, match="raise memory="):
        cluster.push(
            wanted_of(cluster, batch),
            grads_of(cluster, {"a": np.ones((400, 6))}),
            lr=0.1,
        )
    assert cluster.touched_ids("a").size == 0
    end(cluster)


def test_a_lost_shard_comes_back_alone_at_the_durable_batch(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t", shards=2)
    for seed in range(4):
        train(cluster, seed)
    make_durable(cluster, 4)
    held = cluster.shards[1].read_all("a")
    train(cluster, 5)
    other = cluster.shards[0].read_all("a")
    cluster.kill(1)
    cluster.renew(1)
    cluster.serve(1)
    for shard, wanted in ((1, held), (0, other)):
        ids, planes = cluster.shards[shard].read_all("a")
        assert ids.tobytes() == wanted[0].tobytes()
        assert all(planes[name].tobytes() == wanted[1][name].tobytes() for name in planes)
    train(cluster, 6)
    end(cluster)


def test_versions_of_tiered_rows_are_whole(tmp_path: Path) -> None:
    """The repository over a tier: frozen while most rows are in the file, written beside pushes."""
    cluster = start(tmp_path / "t")
    repository = Repository.create(LocalStore(tmp_path / "r"), schema=cluster.schema())
    checkpointer = Checkpointer(repository, cluster)
    seen = []
    for step in range(1, 5):
        for seed in range(3):
            train(cluster, 10 * step + seed)
        if step == 3:
            cluster.delete("a", np.arange(0, 2000, 7))
        seen.append(state(cluster))
        saving = checkpointer.save(step)
        train(cluster, 1000 + step)
        saving.committed.result(60)
    end(cluster)
    copy = start(tmp_path / "u")
    other = Checkpointer(Repository.open(LocalStore(tmp_path / "r")), copy)
    for version in repository.versions():
        other.restore(version.number)
        assert state(copy) == seen[version.number - 1]
    end(copy)


def test_clearing_is_part_of_the_next_durable_batch(tmp_path: Path) -> None:
    trained(tmp_path / "t")
    cluster = start(tmp_path / "t")
    cluster.clear()
    train(cluster, 3)
    before = make_durable(cluster, 20)
    end(cluster)
    cluster = start(tmp_path / "t")
    assert cluster.tier_batch() == 20
    assert state(cluster) == before
    end(cluster)


def test_parity_over_a_tier_is_refused_with_the_reason(tmp_path: Path) -> None:
    made = tiered(TABLES, OPTIMIZER, tmp_path / "t", 300)
    with pytest.raises(ConfigError, match="larger than memory"):
        local(shards=4, parity=Parity(k=2, r=1)).open(made, OPTIMIZER, seed=0)
    assert not (tmp_path / "t").exists()

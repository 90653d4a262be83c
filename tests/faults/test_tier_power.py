"""Power cuts under a tier: after any system call, with any part of what was not synced.

Several lives in a row train on one tier. The calls of each are recorded; at some point the power
goes, and the next life starts from a disk that may have been left: of the writes that were not
synced any subset, each torn at sector size. What comes back must be a batch at or after the last
one that was acknowledged, every bit as the model was then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs.system_disk import Disk
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.errors import DamageError
from emberkeep.tables import Adagrad, Table
from emberkeep.testing import RecordingDisk, power_cut
from emberkeep.tiers import durable_open, log, superblock
from emberkeep.tiers.superseded import Superseded
from tests.contracts.engine import grads_of, state, wanted_of
from tests.nightly import by_night
from tests.unit.tiers.test_tiered_slab import tiered

TABLES = [
    Table("fixed", rows=300, dim=6),
    Table("dynamic", rows=None, capacity=40, dim=6, on_full="evict_oldest"),
    Table("wide", rows=80, dim=9),
]
OPTIMIZER = Adagrad(lr=0.1)
Acknowledged = list[tuple[int, int]]
Live = Callable[[Path, np.random.Generator, dict[int, Any], int], Any]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 8192)


def start(path: Path, make_disk: Callable[[], Disk], shards: int) -> LocalCluster:
    before, durable_open.DISK = durable_open.DISK, make_disk  # type: ignore[assignment, misc]
    try:
        made = tiered(TABLES, OPTIMIZER, path / "tier", 50 * shards)
        return local(shards=shards, threads=1).open(made, OPTIMIZER, seed=1)
    finally:
        durable_open.DISK = before  # type: ignore[misc]


def end(cluster: LocalCluster) -> None:
    for shard in cluster.shards:
        shard.kill()


def train(cluster: LocalCluster, random: np.random.Generator) -> None:
    """One batch: a push, now and then a deletion."""
    batch = {
        "fixed": random.choice(300, int(random.integers(1, 25)), replace=False).tolist(),
        "dynamic": random.choice(90, int(random.integers(1, 9)), replace=False).tolist(),
        "wide": random.choice(80, int(random.integers(1, 9)), replace=False).tolist(),
    }
    dims = {table.name: table.dim for table in TABLES}
    grads = {n: random.standard_normal((len(ids), dims[n])) for n, ids in batch.items()}
    wanted = wanted_of(cluster, batch)
    if random.random() < 0.7:
        cluster.fetch(wanted, ahead=random.random() < 0.5)
        cluster.pull(wanted)
    cluster.push(wanted, grads_of(cluster, grads), lr=0.1)
    if random.random() < 0.2:
        cluster.delete("fixed", random.choice(300, 20))
        cluster.delete("dynamic", random.choice(90, 5))


def everything(cluster: LocalCluster) -> Any:
    return state(cluster), cluster.table_state()


def recording(path: Path) -> Callable[[], RecordingDisk]:
    """One disk for all files of a life; what is there already was synced."""
    disk = RecordingDisk()
    disk.calls += [("make_directory", str(path)), ("sync_directory", str(path.parent))]
    for file in sorted(path.rglob("*")):
        if file.is_dir():
            disk.calls += [("make_directory", str(file)), ("sync_directory", str(file.parent))]
        else:
            disk.calls += [("create", str(file)), ("write", str(file), file.read_bytes())]
            disk.calls += [("sync", str(file)), ("sync_directory", str(file.parent))]
    return lambda: disk


def live(path: Path, random: np.random.Generator, models: dict[int, Any], shards: int) -> Any:
    """One life from the batch that came back on: its calls, and when which batch was durable."""
    make_disk = recording(path)
    cluster = start(path, make_disk, shards)
    back = cluster.tier_batch() or 0
    if back:
        assert everything(cluster) == models[back]
    acknowledged: Acknowledged = [(len(make_disk().calls), back)]
    for batch in range(back + 1, back + 1 + int(random.integers(3, 9))):
        train(cluster, random)
        if random.random() < 0.6:
            models[batch] = everything(cluster)
            prepared = cluster.prepare_tiers(batch)
            train(cluster, random)  # pushes go on while the batch is on its way
            for future in prepared:
                future.result(60)
            if random.random() < 0.2:
                cluster.abandon_tiers()  # as when a shard is lost meanwhile
                continue
            cluster.commit_tiers()
            acknowledged.append((len(make_disk().calls), batch))
    end(cluster)
    return make_disk().calls, acknowledged


def maybe_clear(cluster: LocalCluster, random: np.random.Generator) -> None:
    """Now and then all rows go, as when a version is restored, and others take their place."""
    if random.random() < 0.25:
        cluster.clear()
        for _ in range(int(random.integers(0, 12))):
            train(cluster, random)


def live_with_clears(
    path: Path, random: np.random.Generator, models: dict[int, Any], shards: int
) -> Any:
    """As `live`, with all rows cleared and batches given up at any point."""
    make_disk = recording(path)
    cluster = start(path, make_disk, shards)
    back = cluster.tier_batch() or 0
    if back:
        assert everything(cluster) == models[back]
    acknowledged: Acknowledged = [(len(make_disk().calls), back)]
    for batch in range(back + 1, back + 1 + int(random.integers(3, 9))):
        train(cluster, random)
        maybe_clear(cluster, random)
        if random.random() < 0.4:
            continue
        models[batch] = everything(cluster)
        prepared = cluster.prepare_tiers(batch)
        train(cluster, random)
        maybe_clear(cluster, random)
        given_up = random.choice(["no", "no", "while prepared", "once prepared"])
        if given_up != "while prepared":
            for future in prepared:
                future.result(60)
        if given_up == "no":
            cluster.commit_tiers()
            acknowledged.append((len(make_disk().calls), batch))
        else:
            cluster.abandon_tiers()
        maybe_clear(cluster, random)
    end(cluster)
    return make_disk().calls, acknowledged


def check_lives(base: Path, seed: int, lives: int, shards: int, live: Live = live) -> None:
    random = np.random.default_rng(seed)
    chance = Random(seed)
    models: dict[int, Any] = {}
    path = base / "0"
    path.mkdir(parents=True)
    least = 0
    for life in range(1, lives + 1):
        calls, acknowledged = live(path, random, models, shards)
        assert acknowledged[0][1] >= least
        cut = chance.randint(acknowledged[0][0], len(calls))
        least = max(batch for at, batch in acknowledged if at <= cut)
        target = base / str(life)
        (target / "tier").mkdir(parents=True)
        power_cut(calls[:cut], str(path), str(target), random=chance)
        shutil.rmtree(path)
        path = target
    cluster = start(path, Disk, shards)
    back = cluster.tier_batch() or 0
    assert back >= least
    if back:
        assert everything(cluster) == models[back]
    end(cluster)


@pytest.mark.parametrize("seed", [*range(3), *by_night(range(3, 6))])
def test_what_comes_back_is_a_batch_that_was_durable_bit_for_bit(tmp_path: Path, seed: int) -> None:
    check_lives(tmp_path / "tier", seed, lives=5, shards=1 + seed % 2)


@pytest.mark.parametrize("seed", [*range(40, 44), *by_night(range(44, 52))])
def test_rows_that_were_cleared_do_not_come_back(tmp_path: Path, seed: int) -> None:
    """Space of what no batch can have is used again at once: nothing that one has may be there."""
    check_lives(tmp_path / "tier", seed, lives=6, shards=1 + seed % 2, live=live_with_clears)


@pytest.mark.parametrize("seed", [20, 21, *by_night((22, 23))])
def test_long_heads_are_torn_one_at_a_time(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that lie in segments, as those of many tables do."""
    for module in (superblock, log):
        monkeypatch.setattr(module, "ROOM", 300)
    check_lives(tmp_path / "tier", seed, lives=5, shards=1 + seed % 2)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 400))
def test_long_lives_under_power_cuts(tmp_path: Path, seed: int) -> None:
    check_lives(tmp_path / "tier", seed, lives=12, shards=1 + seed % 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(400, 500))
def test_long_lives_with_clears_under_power_cuts(tmp_path: Path, seed: int) -> None:
    check_lives(tmp_path / "tier", seed, lives=12, shards=1 + seed % 3, live=live_with_clears)


def test_clears_find_space_that_is_used_again_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above have teeth: segments that always count as written after a clear."""

    def begin_segment(superseded: Superseded, segment: int) -> None:
        superseded._loose[segment] = True

    monkeypatch.setattr(Superseded, "begin_segment", begin_segment)
    with pytest.raises((AssertionError, DamageError)):  # noqa: PT012
        for seed in range(40, 52):
            path = tmp_path / str(seed)
            check_lives(path, seed, lives=6, shards=1 + seed % 2, live=live_with_clears)


def test_nothing_survives_that_was_not_synced(tmp_path: Path) -> None:
    """Cuts at every call of one life, with nothing of what was not synced."""
    random = np.random.default_rng(3)
    models: dict[int, Any] = {}
    path = tmp_path / "base"
    path.mkdir()
    calls, acknowledged = live(path, random, models, 1)
    for cut in range(acknowledged[0][0], len(calls) + 1, 3):
        target = tmp_path / str(cut)
        (target / "tier").mkdir(parents=True)
        power_cut(calls[:cut], str(path), str(target))
        cluster = start(target, Disk, 1)
        back = cluster.tier_batch() or 0
        assert back >= max(batch for at, batch in acknowledged if at <= cut)
        if back:
            assert everything(cluster) == models[back]
        end(cluster)
        shutil.rmtree(target)


def test_the_model_of_the_disk_finds_a_missing_sync(tmp_path: Path) -> None:
    """The tests above have teeth: a tier whose syncs do nothing loses rows that it had promised."""

    class Forgetful(RecordingDisk):
        def sync(self, handle: int) -> None:
            if not self._open.get(handle, "").endswith(".tier"):
                super().sync(handle)

    disk = Forgetful()
    path = tmp_path / "base"
    path.mkdir()
    disk.calls += [("make_directory", str(path)), ("sync_directory", str(tmp_path))]
    cluster = start(path, lambda: disk, 1)
    train(cluster, np.random.default_rng(0))
    for future in cluster.prepare_tiers(1):
        future.result(60)
    cluster.commit_tiers()
    end(cluster)
    target = tmp_path / "after"
    (target / "tier").mkdir(parents=True)
    power_cut(disk.calls, str(path), str(target))
    after = start(target, Disk, 1)
    assert after.tier_batch() is None
    end(after)

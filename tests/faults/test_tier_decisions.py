"""A commit that is interrupted anywhere is committed in all files of a tier, or in none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import DamageError, StorageError, TierError
from emberkeep.tiers import durable_open
from tests.contracts.engine import state
from tests.faults.test_tier_faults import end, make_durable, start, train
from tests.unit.keeper.test_tier_keeper import Run
from tests.unit.tiers.test_tiered_slab import Unsynced


class Failing(Unsynced):
    """Fails the writes of one file's head, or the creation of decisions, while a test wants it."""

    heads: str | None = None
    links = False

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}

    def open(self, path: str, *, direct: bool) -> int:
        handle = super().open(path, direct=direct)
        self._paths[handle] = path
        return handle

    def write_at(self, handle: int, view: memoryview, offset: int) -> None:
        if self.heads is not None and self._paths[handle].endswith(self.heads):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().write_at(handle, view, offset)

    def link(self, source: str, target: str) -> None:
        if self.links:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().link(source, target)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Failing)
    Failing.heads, Failing.links = None, False
    yield
    Failing.heads, Failing.links = None, False


def prepared(path: Path, batch: int = 2) -> tuple[LocalCluster, Any, Any]:
    """Three shards that have committed batch 1 and prepared another one; the state at both."""
    cluster = start(path, shards=3)
    train(cluster, 1)
    one = make_durable(cluster, 1)
    train(cluster, 2)
    two = state(cluster)
    for future in cluster.prepare_tiers(batch):
        future.result(60)
    return cluster, one, two


def decisions(path: Path) -> list[str]:
    return sorted(f.name for f in (path / "state").glob("decision-*"))


def comes_back(path: Path, batch: int, expected: Any) -> None:
    for _ in range(2):
        cluster = start(path, shards=3)
        assert cluster.tier_batch() == batch
        assert state(cluster) == expected
        end(cluster)
    assert decisions(path) == []


def test_a_commit_that_is_given_up_after_one_file_is_a_commit(tmp_path: Path) -> None:
    cluster, _, two = prepared(tmp_path / "t")
    (slab,) = cluster.shards[1].tiers()
    slab.commit(slab.log.prepared.nonce)
    cluster.abandon_tiers()
    assert cluster.tier_batch() == 2
    assert decisions(tmp_path / "t") == []
    train(cluster, 3)
    for future in cluster.prepare_tiers(3):
        future.result(60)
    end(cluster)
    comes_back(tmp_path / "t", 2, two)


def test_a_file_that_cannot_record_a_commit_comes_back_with_the_others(tmp_path: Path) -> None:
    cluster, _, two = prepared(tmp_path / "t")
    Failing.heads = "rows-1-0.tier"
    with pytest.raises(TierError, match=r"rows-1-0\.tier could not be written"):
        cluster.commit_tiers()
    cluster.abandon_tiers()
    assert [shard.tiers()[0].batch for shard in cluster.shards] == [2, 1, 2]
    assert len(decisions(tmp_path / "t")) == 1
    with pytest.raises(TierError, match="has failed"):
        cluster.prepare_tiers(3)
    Failing.heads = None
    end(cluster)
    comes_back(tmp_path / "t", 2, two)


def test_that_file_comes_back_alone_too(tmp_path: Path) -> None:
    cluster, _, two = prepared(tmp_path / "t")
    Failing.heads = "rows-1-0.tier"
    with pytest.raises(TierError):
        cluster.commit_tiers()
    cluster.abandon_tiers()
    Failing.heads = None
    cluster.kill(1)
    cluster.renew(1)
    cluster.serve(1)
    assert cluster.tier_batch() == 2
    assert state(cluster) == two
    assert decisions(tmp_path / "t") == []
    train(cluster, 3)
    before = make_durable(cluster, 3)
    end(cluster)
    comes_back(tmp_path / "t", 3, before)


def test_what_nobody_decided_is_aborted_by_the_next_opening(tmp_path: Path) -> None:
    cluster, one, _ = prepared(tmp_path / "t")
    end(cluster)
    comes_back(tmp_path / "t", 1, one)


def test_what_is_aborted_stays_so(tmp_path: Path) -> None:
    """A shard that comes back alone gives up the batch that the others were about to commit."""
    cluster, one, _ = prepared(tmp_path / "t")
    cluster.shards[1].kill()
    cluster.renew(1)
    cluster.serve(1)
    with pytest.raises(TierError, match="nothing was committed"):
        cluster.commit_tiers()
    cluster.abandon_tiers()
    assert cluster.tier_batch() == 1
    assert decisions(tmp_path / "t") == []
    end(cluster)
    comes_back(tmp_path / "t", 1, one)


def test_a_batch_that_recurs_after_a_rewind_is_another_one(tmp_path: Path) -> None:
    cluster, _, _ = prepared(tmp_path / "t")
    kept = {f: f.read_bytes() for f in (tmp_path / "t").glob("rows-*")}
    cluster.commit_tiers()
    end(cluster)
    # One file as it was: prepared, for a decision that is gone because all had recorded it.
    late = tmp_path / "t" / "rows-2-0.tier"
    late.write_bytes(kept[late])
    cluster = start(tmp_path / "t", shards=3)
    assert cluster.tier_batch() == 2
    end(cluster)
    # And a batch of the same number that is not the same.
    cluster = start(tmp_path / "u", shards=3)
    train(cluster, 7)
    make_durable(cluster, 2)
    end(cluster)
    late.write_bytes((tmp_path / "u" / late.name).read_bytes())
    with pytest.raises(DamageError, match=r"does not hold batch 2"):
        start(tmp_path / "t", shards=3)


def test_a_decision_that_cannot_be_stored_is_waited_for(tmp_path: Path) -> None:
    cluster, one, _ = prepared(tmp_path / "t")
    Failing.links = True
    with pytest.raises(StorageError):
        cluster.commit_tiers()
    with pytest.raises(StorageError):
        cluster.abandon_tiers()
    with pytest.raises(StorageError):
        cluster.prepare_tiers(3)
    assert cluster.tier_batch() == 1
    Failing.links = False
    train(cluster, 3)
    before = make_durable(cluster, 3)
    assert decisions(tmp_path / "t") == []
    end(cluster)
    comes_back(tmp_path / "t", 3, before)
    assert before != one


def test_a_damaged_decision_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    cluster, _, two = prepared(tmp_path / "t")
    Failing.heads = ".tier"  # no file can record it
    with pytest.raises(TierError):
        cluster.commit_tiers()
    end(cluster)
    Failing.heads = None
    (name,) = decisions(tmp_path / "t")
    file = tmp_path / "t" / "state" / name
    content = file.read_bytes()
    before = {f: f.read_bytes() for f in (tmp_path / "t").glob("rows-*")}
    for spoiled in (content[:-1], b"", content.replace(b"committed", b"aborted!!")):
        file.write_bytes(spoiled)
        with pytest.raises(DamageError, match=f"{name} is damaged"):
            start(tmp_path / "t", shards=3)
    assert {f: f.read_bytes() for f in (tmp_path / "t").glob("rows-*")} == before
    file.write_bytes(content)
    comes_back(tmp_path / "t", 2, two)


def test_a_keeper_goes_on_after_a_decision_that_could_not_be_stored(tmp_path: Path) -> None:
    run = Run(tmp_path / "t", shards=2)
    run.train(2)
    Failing.links = True
    with pytest.raises(StorageError):
        run.save()
    Failing.links = False
    run.train(1)
    run.save()
    assert run.keeper.durable == 3
    run.end()
    beside, state_of_three = sorted(os.listdir(tmp_path / "t" / "state"))
    assert beside == ".incomplete"
    assert state_of_three.startswith("step-3-")
    again = Run(tmp_path / "t", shards=2)
    assert again.keeper.resume() == 3
    again.end()


def test_a_decision_without_its_files_is_no_new_tier(tmp_path: Path) -> None:
    cluster, _, two = prepared(tmp_path / "t")
    Failing.heads = ".tier"
    with pytest.raises(TierError):
        cluster.commit_tiers()
    end(cluster)
    Failing.heads = None
    os.mkdir(tmp_path / "elsewhere")
    files = list((tmp_path / "t").glob("rows-*"))
    for file in files:
        os.rename(file, tmp_path / "elsewhere" / file.name)
    with pytest.raises(DamageError, match=r"is missing, although .*decision-2"):
        start(tmp_path / "t", shards=3)
    for file in files:
        os.rename(tmp_path / "elsewhere" / file.name, file)
    comes_back(tmp_path / "t", 2, two)

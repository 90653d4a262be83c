"""Errors beside the training loop: kept, raised to who waits and at the next call, no hang."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs.system_disk import Disk
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.errors import DeadlineError, StoppedError, TierError
from emberkeep.testing.virtual_clock import VirtualClock
from emberkeep.tiers import durable_open, upkeep
from emberkeep.tiers import log as logs
from tests.contracts.engine import state
from tests.faults.test_tier_faults import end, make_durable, start, train
from tests.unit.keeper.test_tier_keeper import Run
from tests.unit.tiers.test_tiered_slab import Unsynced


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


def durable(path: Path, shards: int = 1) -> tuple[LocalCluster, Any]:
    cluster = start(path, shards=shards)
    train(cluster, 0)
    return cluster, make_durable(cluster, 1)


def train_on(cluster: LocalCluster) -> None:
    for seed in range(60):
        train(cluster, seed)


def raising(error: BaseException) -> Any:
    def work(*_: Any) -> Any:
        raise error

    return work


ERRORS = [OSError(errno.EIO, "Input/output error"), MemoryError("no memory"), ZeroDivisionError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["_evict", "_save", "_write_waiting"])
def test_whatever_upkeep_meets_is_raised_to_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    cluster, before = durable(tmp_path / "t")
    train(cluster, 1)
    monkeypatch.setattr(upkeep, where, raising(error))
    with pytest.raises((TierError, type(error))):
        cluster.prepare_tiers(2)[0].result(60)
    cluster.abandon_tiers()
    check_ended(cluster, error)
    monkeypatch.undo()
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    again = start(tmp_path / "t")
    assert state(again) == before
    end(again)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_the_cleaner_meets_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    cluster, _ = durable(tmp_path / "t")
    (slab,) = cluster.shards[0].tiers()
    monkeypatch.setattr(upkeep, "_clean", raising(error))
    slab._upkeep.wake()
    with pytest.raises(StoppedError):
        slab._upkeep.wait(lambda: False, "the cleaner", timedelta(seconds=60))
    check_ended(cluster, error)


def check_ended(cluster: LocalCluster, error: BaseException) -> None:
    """Every call says why, and closing does not wait for what is gone."""
    with pytest.raises(TierError, match="has failed") as raised:
        train(cluster, 2)
    assert raised.value.__cause__ is error
    with pytest.raises(TierError, match="has failed"):
        cluster.prepare_tiers(2)
    with pytest.raises(TierError, match="ended") as raised:
        cluster.close()
    assert raised.value.__cause__ is error


def test_nobody_waits_for_ever_for_a_disk_that_hangs(tmp_path: Path) -> None:
    cluster = start(tmp_path / "t")
    train(cluster, 0)
    train(cluster, 1)
    (slab,) = cluster.shards[0].tiers()
    slab._upkeep.close()
    slab.log.clock = clock = VirtualClock(pace=1e6)
    before = state(cluster)
    with slab.lock:
        while slab.flushes.finish_one():
            pass
        (bound,) = np.nonzero(slab.frames.row_of >= 0)
        flush = slab.flushes.begin(bound, evict=True)
        assert flush is not None
        with pytest.raises(DeadlineError, match=r"rows to be written to .*t/"):
            slab.flushes.finish_one()
    assert clock.monotonic() >= 600
    slab.flushes.write(flush)
    with slab.lock:
        assert slab.flushes.finish_one()
        load = slab.loads.begin(gone := np.flatnonzero(slab.positions)[:8])
        with pytest.raises(DeadlineError, match=r"rows to be read from .*t/"):
            slab.loads.finish_one()
        slab.loads.perform(load)
        assert slab.loads.finish_one()
        assert (slab.frames.frame_of[gone] >= 0).all()
    assert state(cluster) == before
    with slab.log.using(), pytest.raises(DeadlineError, match="to end before it is closed"):
        slab.log.close()
    cluster.close()


def test_a_keeper_over_upkeep_that_failed_closes_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "t")
    run.train(2)
    monkeypatch.setattr(upkeep, "_save", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises((OSError, TierError)):
        run.keeper.close()
    with pytest.raises(TierError):
        run.end()


def test_a_thread_that_cannot_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(tmp_path / "t")
    honest = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "emberkeep-tier-upkeep":
            raise RuntimeError("can't start new thread")
        honest(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        train(cluster, 0)  # has taken place: nobody may hear that it has not
    with pytest.raises(TierError, match="can't start new thread"):
        cluster.prepare_tiers(1)
    end(cluster)


def test_an_error_between_append_and_write_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose newest records are in memory alone would be taken for written."""
    cluster, before = durable(tmp_path / "t")
    (slab,) = cluster.shards[0].tiers()
    slab._upkeep.stop()
    monkeypatch.setattr(logs.kernels, "seal", raising(MemoryError("no memory")))
    with pytest.raises((MemoryError, TierError)):
        train_on(cluster)
    monkeypatch.undo()
    with pytest.raises(TierError, match="has failed"):
        train_on(cluster)
    end(cluster)
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    again = start(tmp_path / "t")
    assert state(again) == before
    end(again)


def test_a_checkpoint_that_one_shard_refuses_is_under_way_in_none(tmp_path: Path) -> None:
    cluster, _ = durable(tmp_path / "t", shards=3)
    train(cluster, 1)
    slab = cluster.shards[1].tiers()[0]
    slab.log.failed = OSError(errno.EIO, "Input/output error")
    with pytest.raises(TierError, match="has failed"):
        cluster.prepare_tiers(2)
    assert [shard.tiers()[0].saving for shard in cluster.shards] == [None] * 3
    slab.log.failed = None
    make_durable(cluster, 2)
    assert cluster.tier_batch() == 2
    end(cluster)


def test_a_keeper_whose_thread_cannot_start_saves_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "t")
    run.train(2)
    honest = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "emberkeep-tier-commit":
            raise RuntimeError("can't start new thread")
        honest(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            run.keeper.checkpoint()
    run.save()
    assert run.keeper.durable == 2
    run.end()


# -- the file itself -----------------------------------------------------------------------------


class Buffered(Unsynced):
    """A file system that has no direct reads and writes."""

    def open(self, path: str, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return super().open(path, direct=direct)


class Broken(Unsynced):
    """A disk on which nothing can be opened for direct access, for another reason."""

    def open(self, path: str, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return super().open(path, direct=direct)


def test_a_file_system_without_direct_access_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_open, "DISK", Buffered)
    with pytest.warns(RuntimeWarning, match="direct") as caught:
        cluster = start(tmp_path / "t", shards=2)
    assert len([w for w in caught if "direct" in str(w.message)]) == 1
    assert [status.direct for status in cluster.tier_status()] == [False, False]
    end(cluster)
    monkeypatch.setattr(durable_open, "DISK", Disk)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cluster = start(tmp_path / "t", shards=2)
    train(cluster, 0)
    make_durable(cluster, 3)
    status = cluster.tier_status()[0]
    assert (status.path, status.batch, status.damaged) == (
        str(tmp_path / "t" / "rows-0-0.tier"), 3, 0,
    )  # fmt: skip
    assert status.appended > 0
    end(cluster)


def test_another_error_is_no_reason_to_go_on_without_direct_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_open, "DISK", Broken)
    with pytest.raises(TierError, match="Input/output error"):
        start(tmp_path / "t")


@pytest.mark.parametrize("gone", ["rows-0-0.tier", "lock"])
@pytest.mark.parametrize("when", ["before", "prepared"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_removed_is_not_reported_durable(
    tmp_path: Path, gone: str, when: str, replaced: bool
) -> None:
    cluster, _ = durable(tmp_path / "t")
    train(cluster, 1)
    file = tmp_path / "t" / gone
    content = file.read_bytes()

    def remove() -> None:
        os.unlink(file)
        if replaced:
            file.write_bytes(content)

    def save() -> None:
        (future,) = cluster.prepare_tiers(2)
        future.result(60)
        remove()
        cluster.commit_tiers()

    if when == "before":
        remove()
    with pytest.raises(TierError, match=rf"{gone}.* (removed|replaced)"):
        save()
    assert cluster.tier_batch() == 1
    with pytest.raises(TierError, match="has failed"):
        train(cluster, 2)
    end(cluster)

"""Versions written beside training and brought back: the same bits, on any number of shards."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.checkpoint.save import BackgroundSaver
from emberkeep.cluster.local.local_cluster import local
from emberkeep.errors import (
    ConfigError,
    DamageError,
    DeadlineError,
    FencedError,
    SaveError,
    StateError,
    StorageError,
)
from emberkeep.repository import KeepAll, KeepLast, Repository
from emberkeep.repository.policies import Grid
from emberkeep.tables import SGD, Adam, Table
from emberkeep.testing.virtual_clock import VirtualClock
from tests.contracts.engine import grads_of, state, wanted_of
from tests.contracts.layout import EVICTING, KEEP, TABLES, opened, started, train
from tests.nightly import checkered
from tests.threads import started_since
from tests.waiting import until


@pytest.mark.parametrize("shards", [1, 3])
def test_the_steps_of_a_version_are_those_of_its_rows(shards: int) -> None:
    """A push of another thread or worker that comes right before the rows are frozen counts."""
    cluster, store = opened(EVICTING, shards=shards), MemoryStore()
    keeper, random = started(cluster, store), np.random.default_rng(2)
    train(cluster, random)
    frozen = cluster.freeze

    def freeze(*given: Any) -> Any:
        train(cluster, random)
        return frozen(*given)

    cluster.freeze = freeze  # type: ignore[method-assign]
    keeper.save(1)
    keeper.wait()
    fresh = opened(EVICTING, shards=shards)
    started(fresh, store).restore()
    assert state(fresh) == state(cluster)
    assert fresh.table_state() == cluster.table_state()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 4)])
def test_versions_move_to_another_number_of_shards(before: int, after: int) -> None:
    random = np.random.default_rng(1)
    cluster = opened(shards=before)
    keeper = started(cluster, spec=VersionSpec(layout="one_shot"))
    for step in range(1, 4):
        train(cluster, random)
        keeper.save(step)
        keeper.wait()
    moved = opened(shards=after)
    second = started(moved, keeper.repository.store, spec=VersionSpec(layout="one_shot"))
    second.restore()
    assert state(moved) == state(cluster)
    second.save(4)
    manifest = second.wait()
    assert manifest is not None
    assert manifest.layout["kind"] == ("baseline" if before == after else "full")
    assert len(manifest.files) <= after


def test_increments_hold_only_what_changed() -> None:
    cluster = opened()
    keeper = started(cluster, spec=VersionSpec(layout="consecutive"))
    train(cluster, np.random.default_rng(0), steps=20)
    keeper.save(1)
    keeper.wait()
    ids = wanted_of(cluster, {"fixed": [4, 8, 15]})
    cluster.push(ids, grads_of(cluster, {"fixed": np.ones((3, 6))}), lr=0.1)
    keeper.save(2)
    manifest = keeper.wait()
    assert manifest is not None
    assert [file.metadata["rows"] for file in manifest.files] == [{"fixed": 3}]
    keeper.save(3)
    assert keeper.wait().files == ()  # type: ignore[union-attr]


def test_quantized_rows_come_back_within_their_bound_and_close_loses_nothing() -> None:
    cluster = opened()
    keeper = started(cluster, spec=VersionSpec(layout="full", bits=8))
    train(cluster, np.random.default_rng(0), steps=10)
    keeper.save(1)
    keeper.wait()
    fresh = opened()
    started(fresh, keeper.repository.store).restore()
    ids, planes = cluster.read_all("fixed")
    got = fresh.read("fixed", ids)
    span = planes["weight"].max(axis=1) - planes["weight"].min(axis=1)
    assert (np.abs(got["weight"] - planes["weight"]).max(axis=1) <= 0.505 * span / 255).all()
    assert got["first_moment"].tobytes() == planes["first_moment"].tobytes()
    keeper = started(cluster, keeper.repository.store, spec=VersionSpec(layout="full", bits=2))
    assert keeper.close(2) is not None
    exact = opened()
    started(exact, keeper.repository.store).restore()
    assert state(exact) == state(cluster)


def test_bits_follow_the_restores() -> None:
    store = MemoryStore()
    chosen = []
    for _ in range(4):
        cluster = opened()
        keeper = started(cluster, store, spec=VersionSpec(layout="full", expected_restores=2))
        keeper.restore()
        train(cluster, np.random.default_rng(0))
        keeper.save(1)
        manifest = keeper.wait()
        assert manifest is not None
        chosen.append(manifest.layout["codecs"]["weight"]["bits"])
    assert chosen == [3, 3, 3, 8]  # no restore, one, two as expected, then one too many


def test_retention_removes_old_versions_and_keeps_what_the_rest_needs() -> None:
    cluster = opened()
    settings = SaveSettings(retention=KeepLast(n=2), grace=timedelta(0))
    keeper = started(cluster, spec=VersionSpec(layout="one_shot"), settings=settings)
    random = np.random.default_rng(2)
    for step in range(1, 7):
        train(cluster, random)
        keeper.save(step)
        keeper.wait()
    numbers = [version.number for version in keeper.repository.versions()]
    assert numbers == [1, 5, 6]  # the baseline, and the last two that count from it
    fresh = opened()
    started(fresh, keeper.repository.store).restore()
    assert state(fresh) == state(cluster)


def test_old_versions_stay_for_the_grace_period() -> None:
    clock, cluster = VirtualClock(), opened()
    store = MemoryStore(clock)
    repository = Repository.create(store, schema=cluster.schema(), clock=clock)
    settings = SaveSettings(retention=KeepLast(n=1), grace=timedelta(hours=1))
    keeper = Checkpointer(repository, cluster, spec=VersionSpec(layout="full"), settings=settings)
    random, kept = np.random.default_rng(2), []
    for step in range(1, 6):
        train(cluster, random)
        keeper.save(step)
        keeper.wait()
        kept.append([version.number for version in repository.versions()])
        clock.advance(timedelta(minutes=29))
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_nobody_waits_for_ever_for_a_store_that_hangs() -> None:
    release, hangs, clock, cluster = threading.Event(), [True], VirtualClock(pace=1e7), opened()

    class Hanging(MemoryStore):
        def put(self, name: str, data: Any) -> int:
            if hangs[0] and name.startswith("data/"):
                assert release.wait(60)
            return super().put(name, data)

    repository = Repository.create(Hanging(), schema=cluster.schema(), clock=clock)
    keeper = Checkpointer(repository, cluster, settings=KEEP)
    train(cluster, np.random.default_rng(0))
    saving = keeper.save(7)
    assert not keeper.join(timedelta(seconds=1))
    with pytest.raises(DeadlineError, match="the save of step 7"):
        keeper.wait()
    assert clock.monotonic() >= 6 * 3600
    hangs[0] = False
    release.set()
    assert saving.committed.result(60).step == 7  # it has gone on
    until(saving.ended.is_set, "its end")  # by this clock: hours of the other one are milliseconds
    keeper.close()


class Flaky(MemoryStore):
    """Refuses to write data while a test wants it."""

    broken = False

    def put(self, name: str, data: Any) -> int:
        if self.broken and name.startswith("data/"):
            raise SaveError("the store is broken")
        return super().put(name, data)


def test_a_failed_save_is_warned_of_and_its_rows_are_in_the_next() -> None:
    store, cluster = Flaky(), opened()
    keeper = started(cluster, store, spec=VersionSpec(layout="consecutive"))
    random = np.random.default_rng(4)
    train(cluster, random)
    keeper.save(1)
    keeper.wait()
    store.broken = True
    for step in (2, 3):
        train(cluster, random)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            keeper.save(step)
            keeper.join()
        assert any("broken" in str(warning.message) for warning in seen)
    store.broken = False
    train(cluster, random)
    keeper.save(4)
    keeper.wait()
    fresh = opened()
    started(fresh, store).restore()
    assert state(fresh) == state(cluster)


@pytest.mark.filterwarnings("ignore:saving step")
def test_saves_that_keep_failing_raise_at_the_next_call_and_in_wait() -> None:
    store, cluster = Flaky(), opened()
    keeper = started(cluster, store)
    train(cluster, np.random.default_rng(0))
    store.broken = True
    for step in range(3):
        keeper.save(step).committed.exception()
    with pytest.raises(SaveError, match="3 saves in a row"):
        keeper.save(4)
    keeper.save(5)
    with pytest.raises(SaveError, match="broken"):
        keeper.wait()


@pytest.mark.filterwarnings("ignore:saving step")
def test_a_process_that_was_replaced_stops() -> None:
    cluster, store = opened(), MemoryStore()
    first = started(cluster, store)
    train(cluster, np.random.default_rng(0))
    started(opened(), store)
    first.save(1)
    with pytest.raises(FencedError):
        first.wait()
    with pytest.raises(FencedError):
        first.save(2)


def test_a_newer_save_cancels_the_older_one_when_asked_to() -> None:
    cluster = opened()
    settings = SaveSettings(retention=KeepAll(), overlap="cancel")
    keeper = started(cluster, settings=settings, spec=VersionSpec(layout="consecutive"))
    random = np.random.default_rng(0)
    for step in range(1, 30):
        train(cluster, random, steps=1)
        keeper.save(step)
    assert keeper.wait() is not None
    fresh = opened()
    started(fresh, keeper.repository.store).restore()
    assert state(fresh) == state(cluster)


@pytest.mark.filterwarnings("ignore:saving step")
@pytest.mark.parametrize("fails", [None, 4])
def test_saves_that_take_longer_than_the_interval_still_make_versions(
    monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    """Cancelled for ever, none would be: at most one is given up until a version is there."""
    go = threading.Semaphore(0)

    class Slow(MemoryStore):
        def put(self, name: str, data: Any) -> int:
            if name.startswith("data/"):
                assert go.acquire(timeout=60)
                if step - 1 == fails:  # a step later it is still being written
                    raise StorageError("broken")
            return super().put(name, data)

    plain = BackgroundSaver._join

    def late(self: Any, timeout: timedelta | None, *, unless_stopping: bool) -> bool:
        go.release()  # what is written goes on once the next save waits for it
        ended = plain(self, timeout, unless_stopping=unless_stopping)
        while go.acquire(blocking=False):
            pass
        return ended

    monkeypatch.setattr(BackgroundSaver, "_join", late)
    store, cluster, random = Slow(), opened([Table("one", rows=50, dim=4)]), np.random.default_rng()
    events: list[tuple[str, Any]] = []
    Repository.create(store, schema=cluster.schema())
    keeper = Checkpointer(
        Repository.open(store), cluster, spec=VersionSpec(layout="full"),
        settings=SaveSettings(retention=KeepAll(), overlap="cancel"),
        on_event=lambda *event: events.append(event),
    )  # fmt: skip
    for step in range(1, 10):
        train(cluster, random, steps=1)
        keeper.save(step)
    keeper.wait()
    event = [(details["step"], name) for name, details in events]
    assert [step for step, _ in event] == list(range(1, 10))
    given_up = [step for step, name in event if name == "save_cancelled"]
    # After one that was given up, none is until there is a version.
    assert given_up == ([1, 3, 5, 7] if fails is None else [1, 3, 6, 8])
    assert [step for step, name in event if name == "save_failed"] == ([] if fails is None else [4])
    assert [d["cancelled"] for name, d in events if name == "save_cancelled"] == [1, 2, 3, 4]


def test_damage_is_refused_or_passed_over_as_asked() -> None:
    cluster, store = opened(), MemoryStore()
    keeper = started(cluster, store, spec=VersionSpec(layout="full"))
    random = np.random.default_rng(0)
    states = []
    for step in (1, 2, 3):
        train(cluster, random)
        states.append(state(cluster))
        keeper.save(step)
        keeper.wait()
    newest = keeper.repository.manifest(3).files[0].name
    content = bytearray(store.get(newest))
    content[len(content) // 2] ^= 1
    store.put(newest, bytes(content))
    fresh = opened()
    reader = started(fresh, store)
    with pytest.raises(DamageError, match=newest):
        reader.restore()
    restored = reader.restore(fall_back=True)
    assert restored is not None
    assert [version.number for version in restored.lost] == [3]
    assert state(fresh) == states[1]


def test_a_model_of_another_shape_is_refused_by_name() -> None:
    keeper = started(opened())
    other = [Table("fixed", rows=900, dim=7), *TABLES[1:], Table("new", rows=2, dim=2)]
    with pytest.raises(StateError, match=r"'fixed': planes.*'new' is not in the repository"):
        started(opened(other), keeper.repository.store)
    with pytest.raises(StateError, match="origin"):
        started(local().open(TABLES, Adam(lr=0.1), seed=4), keeper.repository.store)
    with pytest.raises(StateError, match="planes"):
        started(local().open(TABLES, SGD(lr=0.1), seed=3), keeper.repository.store)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": "some"},
        {"bits": 5},
        {"bits": 4, "expected_restores": 3},
        {"expected_restores": -1},
    ],
)
def test_strategies_check_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VersionSpec(**wrong)


# -- extraction that fails -----------------------------------------------------------------------

POINTS = {
    "before": "emberkeep.repository.grid.extraction_worker.Extractor",
    "start": "emberkeep.repository.grid.shard_extraction.ShardExtraction._start",
    "admit": "emberkeep.repository.grid.shard_extraction.ShardExtraction._admit",
    "choose": "emberkeep.repository.grid.shard_extraction.ShardExtraction._chosen",
    "split": "emberkeep.repository.grid.shard_extraction.ShardExtraction._split",
    "divide": "emberkeep.repository.grid.shard_extraction.ShardExtraction._divide",
    "write": "emberkeep.repository.grid.shard_extraction.ShardExtraction._write",
    "commit": "emberkeep.repository.grid.extraction.commit",
    "replace": "emberkeep.repository.grid.shard_extraction.ShardExtraction._replace",
    "report": "emberkeep.repository.grid.extraction_worker._details",
}


@pytest.mark.parametrize(
    ("point", "kind"),
    checkered(list(POINTS), [MemoryError, OSError, IndexError, KeyboardInterrupt]),
)
@pytest.mark.long
def test_a_round_that_fails_anywhere_is_reported_and_done_again(
    point: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    random, cluster, store = np.random.default_rng(4), opened(), MemoryStore()
    events: list[tuple[str, Any]] = []
    rules = VersionSpec(layout="grid", grid=Grid(ratio=0.0, resets=False))

    def keeping() -> Checkpointer:
        keeper = started(cluster, store, spec=rules, on_event=lambda *event: events.append(event))
        keeper.restore()
        return keeper

    def save(*steps: int) -> None:
        for step in steps:
            train(cluster, random)
            keeper.save(step)
            keeper.wait()
            keeper.settle()

    def fails(*_: Any, **__: Any) -> None:
        raise kind("on purpose")

    keeper = keeping()
    save(1)
    keeper = keeping()  # an extractor is made again
    with monkeypatch.context() as patched:
        patched.setattr(POINTS[point], fails)
        with pytest.warns(UserWarning, match="on purpose"):
            save(2, 3)
    failed = [details for name, details in events if name == "extraction_failed"]
    assert [details["in_a_row"] for details in failed] == [1, 2]
    assert all("on purpose" in details["error"] for details in failed)
    save(4)
    keeper.close()
    done = [details for name, details in events if name == "extracted"]
    assert done[-1]["covered"] == 4
    assert len(events) == 4 + 2 + 2  # saved, failed, extracted: no round was tried in between
    fresh = opened()
    started(fresh, store, spec=rules).restore()
    assert state(fresh) == state(cluster)


@pytest.mark.parametrize("layout", ["intermittent", "grid"])
@pytest.mark.parametrize("kind", [MemoryError, OSError])
def test_a_gc_that_fails_fails_no_save(
    layout: Any, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise kind("on purpose")

    monkeypatch.setattr("emberkeep.checkpoint.takes_over.Collector.collect", fails)
    cluster = opened()
    keeper = started(cluster, spec=VersionSpec(layout=layout))
    for step in (1, 2):
        train(cluster, np.random.default_rng(step))
        with pytest.warns(UserWarning, match="on purpose"):
            manifest = keeper.close(step)
        assert manifest is not None
        assert manifest.step == step


def test_close_ends_every_thread_and_a_later_save_starts_them_again() -> None:
    before = set(threading.enumerate())
    cluster = opened()
    keeper = started(cluster, spec=VersionSpec(layout="grid"))
    for step in (1, 3):
        train(cluster, np.random.default_rng(step))
        keeper.save(step)
        keeper.wait()
        keeper.close(step + 1)
        assert not started_since(before, "emberkeep-save")
        assert not started_since(before, "emberkeep-extract")


@pytest.mark.parametrize("layout", ["consecutive", "one_shot"])
def test_retention_lets_go_of_chains_and_manifests_stay_small(layout: Any) -> None:
    """Each version of a chain needs those before it: unless chains end, all are kept for ever."""
    cluster = opened()
    settings = SaveSettings(retention=KeepLast(n=3), grace=timedelta(0))
    keeper = started(cluster, settings=settings, spec=VersionSpec(layout=layout))
    random = np.random.default_rng(4)
    train(cluster, random, steps=60)
    standing, sizes = [], []
    for step in range(1, 61):
        train(cluster, random)
        keeper.save(step)
        manifest = keeper.wait()
        assert manifest is not None
        standing.append(len(keeper.repository.versions()))
        sizes.append(len(manifest.encode()))
    assert max(standing) < 30
    assert max(sizes[30:]) <= max(sizes[:30]) + 64
    fresh = opened()
    started(fresh, keeper.repository.store).restore()
    assert state(fresh) == state(cluster)

"""What becomes of a second place that is full, fails for long, or is left at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.errors import DamageError, FullError, StorageError
from emberkeep.repository import Collector, Repository
from emberkeep.runtime.clock import SYSTEM_CLOCK
from emberkeep.testing.virtual_clock import VirtualClock
from tests.unit.keeper.test_mirror import FailingStore, Life, steps_in
from tests.waiting import passing

FULL = ek.incremental(every=2, layout="full", keep=1)


class SmallStore(MemoryStore):
    """Has room for `most` bytes."""

    most = 10**12

    def put(self, name: str, data: Any) -> int:
        if not isinstance(data, bytes | bytearray | memoryview):
            data = b"".join(bytes(part) for part in data)
        if sum(info.size for info in self.list()) + len(data) > self.most:
            raise FullError(f"there is no room for {name}")
        return super().put(name, data)


def _settle(life: Life) -> None:
    """As `Life.settle`, where the clock of the run stands still."""
    life.keeper.wait()
    _wait_for(life, lambda: life.status.step == life.keeper.durable)


def _wait_for(life: Life, until: Callable[[], bool]) -> None:
    with life.mirror._worker.changed:
        assert SYSTEM_CLOCK.wait_for(life.mirror._worker.changed, until, 20)


def _three_copies(mirror: MemoryStore, clock: VirtualClock) -> Life:
    """Retention would let two of them go, but for the grace period, which is over by now."""
    settings = SaveSettings(grace=timedelta(minutes=10))
    life = Life(MemoryStore(clock=clock), mirror, strategy=FULL, settings=settings, clock=clock)
    for step in (2, 4, 6):
        _settle(life.train(step))
    assert steps_in(mirror) == [2, 4, 6]
    clock.advance(timedelta(hours=1))
    return life


def test_a_mirror_that_is_full_makes_room_as_retention_allows() -> None:
    clock = VirtualClock()
    mirror = SmallStore(clock=clock)
    life = _three_copies(mirror, clock)
    mirror.most = sum(info.size for info in mirror.list()) + 1000
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there is room: nothing has failed
        _settle(life.train(8))
        life.keeper.close()
    assert life.status.failed == 0
    assert steps_in(mirror)[-1] == 8


def test_a_mirror_that_cannot_make_room_says_that_it_is_full() -> None:
    clock = VirtualClock()
    mirror = SmallStore(clock=clock)
    life = _three_copies(mirror, clock)
    mirror.most = 0

    def train() -> None:
        life.train(8)
        _wait_for(life, lambda: bool(life.heard("mirror_failed")))

    with pytest.warns(UserWarning, match=r"could not be copied.*there is no room"):
        train()
    mirror.most = 10**12
    passing(clock, lambda: life.status.step == 8, "the copy", timedelta(minutes=2))
    life.keeper.close()
    assert steps_in(mirror)[-1] == 8


def test_versions_that_cannot_be_removed_there_are_no_failed_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror, strategy=FULL).train(2).settle()
    collector = life.mirror._collector

    def collect(self: Collector) -> None:
        if self is collector:
            raise DamageError("a manifest is damaged", name="x")

    monkeypatch.setattr(Collector, "collect", collect)
    with pytest.warns(UserWarning, match=r"old versions of memory://.* could not be removed"):
        life.train(4).settle().keeper.close()
    assert life.status.failed == 0


def test_the_end_of_a_run_makes_its_attempts_soon_after_many_that_failed() -> None:
    """The pauses have grown to a minute by then."""
    clock = VirtualClock()
    mirror = FailingStore(clock=clock)
    life = Life(MemoryStore(clock=clock), mirror, clock=clock).train(2)
    _settle(life)
    mirror.down = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life.train(4)
        passing(clock, lambda: life.status.failed >= 8, "eight failures", timedelta(seconds=10))
        before, failed = clock.monotonic(), life.status.failed
        clock._pace = 10.0
        life.keeper.close()
    assert life.status.failed >= failed + 3
    assert clock.monotonic() - before < 60


def test_ctrl_c_ends_the_copy_under_way() -> None:
    clock = VirtualClock()
    settings = SaveSettings(grace=timedelta(0), mirror_mb_per_second=1e-6)
    life = Life(MemoryStore(), MemoryStore(), settings=settings, clock=clock)

    def interrupted() -> None:
        with life.keeper:
            life.train(2).keeper.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    life.mirror._worker.join(timedelta(seconds=10))  # it raises if the thread is still at work
    assert life.heard("mirrored") == []


class RefusingStore(MemoryStore):
    """Has no room for objects whose names begin with `refused`, if that is not empty."""

    refused = ""

    def put(self, name: str, data: Any) -> int:
        if self.refused and name.startswith(self.refused):
            raise FullError(f"there is no room for {name}")
        return super().put(name, data)


@pytest.mark.filterwarnings("ignore:a version could not be copied")
def test_a_mirror_that_is_full_does_not_keep_a_run_from_starting() -> None:
    """The record of a restore is not there yet."""
    local, mirror = MemoryStore(), RefusingStore()
    Life(local, mirror, strategy=FULL).train(2).keeper.close()
    mirror.refused = "restores"
    Life(local, mirror, strategy=FULL).train(4).keeper.wait()
    third = Life(local, mirror, strategy=FULL)
    assert third.resumed is not None
    assert third.resumed.step == 4
    mirror.refused = ""
    third.keeper.close()
    assert Repository.open(mirror).restores() == Repository.open(local).restores() == 2


def _damaged_newest(local: MemoryStore, mirror: MemoryStore, monkeypatch: Any) -> Life:
    """A process that has not resumed yet; the mirror has what could repair the newest version."""
    strategy = ek.incremental(every=2, layout="full", keep=5)
    Life(local, mirror, strategy=strategy).train(2).settle().train(4).keeper.close()
    repository = Repository.open(local)
    local.put(repository.manifest(repository.versions()[-1]).files[0].name, b"damage")
    with monkeypatch.context() as patched:
        patched.setattr(ek.Keeper, "resume", lambda _: None)
        return Life(local, mirror, strategy=strategy)


def test_falling_back_goes_on_where_there_is_no_room_for_a_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = RefusingStore()
    life = _damaged_newest(local, MemoryStore(), monkeypatch)
    local.refused = "data"
    with pytest.raises(FullError):
        life.keeper.resume()
    with pytest.warns(UserWarning, match=r"could not be repaired: there is no room"):
        resumed = life.keeper.resume(fall_back=True)
    assert resumed is not None
    assert resumed.step == 2


@pytest.mark.filterwarnings("ignore:a version could not be copied")
def test_falling_back_goes_on_where_the_mirror_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = FailingStore()
    life = _damaged_newest(MemoryStore(), mirror, monkeypatch)
    mirror.down = True
    with pytest.raises(StorageError):
        life.keeper.resume()
    with pytest.warns(UserWarning, match=r"not taken into account: the network is down"):
        resumed = life.keeper.resume(fall_back=True)
    assert resumed is not None
    assert resumed.step == 2

"""What of a run beside its versions reaches the second place, and comes back from there."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import SaveSettings
from emberkeep.checkpoint.held_version import HeldVersion
from emberkeep.checkpoint.saver import Checkpointer
from emberkeep.errors import DamageError, NoVersionError
from emberkeep.repository import Collector, KeepFor, Repository, Writer, names, verify
from emberkeep.repository.maintenance.version_copy import copy_version
from emberkeep.testing.virtual_clock import VirtualClock
from tests.unit.keeper.test_mirror import ClockAhead, Life, steps_in

ALL = ek.incremental(every=2, layout="full", keep=1)


def _resume(life: Life, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no reader")
        return life.keeper.resume(name)


def test_restores_are_counted_though_the_first_place_is_lost_each_time() -> None:
    mirror = MemoryStore()
    strategy = ek.incremental(every=2, layout="full", expected_restores=1)
    said = []
    for life in range(4):
        run = Life(MemoryStore(), mirror, strategy=strategy).train(2 * life + 2).settle()
        said.append(run.heard("widths")[-1]["why"])
        run.keeper.close(save=False)
    assert "2 bits" in said[1]
    assert "8 bits" in said[3]
    assert Repository.open(mirror).restores(exact=False) == 3
    assert verify(Repository.open(mirror)).damages == ()


def test_a_restore_is_counted_once_however_often_the_run_moves() -> None:
    first, second, mirror = MemoryStore(), MemoryStore(), MemoryStore()
    Life(first, mirror).train(2).keeper.close()
    for place in (second, first, second, first):
        Life(place, mirror).keeper.close()
    assert [Repository.open(place).restores() for place in (mirror, first)] == [4, 4]


def test_a_damaged_record_of_a_restore_stops_nothing() -> None:
    local, mirror = MemoryStore(), MemoryStore()
    Life(local, mirror).train(2).keeper.close()
    local.put(f"{names.RESTORES}/{'0' * 16}.json", b"damage")
    Life(local, mirror).train(4).keeper.close()
    assert steps_in(mirror)[-1] == 4


def test_a_name_brings_its_version_back_from_the_mirror() -> None:
    mirror = MemoryStore()
    first = Life(MemoryStore(), mirror, strategy=ALL, mirror_every="100 steps").train(2).settle()
    first.train(4).keeper.tag("best")  # it is not due, and copied all the same
    first.wait_for(lambda: first.status.step == 4)
    bits = first.bits()
    first.train(10).keeper.close()
    assert steps_in(mirror) == [4, 10]  # retention holds it there
    second = Life(MemoryStore(), mirror, strategy=ALL)
    assert second.resumed.step == 10  # type: ignore[union-attr]
    assert _resume(second, "best").step == 4
    assert second.bits() == bits
    with pytest.raises(NoVersionError, match="has no tag 'worst'"):
        _resume(second, "worst")


def test_who_went_back_by_name_and_died_goes_on_from_the_newest() -> None:
    """As with one place."""
    local, mirror = MemoryStore(), MemoryStore()
    first = Life(MemoryStore(), mirror, strategy=ALL).train(2).settle()
    first.keeper.tag("best")
    first.train(6).keeper.close()
    second = Life(local, mirror, strategy=ALL)
    assert _resume(second, "best").step == 2
    third = Life(local, mirror, strategy=ALL)
    assert third.resumed.step == 6  # type: ignore[union-attr]
    assert third.bits() == first.bits()


def test_the_end_of_a_run_waits_for_names() -> None:
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror).train(2).settle()
    life.keeper.tag("best")
    life.keeper.close()
    assert [v.number for v in Repository.open(mirror).tags().values()] == [1]


def test_a_name_that_moved_elsewhere_is_not_moved_back() -> None:
    first, second, mirror = MemoryStore(), MemoryStore(), MemoryStore()
    life = Life(first, mirror, strategy=ALL).train(2).settle()
    life.keeper.tag("best")
    life.keeper.close()
    moved = Life(second, mirror, strategy=ALL).train(4).settle()
    moved.keeper.tag("best")
    moved.train(6).keeper.close()
    back = Life(first, mirror, strategy=ALL)
    assert _resume(back, "best").step == 4
    back.keeper.close()
    there = Repository.open(mirror)
    assert there.manifest(there.named("best")).step == 4


def test_a_version_that_is_named_too_late_is_said() -> None:
    mirror = MemoryStore()
    strategy = ek.incremental(every=2, layout="full", keep=5)
    life = Life(MemoryStore(), mirror, strategy=strategy, mirror_every="4 steps")
    life.train(2).settle().train(4).keeper.wait()
    life.train(6).settle()

    def name_late() -> None:
        life.keeper.tag("late", 2)
        life.keeper.close()

    with pytest.warns(UserWarning, match=r"version 2, which 'late' names, .* it was not copied"):
        name_late()
    assert Repository.open(mirror).tags() == {}
    assert steps_in(mirror)[-1] == 6


def test_a_copy_is_as_old_as_what_it_is_a_copy_of() -> None:
    clock = VirtualClock()
    local, mirror = MemoryStore(clock=clock), MemoryStore(clock=clock)
    life = Life(local, None, clock=clock, strategy=ek.incremental(every=2, layout="full"))
    life.train(4).keeper.close()
    clock.advance(timedelta(days=3))
    source = Repository.open(local, clock=clock)
    target = Repository.create(mirror, schema=source.schema, clock=clock)
    writer = Writer.open(target)
    for version in source.versions():
        copy_version(source, version, writer)
    clock.advance(timedelta(minutes=1))
    policy = KeepFor(age=timedelta(days=2))
    collected = Collector(writer, policy=policy, grace=timedelta(0)).collect()
    assert len(collected.removed) == 1
    assert steps_in(mirror) == [4]


def _damage(place: Path | MemoryStore, *files: str) -> None:
    for name in files:
        if isinstance(place, Path):
            (place / name).write_bytes(b"damage")
        else:
            place.put(name, b"damage")


class Damaged:
    """Three versions: a baseline, one that is in both places, and one in the first alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local, self.mirror = MemoryStore(), MemoryStore()
        self.strategy = ek.incremental(every=2, layout="one_shot", keep=5)
        life = Life(self.local, self.mirror, strategy=self.strategy)
        life.train(2).settle().train(4).settle()
        self.middle = life.bits()
        life.mirror.give_up()
        life.train(6).keeper.wait()
        self.newest = life.bits()
        self.here = Repository.open(self.local)
        self._monkeypatch = monkeypatch

    def damage(self, place: MemoryStore, *numbers: int) -> None:
        repository = Repository.open(place)
        for number in numbers:
            _damage(place, *(file.name for file in repository.manifest(number).files))

    def start(self) -> Life:
        """A process whose thread copies nothing before the run is resumed."""
        with self._monkeypatch.context() as patched:
            patched.setattr(ek.Keeper, "resume", lambda _: None)
            patched.setattr("emberkeep.keeper.mirror.Mirror._wake", lambda *_, **__: None)
            settings = SaveSettings(grace=timedelta(0))
            return Life(self.local, self.mirror, strategy=self.strategy, settings=settings)


@pytest.mark.filterwarnings("ignore:.*has no reader")
def test_a_version_is_made_whole_from_both_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its baseline is damaged in the first place, and the mirror does not have what came last."""
    places = Damaged(monkeypatch)
    places.damage(places.local, 1)
    life = places.start()
    with pytest.warns(UserWarning, match=r"version 3 \(step 6\) was repaired from the mirror"):
        resumed = life.keeper.resume()
    assert resumed.step == 6  # type: ignore[union-attr]
    assert life.bits() == places.newest


@pytest.mark.filterwarnings("ignore:.*has no reader")
def test_falling_back_takes_the_newest_that_either_place_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Damaged(monkeypatch)
    places.damage(places.local, 1, 3)
    with pytest.raises(ek.errors.DamageError):
        places.start().keeper.resume()
    life = places.start()
    with pytest.warns(UserWarning, match="are damaged and were passed over"):
        resumed = life.keeper.resume(fall_back=True)
    assert resumed.step == 4  # type: ignore[union-attr]
    assert life.bits() == places.middle
    life.train(8).keeper.close()
    assert steps_in(places.mirror)[-1] == steps_in(places.local)[-1] == 8


@pytest.mark.filterwarnings("ignore:.*has no reader")
def test_falling_back_takes_what_the_mirror_alone_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first place has let it go, and what is older there is not taken."""
    places = Damaged(monkeypatch)
    places.local.delete([places.here.manifest(2).name])
    places.damage(places.local, 3)
    life = places.start()
    with pytest.warns(UserWarning, match=r"version 4 \(step 4\) was repaired from the mirror"):
        resumed = life.keeper.resume(fall_back=True)
    assert resumed.step == 4  # type: ignore[union-attr]
    assert life.bits() == places.middle


@pytest.mark.filterwarnings("ignore:.*has no reader")
def test_falling_back_takes_what_a_clock_that_was_ahead_dates_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mirror alone has it, from a machine that the run has left."""
    places = Damaged(monkeypatch)
    places.strategy = ek.incremental(every=2, layout="full", keep="all")
    places.local, places.mirror = MemoryStore(), MemoryStore()
    left = Life(MemoryStore(), places.mirror, strategy=places.strategy, clock=ClockAhead())
    left.train(2).settle()
    oldest = left.bits()
    left.train(4).keeper.close()
    Life(places.local, places.mirror, strategy=places.strategy).train(6).keeper.close()
    assert steps_in(places.local) == [4, 6]
    places.damage(places.local, 1, 2)
    places.damage(places.mirror, 2, 3)
    life = places.start()
    with pytest.warns(UserWarning, match="are damaged and were passed over"):
        resumed = life.keeper.resume(fall_back=True)
    assert resumed.step == 2  # type: ignore[union-attr]
    assert life.bits() == oldest


@pytest.mark.filterwarnings("ignore:.*has no reader")
def test_falling_back_passes_over_a_version_whose_files_are_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is nothing to repair, and it cannot be restored all the same."""
    places, restore = Damaged(monkeypatch), Checkpointer._restore

    def refusing(self: Checkpointer, held: HeldVersion, *more: Any, **named: Any) -> Any:
        if held.manifest.step == 6:
            held.let_go()
            raise DamageError("a piece names a row that there is not", name="piece")
        return restore(self, held, *more, **named)

    monkeypatch.setattr(Checkpointer, "_restore", refusing)
    with pytest.raises(DamageError, match="names a row that there is not"):
        places.start().keeper.resume()
    life = places.start()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resumed = life.keeper.resume(fall_back=True)
    assert resumed.step == 4  # type: ignore[union-attr]
    assert life.bits() == places.middle
    texts = [str(each.message) for each in said]
    assert not [text for text in texts if "was repaired" in text]
    assert [text for text in texts if "were passed over" in text]

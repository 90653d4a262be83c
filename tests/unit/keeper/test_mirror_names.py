"""Named versions: how they reach the second place, and come back without hiding newer ones."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer
from emberkeep.errors import DamageError
from emberkeep.keeper import mirror as mirror_module
from emberkeep.keeper.mirror import Mirror
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.repository import Collector, KeepLast, Repository
from emberkeep.repository.marks import put_mark
from tests.unit.keeper.test_mirror import Life, steps_in

EVERY = ek.incremental(every=2, layout="full", keep="all")
FEW = ek.incremental(every=2, layout="full", keep=1)


def _damage(store: MemoryStore, name: int | str) -> None:
    repository = Repository.open(store)
    for file in repository.manifest(repository.named(name)).files:
        store.put(file.name, b"damage")


def _step_of(store: MemoryStore, name: str) -> int:
    repository = Repository.open(store)
    return repository.manifest(repository.named(name)).step


def _resumed(life: Life, version: int | str | None = None) -> int:
    found = life.keeper.resume(version)
    assert found is not None
    return found.step


def _by_hand(life: Life) -> Mirror:
    """The mirror of a run whose copies the test makes itself, by `_copy_newest`."""
    life.wait_for(lambda: life.mirror._records_answered == life.mirror._records_asked)
    life.mirror._worker.close()
    life.mirror._wake = lambda **_: None  # type: ignore[method-assign]
    return life.mirror


def _named_elsewhere() -> tuple[MemoryStore, MemoryStore]:
    """A mirror with step 2, which is named, and 4; and an empty first place."""
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror, strategy=EVERY).train(2).settle()
    life.keeper.tag("best")
    life.train(4).keeper.close()
    return MemoryStore(), mirror


# -- to the mirror -------------------------------------------------------------------------------


def test_a_damaged_version_with_a_name_does_not_keep_newer_ones_from_the_mirror() -> None:
    local, mirror = MemoryStore(), MemoryStore()
    life = Life(local, mirror, strategy=EVERY, mirror_every="100 steps").train(2).settle()
    by_hand = _by_hand(life)
    life.train(4).keeper.tag("best")
    _damage(local, "best")
    life.train(10).keeper.wait()
    by_hand._asked += 1
    with pytest.warns(UserWarning, match=r"version 2, which 'best' names, cannot be copied.*damag"):
        by_hand._copy_newest()
    assert steps_in(mirror) == [2, 10]
    by_hand._copy_newest()  # it is left out for good
    assert steps_in(mirror) == [2, 10]


def test_no_part_of_a_damaged_version_becomes_the_newest_of_the_mirror() -> None:
    """Its baseline is intact, and would be copied first."""
    local, mirror = MemoryStore(), MemoryStore()
    strategy = ek.incremental(every=2, layout="one_shot", keep="all")
    life = Life(local, mirror, strategy=strategy, mirror_every="100 steps").train(2).settle()
    by_hand, saver = _by_hand(life), life.keeper._saver
    assert isinstance(saver, RepositorySaver)
    saver.forget_chain()
    life.train(6).keeper.tag("best")
    life.train(8).keeper.wait()
    _damage(local, "best")
    with pytest.warns(UserWarning, match="cannot be copied"):
        by_hand._copy_newest()
    assert steps_in(mirror) == [2]


@pytest.mark.filterwarnings("ignore:version 1, which 'best' names, cannot be copied")
def test_a_named_version_of_a_grid_does_not_keep_others_from_the_mirror() -> None:
    local, mirror = MemoryStore(), MemoryStore()
    grid = Life(local, None, strategy=ek.incremental(every=2, layout="grid", keep="all")).train(2)
    grid.keeper.tag("best")
    grid.train(4).keeper.close()
    Life(local, mirror, strategy=EVERY).train(10).keeper.close()
    assert steps_in(mirror)[-1] == 10


@pytest.mark.parametrize("asked_after", [0, 1])
def test_a_process_that_is_asked_to_stop_copies_the_newest_version_alone(asked_after: int) -> None:
    """Whether it is asked before the copy of a named version or in its midst."""
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror, strategy=EVERY, mirror_every="100 steps").train(2).settle()
    by_hand = _by_hand(life)
    life.train(4).keeper.tag("best")
    life.train(6).keeper.wait()
    blocks: list[None] = []
    by_hand.stopping = lambda: blocks.append(None) or len(blocks) > asked_after
    by_hand._asked += 1
    with pytest.warns(UserWarning, match=r"'best' names, was not copied.*was asked to stop"):
        by_hand._copy_newest()
    assert steps_in(mirror) == [2, 6]


@pytest.mark.parametrize("meanwhile", ["before names are read", "after"])
def test_a_version_that_is_named_while_the_mirror_looks_is_copied_in_order(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror, strategy=EVERY, mirror_every="4 steps").train(2).settle()
    by_hand, read = _by_hand(life), mirror_module.readable_tags
    life.train(6).keeper.wait()

    def reading(repository: Repository) -> Any:
        monkeypatch.setattr(mirror_module, "readable_tags", read)
        found = read(repository)
        life.train(8).keeper.tag("best")
        return found if meanwhile == "after" else read(repository)

    monkeypatch.setattr(mirror_module, "readable_tags", reading)
    by_hand._copy_newest()
    by_hand._copy_newest()
    assert steps_in(mirror) == [2, 8]
    assert _step_of(mirror, "best") == 8


# -- and back ------------------------------------------------------------------------------------


def test_a_version_that_is_brought_by_name_is_not_the_newest() -> None:
    """For nobody: the process that brought it, what it names next, and the next process."""
    local, mirror = _named_elsewhere()
    life = Life(local, mirror, strategy=EVERY).train(12)
    life.keeper.wait()
    assert _resumed(life, "best") == 2
    assert steps_in(local)[-1] == 2
    assert life.keeper._saver._left_newer  # type: ignore[union-attr]
    assert life.keeper.tag("newest").step == 12  # type: ignore[union-attr]
    assert _resumed(life) == 12
    assert not life.keeper._saver._left_newer  # type: ignore[union-attr]
    assert Life(local, None, strategy=EVERY).resumed.step == 12  # type: ignore[union-attr]


def test_retention_does_not_take_a_version_that_was_brought_by_name_for_the_newest() -> None:
    """A save that finds no room has what is old removed, before anything was saved again."""
    local, mirror = _named_elsewhere()
    life = Life(local, mirror, strategy=FEW, mirror_every="100 steps").train(12)
    life.keeper.wait()
    assert _resumed(life, "best") == 2
    saver = life.keeper._saver
    assert isinstance(saver, RepositorySaver)
    saver._collect()
    assert steps_in(local) == [12, 2]
    life.train(4).keeper.close()  # the run has gone on, and nothing holds the other any more
    assert steps_in(local) == [2, 4]


def test_a_run_that_goes_on_from_a_name_is_the_newest_again() -> None:
    local, mirror = _named_elsewhere()
    life = Life(local, mirror, strategy=EVERY).train(12)
    assert _resumed(life, "best") == 2
    life.train(6).keeper.close()
    for place in (local, mirror):
        assert steps_in(place)[-1] == 6
    assert Life(local, mirror, strategy=EVERY).resumed.step == 6  # type: ignore[union-attr]
    assert Life(MemoryStore(), mirror, strategy=EVERY).resumed.step == 6  # type: ignore[union-attr]


def test_a_name_that_was_brought_does_not_hide_what_the_mirror_does_not_have_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local, mirror = _named_elsewhere()
    first = Life(local, mirror, strategy=EVERY, mirror_every="100 steps").train(12)
    first.keeper.wait()
    first.mirror.give_up()
    assert steps_in(mirror)[-1] == 4
    monkeypatch.setattr(Mirror, "_wake", lambda *_, **__: None)  # a copy takes hours
    second = Life(local, mirror, strategy=EVERY)
    assert _resumed(second, "best") == 2
    third = Life(local, mirror, strategy=EVERY)
    assert third.resumed is not None
    assert third.resumed.step == 12


def test_what_is_damaged_is_fallen_back_from_past_a_name_that_was_brought() -> None:
    local, mirror = _named_elsewhere()
    life = Life(local, mirror, strategy=EVERY, mirror_every="100 steps").train(12)
    life.keeper.wait()
    life.mirror.give_up()
    assert _resumed(life, "best") == 2
    _damage(local, Repository.open(local).versions()[-2].number)
    with pytest.warns(UserWarning, match="were passed over"):
        resumed = life.keeper.resume(fall_back=True)
    assert resumed is not None
    assert resumed.step == 10


def test_a_name_that_cannot_be_brought_leaves_the_repository_as_it_is() -> None:
    """The version has a baseline, which is intact and would be copied first."""
    mirror, local = MemoryStore(), MemoryStore()
    strategy = ek.incremental(every=2, layout="one_shot", keep="all")
    first = Life(MemoryStore(), mirror, strategy=strategy).train(2).settle().train(4).settle()
    first.keeper.tag("best")
    first.keeper.close()
    Life(MemoryStore(), mirror, strategy=EVERY).train(6).keeper.close()
    life = Life(local, mirror, strategy=EVERY).train(12)
    life.keeper.wait()
    before = steps_in(local)
    _damage(mirror, "best")
    with pytest.raises(DamageError):
        life.keeper.resume("best")
    assert steps_in(local) == before
    assert _resumed(life) == 12


class HangingOnce(MemoryStore):
    """The next data file that is put, once it `hangs`, waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self.hung, self.let_go = threading.Event(), threading.Event()

    def put(self, name: str, data: Any) -> int:
        if self.hangs and name.startswith("data"):
            self.hangs = False
            self.hung.set()
            self.let_go.wait(60)
        return super().put(name, data)


def test_a_name_is_brought_when_the_save_under_way_has_ended() -> None:
    _, mirror = _named_elsewhere()
    local = HangingOnce()
    life = Life(local, mirror, strategy=EVERY).train(5)
    life.keeper.wait()
    local.hangs = True
    life.train(6)
    assert local.hung.wait(60)
    saver = life.keeper._saver
    assert saver is not None
    join = saver.join

    def joining() -> None:
        local.let_go.set()
        join()

    saver.join = joining  # type: ignore[method-assign]
    try:
        assert _resumed(life, "best") == 2
    finally:
        local.let_go.set()
    assert steps_in(local)[-2:] == [6, 2]


# -- names that differ ---------------------------------------------------------------------------


def _records_copied(life: Life) -> Life:
    return life.wait_for(lambda: life.mirror._records_answered == life.mirror._records_asked)


def test_a_name_given_here_is_not_taken_away() -> None:
    """It was moved while the mirror could not be reached, and the run went on elsewhere."""
    first, mirror = MemoryStore(), MemoryStore()
    life = Life(first, mirror, strategy=FEW).train(2).settle()
    life.keeper.tag("best")
    _records_copied(life).mirror.give_up()
    life.train(6).keeper.tag("best")
    Life(MemoryStore(), mirror, strategy=FEW).train(8).keeper.close()
    with pytest.warns(UserWarning, match=r"'best' names, is not in .* and older"):
        Life(first, mirror, strategy=FEW).train(14).keeper.close()
    assert _step_of(first, "best") == 6


def test_a_name_given_here_after_it_had_moved_elsewhere_stays() -> None:
    first, mirror = MemoryStore(), MemoryStore()
    life = Life(first, mirror, strategy=EVERY).train(2).settle()
    life.keeper.tag("best")
    life.keeper.close()
    moved = Life(MemoryStore(), mirror, strategy=EVERY).train(4).settle()
    moved.keeper.tag("best")
    moved.keeper.close()
    back = Life(first, mirror, strategy=EVERY)
    assert _step_of(first, "best") == 4
    _records_copied(back).mirror.give_up()
    back.train(8).keeper.tag("best")
    again = Life(first, mirror, strategy=EVERY)
    assert _step_of(first, "best") == 8
    again.keeper.close()
    assert _step_of(mirror, "best") == 8


def test_a_name_that_moved_elsewhere_is_not_moved_back_though_nothing_was_trained_there() -> None:
    first, mirror = MemoryStore(), MemoryStore()
    life = Life(first, mirror, strategy=EVERY).train(2).settle()
    life.keeper.tag("best")
    life.train(4).keeper.close()
    moved = Life(MemoryStore(), mirror, strategy=EVERY)
    moved.keeper.tag("best")
    moved.keeper.close()
    Life(first, mirror, strategy=EVERY).keeper.close()
    assert _step_of(mirror, "best") == _step_of(first, "best") == 4


def test_a_name_that_moved_here_and_was_not_copied_yet_is_not_moved_back() -> None:
    first, mirror = MemoryStore(), MemoryStore()
    life = Life(first, mirror, strategy=EVERY).train(2).settle().train(4).settle()
    life.keeper.tag("best")
    _records_copied(life).mirror.give_up()
    life.keeper.tag("best", 1)
    Life(first, mirror, strategy=EVERY).keeper.close()
    assert _step_of(first, "best") == _step_of(mirror, "best") == 2


def test_a_name_that_was_moved_in_the_mirror_by_hand_stays_while_others_are_copied() -> None:
    mirror = MemoryStore()
    life = Life(MemoryStore(), mirror, strategy=EVERY).train(2).settle()
    life.keeper.tag("best")
    _records_copied(life.train(4).settle())
    there = Repository.open(mirror)
    there.tag("best", there.versions()[-1], move=True)
    life.keeper.tag("other")
    life.keeper.close()
    assert (_step_of(mirror, "best"), _step_of(mirror, "other")) == (4, 4)


def test_a_version_that_loses_its_name_and_is_not_in_the_mirror_is_said() -> None:
    first, mirror = MemoryStore(), MemoryStore()
    life = Life(first, mirror, strategy=FEW).train(2).settle()
    life.keeper.tag("best")
    _records_copied(life).mirror.give_up()
    life.train(6).keeper.tag("best")
    moved = Life(MemoryStore(), mirror, strategy=FEW).train(8).settle()
    moved.keeper.tag("best")
    moved.keeper.close()
    with pytest.warns(UserWarning, match=r"'best' names another version .* by now: version 3 of"):
        back = Life(first, mirror, strategy=FEW)
    assert _step_of(first, "best") == 8
    back.keeper.close()


def test_a_version_brought_by_name_is_the_newest_for_nobody() -> None:
    local, mirror = _named_elsewhere()
    life = Life(local, mirror, strategy=FEW).train(12)
    life.keeper.wait()
    life.keeper.resume("best")
    repository = Repository.open(local)
    newest = repository.newest_whole()
    assert newest is not None
    assert repository.manifest(newest).step == 12
    saver = life.keeper._saver
    assert isinstance(saver, RepositorySaver)
    Collector(saver.writer, policy=KeepLast(n=1), grace=timedelta(0)).collect()
    assert 12 in steps_in(local)
    life.keeper.close()


def test_a_version_aside_is_not_fallen_back_to_past_newer_ones() -> None:
    local, mirror = _named_elsewhere()
    life = Life(local, mirror, strategy=EVERY).train(12)
    life.keeper.wait()
    assert (_resumed(life, "best"), _resumed(life)) == (2, 12)
    life.train(14).keeper.close()
    _damage(local, Repository.open(local).versions()[-1].number)
    repository = Repository.open(local)
    saver = Checkpointer(repository, life.model.bags.cluster)
    found = saver.restore(fall_back=True)
    assert found is not None
    assert found.manifest.step == 12


def test_prioritised_versions_are_not_the_newest_beside_one_aside() -> None:
    local, mirror = MemoryStore(), MemoryStore()
    more = {"strategy": ek.partial(every=4, priority="mfu", fraction=1 / 2), "total_steps": 100}
    elsewhere = Life(MemoryStore(), mirror, **more).train(4).settle()
    elsewhere.keeper.tag("best")
    elsewhere.train(8).settle().keeper.close()
    life = Life(local, mirror, **more).train(14)
    life.keeper.wait()
    assert _resumed(life, "best") == 4
    resumed = Life(local, mirror, **more).resumed  # the process has ended before its next save
    assert resumed is not None
    assert resumed.step == 12


def test_a_named_version_that_gc_had_marked_and_not_decided_on_is_found() -> None:
    store = MemoryStore()
    life = Life(store, None, strategy=EVERY).train(6)
    life.keeper.wait()
    repository = Repository.open(store)
    first, saver = repository.versions()[0], life.keeper._saver
    assert isinstance(saver, RepositorySaver)
    repository.tag("best", first)
    key = f"{saver.writer.epoch:06d}-abc0123456789def"
    put_mark(store, repository.id, key, frozenset({first}), decision=False)
    assert _resumed(Life(store, None, strategy=EVERY), "best") == 2

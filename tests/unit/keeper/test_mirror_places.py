"""Which version counts where two places differ, and how the end of a run waits for the second."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore, refuse_nested
from emberkeep.errors import ConfigError, DamageError, FencedError, NoVersionError
from emberkeep.keeper.mirror import Mirror
from emberkeep.repository import Repository
from emberkeep.repository.maintenance.fork import fork
from emberkeep.repository.maintenance.version_copy import Origin, same_run
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.testing.virtual_clock import VirtualClock
from tests.unit.keeper.test_mirror import ClockAhead, Life, steps_in


def test_a_run_that_went_back_to_an_earlier_version_can_be_closed() -> None:
    """The newest version is in both places, and no wait may be for the one that was resumed."""
    local, mirror = MemoryStore(), MemoryStore()
    first = Life(local, mirror, strategy=ek.incremental(every=2, keep=5))
    for step in (2, 4, 6, 8):
        first.train(step).settle()
    first.keeper.close()
    back = Life(local, mirror, strategy=ek.incremental(every=2, keep=5))
    assert back.keeper.resume(version=3).step == 6  # type: ignore[union-attr]
    mirror_of_it = back.mirror
    back.wait_for(lambda: mirror_of_it._records_answered == mirror_of_it._records_asked)
    back.mirror._worker.wait = _refuse  # type: ignore[method-assign]
    back.keeper.close(save=False)
    assert steps_in(mirror)[-1] == 8


def _refuse(*_: object) -> None:
    raise AssertionError("there is nothing to wait for")


def test_the_last_exact_version_of_a_lossy_run_is_mirrored(tmp_path: Path) -> None:
    """It has the step of the quantized version before it."""
    mirror, strategy = MemoryStore(), ek.incremental(every=2, bits=4)
    first = Life(tmp_path / "a", mirror, strategy=strategy, mirror_every="2 steps")
    first.train(2).settle().train(4).settle()
    first.keeper.close()
    assert steps_in(mirror)[-2:] == [4, 4]
    second = Life(tmp_path / "b", mirror, strategy=strategy)
    assert second.bits() == first.bits()


def test_a_mirror_of_another_run_is_refused_before_its_process_is_stopped() -> None:
    theirs, mirror, ours = MemoryStore(), MemoryStore(), MemoryStore()
    live = Life(theirs, mirror).train(2).settle()
    Life(ours, None).train(2).keeper.close()
    epochs = len(list(mirror.list("writers")))
    for mistyped in (mirror, theirs):
        with pytest.raises(ConfigError, match="holds versions of another run"):
            Life(ours, mistyped)
    assert len(list(mirror.list("writers"))) == epochs
    live.train(6).settle().keeper.close()
    assert steps_in(theirs)[-1] == steps_in(mirror)[-1] == 6


def test_the_same_place_under_another_name_is_no_mirror(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    Life(tmp_path / "run", None).train(2).keeper.close()
    with pytest.raises(ConfigError, match="are the same place"):
        Life(tmp_path / "run", str(tmp_path / "link"))


def test_a_mirror_inside_its_source_is_refused_and_so_is_the_source_inside_its_mirror(
    tmp_path: Path,
) -> None:
    run, inside = tmp_path / "run", tmp_path / "run" / "copies"
    (tmp_path / "link").symlink_to(run)
    for source, mirror in (
        (run, inside), (inside, run), (run, tmp_path / "link" / "copies"), (run, inside.as_uri()),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"lies inside .*: two repositories"):
            Life(source, str(mirror))
    assert not run.exists()
    Life(run, str(tmp_path / "run2")).keeper.close()


def test_places_in_a_bucket_are_not_nested() -> None:
    for one, other in (("s3://b/run", "s3://b/run/copies/"), ("s3://b", "s3://b/run")):
        with pytest.raises(ConfigError, match="lies inside"):
            refuse_nested(one, other)
        with pytest.raises(ConfigError, match="lies inside"):
            refuse_nested(other, one)
    for other in ("s3://b/run2", "s3://c/run/copies", "gs://b/run/copies", "s3://b/run/"):
        refuse_nested("s3://b/run", other)
    refuse_nested("memory://a", "memory://a/b")  # two stores


def test_a_run_that_must_exist_creates_no_mirror(tmp_path: Path) -> None:
    """Nor does one whose first place is there, but empty."""
    mirror, local = MemoryStore(), MemoryStore()
    Repository.create(local, schema=Life(MemoryStore(), None).keeper._parts.subject.schema())
    with pytest.raises(NoVersionError, match="must exist"):
        Life(local, mirror, must_exist=True)
    assert not list(mirror.list())


def test_what_a_process_saved_after_another_took_over_does_not_count() -> None:
    """It is the version that was saved last of all, and yet not one of the run."""
    first, second, mirror = MemoryStore(), MemoryStore(), MemoryStore()
    earlier = Life(first, mirror).train(4).settle()
    earlier.mirror._worker.close()  # its thread is not in time to notice
    later = Life(second, mirror)
    later.train(20).keeper.close()
    earlier.train(6).keeper.wait()
    assert steps_in(first)[-1] == 6
    with pytest.warns(UserWarning, match=r"step 6.*had already taken the run over.*from step 20"):
        back = Life(first, mirror)
    assert back.resumed is not None
    assert back.resumed.step == 20
    assert back.bits() == later.bits()
    back.keeper.close()
    assert steps_in(mirror)[-1] == 20


def test_a_clock_that_was_ahead_does_not_take_the_run_back() -> None:
    """What came to the mirror later is newer, whatever time the machine had that saved it."""
    first, second, mirror = MemoryStore(), MemoryStore(), MemoryStore()
    keeping = ek.incremental(every=2, keep="all")
    earlier = Life(first, mirror, strategy=keeping, clock=ClockAhead()).train(4)
    earlier.keeper.close()
    later = Life(second, mirror, strategy=keeping).train(20)
    later.keeper.close()
    back = Life(first, mirror, strategy=keeping)
    assert back.resumed is not None
    assert back.resumed.step == 20
    assert back.bits() == later.bits()
    back.train(22).keeper.close()
    assert steps_in(mirror)[-1] == 22
    again = Life(second, mirror, strategy=keeping)
    assert again.bits() == back.bits()


def test_a_version_that_retention_let_go_before_its_copy_began_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another was copied first, for longer than `grace`, and by now a newer one is there."""
    keeping = ek.incremental(every=2, layout="full", keep=1)
    life = Life(MemoryStore(), MemoryStore(), strategy=keeping)
    life.train(2).settle()
    late, looks = life.mirror._newest(), []

    def newest(mirror: Mirror) -> Any:
        looks.append(mirror)
        return late if len(looks) == 1 else _newest(mirror)

    life.train(4).settle()
    _newest = Mirror._newest
    monkeypatch.setattr(Mirror, "_newest", newest)
    life.mirror._wake(forced=True)
    life.wait_for(lambda: life.mirror._answered == life.mirror._asked)
    assert len(looks) > 2
    assert life.status.failed == 0
    life.train(6).keeper.close()
    assert steps_in(life.mirror._store)[-1] == 6


def test_a_fence_in_the_mirror_is_said_once() -> None:
    mirror = MemoryStore()
    earlier = Life(MemoryStore(), mirror).train(2).settle()
    Life(MemoryStore(), mirror)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FencedError), earlier.keeper:
            earlier.train(4).wait_for_fence().train(5)


def test_a_process_notices_that_another_has_the_mirror_before_a_copy_is_due() -> None:
    mirror = MemoryStore()
    earlier = Life(MemoryStore(), mirror, mirror_every="1000 steps").train(2)
    earlier.wait_for(lambda: earlier.status.step == 2)
    Life(MemoryStore(), mirror)
    earlier.train(4).wait_for_fence()
    with pytest.raises(FencedError):
        earlier.train(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another process has the run: no copy is missing
        earlier.mirror.finish()


def test_a_run_returns_to_a_place_whose_versions_the_mirror_has_dropped() -> None:
    first, second, mirror = MemoryStore(), MemoryStore(), MemoryStore()
    Life(first, mirror).train(4).keeper.close()
    moved = Life(second, mirror, strategy=ek.incremental(every=2, layout="full", keep=2))
    for step in range(6, 13, 2):
        moved.train(step).settle()
    moved.keeper.close()
    there = Repository.open(mirror)
    assert all(Origin.of(there.manifest(v)).repository != Repository.open(first).id
               for v in there.versions())  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*taken the run over")
        back = Life(first, mirror)
    assert back.resumed is not None
    assert back.resumed.step == 12
    assert back.bits() == moved.bits()


def test_a_fork_is_a_run_of_its_own() -> None:
    """Of a version that has moved, too: else its process could take the mirror of the other."""
    mirror, forked = MemoryStore(), MemoryStore()
    Life(MemoryStore(), mirror).train(4).keeper.close()
    moved = MemoryStore()
    Life(moved, mirror).train(8).keeper.close()
    source = Repository.open(moved)
    newest = source.newest_whole()
    assert newest is not None
    fork(source, newest, forked)
    assert not same_run(Repository.open(forked), Repository.open(mirror))
    assert same_run(source, Repository.open(mirror))


def _damage(store: MemoryStore) -> None:
    """A file of the newest version."""
    repository = Repository.open(store)
    newest = repository.newest_whole()
    assert newest is not None
    store.put(repository.manifest(newest).files[0].name, b"damage")


def _without_resume(monkeypatch: pytest.MonkeyPatch, *places: Any) -> Life:
    with monkeypatch.context() as patched:
        patched.setattr(ek.Keeper, "resume", lambda _: None)
        return Life(*places)


def test_what_the_mirror_has_intact_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    local, mirror = MemoryStore(), MemoryStore()
    first = Life(local, mirror).train(2).settle().train(4)
    first.keeper.close()
    _damage(local)
    second = _without_resume(monkeypatch, local, mirror)
    with pytest.warns(UserWarning, match="was repaired from the mirror"):
        resumed = second.keeper.resume(fall_back=True)
    assert resumed is not None
    assert resumed.step == 4
    assert second.bits() == first.bits()


def test_what_is_damaged_in_both_places_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    local, mirror = MemoryStore(), MemoryStore()
    strategy = ek.incremental(every=2, layout="full", keep=3)
    Life(local, mirror, strategy=strategy).train(2).settle().train(4).keeper.close()
    _damage(local)
    _damage(mirror)
    second = _without_resume(monkeypatch, local, mirror)
    with pytest.raises(DamageError), pytest.warns(UserWarning, match="so is the copy"):
        second.keeper.resume()
    with pytest.warns(UserWarning, match="were passed over"):
        resumed = second.keeper.resume(fall_back=True)
    assert resumed is not None
    assert resumed.step == 2


def test_a_damaged_version_in_the_mirror_does_not_block_what_the_disk_has() -> None:
    local, mirror = MemoryStore(), MemoryStore()
    Life(local, mirror).train(2).keeper.close()
    Life(MemoryStore(), mirror).train(4).keeper.close()
    _damage(mirror)
    with pytest.warns(UserWarning, match=r"has a newer version than .* and it is damaged"):
        back = Life(local, mirror)
    assert back.resumed is not None
    assert back.resumed.step == 2
    with pytest.raises(DamageError, match=r"newest version of the mirror memory://.* is damaged"):
        Life(MemoryStore(), mirror)


class HangingStore(MemoryStore):
    """Once `hangs` is set, what is put waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False
        self.hung, self.let_go = threading.Event(), threading.Event()

    def put(self, name: str, data: Any) -> int:
        if self.hangs:
            self.hung.set()
            self.let_go.wait(60)
        return super().put(name, data)


@pytest.fixture
def hanging() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.let_go.set()


def _hung(mirror: HangingStore, **more: Any) -> Life:
    """A run whose newest version is being copied, and never will be."""
    life = Life(MemoryStore(), mirror, **more).train(2).settle()
    mirror.hangs = True
    life.train(4).keeper.wait()
    assert mirror.hung.wait(60)
    return life


def test_the_end_of_a_run_does_not_join_a_copy_that_it_gave_up(hanging: HangingStore) -> None:
    """Time that the grace period does not have."""
    life = _hung(hanging)
    joined: list[timedelta] = []
    life.mirror._worker.join = joined.append  # type: ignore[method-assign, assignment]
    with pytest.warns(UserWarning, match="has step 2, and the repository step 4"):
        life.mirror.finish(timedelta(0))
    assert joined == []


def test_the_end_of_a_run_joins_the_copying_thread_for_what_is_left() -> None:
    life = Life(MemoryStore(), MemoryStore()).train(2).settle()
    joined: list[timedelta] = []
    life.mirror._worker.join = joined.append  # type: ignore[method-assign, assignment]
    life.mirror.finish(timedelta(seconds=2))
    assert timedelta(0) <= joined[0] <= timedelta(seconds=2)


@pytest.mark.parametrize("save", [True, False])
def test_a_signal_ends_the_wait_for_the_mirror(hanging: HangingStore, save: bool) -> None:
    """It comes while close() waits. A run that failed waits no longer without one."""
    clock = VirtualClock()
    life = _hung(hanging, clock=clock, grace=timedelta(seconds=25))
    wait = life.mirror._worker.wait

    def asked_meanwhile(*given: Any) -> None:
        if save:
            life.keeper.stop_after_step(signal.SIGTERM)
        wait(*given)

    life.mirror._worker.wait = asked_meanwhile  # type: ignore[method-assign]
    before = clock.monotonic()
    clock._pace = 1000.0
    ended: Any = pytest.raises(SystemExit, match="75") if save else nullcontext()
    with ended, pytest.warns(UserWarning, match="has step 2, and the repository step 4"):
        life.keeper.close(save=save)
    assert clock.monotonic() - before < 600


def test_a_run_that_goes_on_after_its_end_is_copied_again(hanging: HangingStore) -> None:
    life = _hung(hanging)
    with pytest.warns(UserWarning, match="the copy was not made"):
        life.mirror.finish(timedelta(0))
    hanging.hangs = False
    hanging.let_go.set()
    life.mirror._worker.join(timedelta(seconds=60))
    life.mirror.finish()
    assert life.status.step == 4


def test_a_limit_that_is_lifted_while_bytes_are_counted_raises_nothing() -> None:
    """As a signal does it, between any two operations."""

    class LiftingClock(VirtualClock):
        def monotonic(self) -> float:
            bandwidth.lift()
            return super().monotonic()

    bandwidth = Bandwidth(1.0, clock=LiftingClock())
    bandwidth.spend(10**9)
    assert bandwidth.share() is None

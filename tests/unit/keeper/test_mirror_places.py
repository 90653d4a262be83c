"""Which version counts where two places differ, and how the end of a run waits for the second."""

from __future__ import annotations

from pathlib import Path

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.errors import ConfigError, NoVersionError
from emberkeep.repository import Repository
from tests.unit.keeper.test_mirror import Life, steps_in


def test_a_run_that_went_back_to_an_earlier_version_can_be_closed() -> None:
    """The newest version is in both places, and no wait may be for the one that was resumed."""
    local, mirror = MemoryStore(), MemoryStore()
    first = Life(local, mirror, strategy=ek.incremental(every=2, keep=5))
    for step in (2, 4, 6, 8):
        first.train(step).settle()
    first.keeper.close()
    back = Life(local, mirror, strategy=ek.incremental(every=2, keep=5))
    assert back.keeper.resume(version=3).step == 6  # type: ignore[union-attr]
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


def test_a_run_that_must_exist_creates_no_mirror(tmp_path: Path) -> None:
    """Nor does one whose first place is there, but empty."""
    mirror, local = MemoryStore(), MemoryStore()
    Repository.create(local, schema=Life(MemoryStore(), None).keeper._parts.subject.schema())
    with pytest.raises(NoVersionError, match="must exist"):
        Life(local, mirror, must_exist=True)
    assert not list(mirror.list())

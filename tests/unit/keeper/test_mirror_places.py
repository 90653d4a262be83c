"""Which version counts where two places differ, and how the end of a run waits for the second."""

from __future__ import annotations

from pathlib import Path

import emberkeep as ek
from emberkeep.blobs import MemoryStore
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

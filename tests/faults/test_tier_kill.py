"""SIGKILL at any moment of training over a tier: it resumes, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.lives import Nursery
from tests.faults.test_kill import result_in, survive


def check(nursery: Nursery, where: Path, kills: int) -> None:
    log = where / "whole.log"
    assert nursery.live("tiered", str(where / "whole"), log=log) == 0, log.read_text()
    survive(nursery, where, "tiered", lambda name: (str(where / name),), result_in(log), kills)


def test_killed_at_any_moment_it_ends_with_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    check(nursery, tmp_path, 8)


@pytest.mark.soak
def test_killed_five_hundred_times(nursery: Nursery, tmp_path: Path) -> None:
    check(nursery, tmp_path, 500)

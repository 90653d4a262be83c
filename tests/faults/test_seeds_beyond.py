"""Simulated clusters lose and double no push: the other seeds of the default run."""

from __future__ import annotations

from tests.faults.seeds import HALF, check_seeds


def test_the_other_seeds_lose_and_double_no_push() -> None:
    check_seeds(range(HALF, 2 * HALF))

"""Simulated clusters lose and double no push: the first seeds of the default run."""

from __future__ import annotations

from tests.faults.seeds import HALF, check_seeds


def test_the_first_seeds_lose_and_double_no_push() -> None:
    check_seeds(range(HALF))

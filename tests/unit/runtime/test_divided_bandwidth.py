"""A bandwidth that others write with, too, and one whose rate changes."""

from __future__ import annotations

import threading

import pytest

from emberkeep.errors import ConfigError
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.testing.virtual_clock import VirtualClock


def test_what_passes_is_one_of_the_parts() -> None:
    clock = VirtualClock(pace=1e5)
    bandwidth, start = Bandwidth(1.0, clock=clock), clock.monotonic()
    bandwidth.divide(4)
    assert bandwidth.share() == 0.25
    for _ in range(3):
        bandwidth.spend(1_000_000)
    assert clock.monotonic() - start >= 8  # the third may go once two are paid for
    bandwidth.divide(1)
    assert bandwidth.share() == 1.0


def test_a_new_limit_holds_from_now_on_and_nothing_is_owed_at_the_old_one() -> None:
    clock = VirtualClock(pace=1e5)
    bandwidth = Bandwidth(None, clock=clock)
    bandwidth.spend(10**12)
    bandwidth.limit(1e-6)
    bandwidth.spend(1_000_000)  # which pays for days
    bandwidth.limit(1.0)
    start = clock.monotonic()
    for _ in range(3):
        bandwidth.spend(1_000_000)
    assert 2 <= clock.monotonic() - start < 10_000
    with pytest.raises(ConfigError, match="most_mb_per_second must be above 0"):
        bandwidth.limit(0.0)
    assert bandwidth.share() == 1.0


def test_the_same_limit_again_lets_nothing_more_through() -> None:
    clock = VirtualClock(pace=1e5)
    bandwidth, start = Bandwidth(1.0, clock=clock), clock.monotonic()
    for _ in range(4):
        bandwidth.limit(1.0)
        bandwidth.spend(1_000_000)
    assert clock.monotonic() - start >= 3


def test_a_limit_that_is_taken_away_wakes_who_waits() -> None:
    bandwidth = Bandwidth(1e-6)
    bandwidth.spend(1)
    timer = threading.Timer(0.05, lambda: bandwidth.limit(None))
    timer.start()
    bandwidth.spend(1_000_000)  # days, but for that
    timer.join()
    assert bandwidth.share() is None


def test_a_new_limit_reaches_who_waits_by_the_old_one() -> None:
    bandwidth = Bandwidth(1e-6)
    bandwidth.spend(1)
    timer = threading.Timer(0.05, lambda: bandwidth.limit(1000.0))
    timer.start()
    bandwidth.spend(1_000_000)  # days, but for that
    timer.join()
    assert bandwidth.share() == 1000.0

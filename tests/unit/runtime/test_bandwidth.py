"""Bytes per second on virtual time; what was given up does not wait."""

from __future__ import annotations

import threading

import pytest

from emberkeep.errors import CancelledError, ConfigError
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.testing.virtual_clock import VirtualClock


def test_bytes_pass_no_faster_than_they_may_and_are_the_same() -> None:
    clock = VirtualClock(pace=1e5)
    start = clock.monotonic()
    data = [bytes([i % 251]) * 3_000_000 for i in range(5)] + [b"z" * 9_000_000]
    passed = b"".join(Bandwidth(1.0, clock=clock).passing(data))
    assert passed == b"".join(data)
    # The last part may go as soon as those before it are paid for.
    assert clock.monotonic() - start >= (24_000_000 - 4 * 2**20) / 1e6


def test_threads_share_it() -> None:
    clock = VirtualClock(pace=1e5)
    bandwidth, start = Bandwidth(1.0, clock=clock), clock.monotonic()
    threads = [
        threading.Thread(target=lambda: [bandwidth.spend(1_000_000) for _ in range(4)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.monotonic() - start >= 11
    assert bandwidth.share() == 1.0


def test_without_a_limit_buffers_are_passed_as_they_are() -> None:
    data = [b"x" * 10_000_000]
    assert next(Bandwidth(None).passing(data)) is data[0]
    assert Bandwidth(None).share() is None


def test_what_is_given_up_or_in_a_hurry_does_not_wait() -> None:
    bandwidth, cancelled = Bandwidth(1e-6), threading.Event()
    bandwidth.spend(1)  # which pays for a second
    cancelled.set()
    with pytest.raises(CancelledError):
        bandwidth.spend(1_000_000, cancelled)
    timer = threading.Timer(0.05, bandwidth.lift)
    timer.start()
    bandwidth.spend(1_000_000)  # days, but for that
    timer.join()


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ConfigError, match="most_mb_per_second must be above 0"):
        Bandwidth(rate)

"""What threads spend is counted, and kept within a share of a core on virtual time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from emberkeep.errors import CancelledError, ConfigError
from emberkeep.runtime.core_time import Budget, CoreTime
from emberkeep.testing.virtual_clock import VirtualClock


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_the_threads_of_a_save_spend_is_known_while_it_lasts() -> None:
    cores = CoreTime()

    def items() -> Iterator[int]:
        for item in range(3):
            work(0.002)
            yield item

    with cores.counting():
        work(0.003)
        for _ in cores.noting(range(1)):
            assert cores.seconds >= 0.003
        with cores.counting():  # of the same thread: it is counted already
            work(0.003)
    assert 0.006 <= cores.seconds < 0.009
    before = cores.seconds
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.extend(cores.iterating(items())))
    thread.start()
    thread.join()
    assert taken == [0, 1, 2]
    assert cores.seconds - before >= 0.006


def test_a_share_is_kept_on_average_since_the_start() -> None:
    clock, cores = VirtualClock(pace=1e4), CoreTime()
    budget = Budget(0.001, cores, clock=clock)
    with cores.counting():
        work(0.002)
    budget.start()  # what was spent before does not count
    began = clock.monotonic()
    budget.rest(lambda: False)
    assert clock.monotonic() == began
    for _ in range(2):
        with cores.counting():
            work(0.002)
        budget.rest(lambda: False)
    assert clock.monotonic() - began >= 4.0


def test_who_is_waited_for_or_given_up_does_not_rest() -> None:
    cores, cancelled = CoreTime(), threading.Event()
    budget = Budget(1e-9, cores)
    with cores.counting():
        work(0.002)  # pays for weeks
    budget.rest(lambda: True)
    cancelled.set()
    with pytest.raises(CancelledError):
        budget.rest(lambda: False, cancelled)
    timer = threading.Timer(0.02, budget.lift)
    timer.start()
    budget.rest(lambda: False)
    timer.join()
    assert budget.share is None
    Budget(None, cores).rest(lambda: False)


@pytest.mark.parametrize("share", [0, -0.1, float("inf"), float("nan")])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(ConfigError, match="background_share is a part of a core"):
        Budget(share, CoreTime())

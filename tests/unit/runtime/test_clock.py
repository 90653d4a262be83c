"""The machine's clock and the one that tests drive: two clocks, one behaviour."""

from __future__ import annotations

import threading
from datetime import timedelta, timezone

import pytest

from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.testing.virtual_clock import VirtualClock

AN_HOUR = timedelta(hours=1)


@pytest.fixture(params=["system", "virtual"])
def clock(request: pytest.FixtureRequest) -> Clock:
    return SYSTEM_CLOCK if request.param == "system" else VirtualClock()


def test_time_passes_in_sleep(clock: Clock) -> None:
    before, date = clock.monotonic(), clock.now()
    clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.01
    assert clock.now() > date
    assert clock.now().tzinfo is timezone.utc


def test_a_wait_ends_when_its_condition_holds(clock: Clock) -> None:
    changed, held = threading.Condition(), []

    def change() -> None:
        with changed:
            held.append(1)
            changed.notify_all()

    for seconds in None, 60.0:
        held.clear()
        with changed:
            thread = threading.Thread(target=change)
            thread.start()
            assert clock.wait_for(changed, lambda: bool(held), seconds)
        thread.join()
    with changed:
        assert not clock.wait_for(changed, lambda: False, 0.0)


def test_virtual_time_passes_only_when_it_is_advanced() -> None:
    clock, changed, ended = VirtualClock(), threading.Condition(), []

    def wait() -> None:
        with changed:
            waiting.set()
            ended.append(clock.wait_for(changed, lambda: False, AN_HOUR.total_seconds()))

    waiting = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    clock.advance(AN_HOUR / 2)
    assert not ended
    date = clock.now()
    clock.jump(-AN_HOUR)  # setting the date lets no time pass
    assert clock.now() == date - AN_HOUR
    assert not ended
    with changed:  # it has read the clock before it let go of its condition
        clock.advance(AN_HOUR)
    thread.join()
    assert ended == [False]

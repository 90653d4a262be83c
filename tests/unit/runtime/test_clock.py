"""The machine's clock and the one that tests drive: two clocks, one behaviour."""

from __future__ import annotations

import threading
from datetime import timedelta, timezone

import pytest

from emberkeep.errors import DeadlineError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock, Event
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


def test_while_somebody_waits_virtual_time_passes_at_its_pace() -> None:
    clock, changed = VirtualClock(pace=1e6), threading.Condition()
    with changed:
        assert not clock.wait_for(changed, lambda: False, AN_HOUR.total_seconds())
    assert clock.monotonic() >= 3600


def test_an_event_is_waited_for_in_time(clock: Clock) -> None:
    event = Event(clock)
    assert not event.wait(timedelta(0))
    with pytest.raises(DeadlineError, match="waited 0 s for the moon; it is still under way"):
        event.require("the moon", timedelta(0))
    thread = threading.Thread(target=event.set)
    thread.start()
    event.require("the thread", AN_HOUR)
    assert event.is_set()
    assert event.wait(timedelta(0))
    thread.join()

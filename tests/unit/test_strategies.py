"""Presets and schedules: pure decisions, as tables of cases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.errors import ConfigError
from emberkeep.repository import KeepAll, KeepEvery, KeepLast, KeepNamed
from emberkeep.strategies import Every, retention, schedule

SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (500, Every(steps=500)),
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("30min", Every(time=timedelta(minutes=30))),
        ("2h", Every(time=timedelta(hours=2))),
        ("2 hours", Every(time=timedelta(hours=2))),
        ("1h 30min", Every(time=timedelta(minutes=90))),
        ("1h30m", Every(time=timedelta(minutes=90))),
        ("0.5s", Every(time=timedelta(milliseconds=500))),
        (" 10 Minutes ", Every(time=timedelta(minutes=10))),
        ("1 day", Every(time=timedelta(days=1))),
        (timedelta(seconds=7), Every(time=timedelta(seconds=7))),
    ],
)
def test_intervals_as_users_write_them(given: Any, expected: Every) -> None:
    assert schedule(given) == expected


@pytest.mark.parametrize(
    "given", ["", "often", "10", "10 parsecs", "1h and a bit", 0, -3, True, 2.5, "0s", None]
)
def test_what_is_no_interval_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="every="):
        schedule(given)


@pytest.mark.parametrize(
    ("step", "due", "ahead"),
    [(0, True, 5), (1, False, 4), (4, False, 1), (5, True, 5), (7, False, 3), (10, True, 5)],
)
def test_steps(step: int, due: bool, ahead: int) -> None:
    plan = Every(steps=5)
    assert plan.due(step, SECOND) is due
    assert plan.steps_ahead(step, SECOND, None) == ahead


@pytest.mark.parametrize(
    ("since", "per_step", "due", "ahead"),
    [
        (0, None, False, 1),  # nothing known: look after every step
        (0, 1.0, False, 50),  # half of the hundred steps that fit
        (50, 1.0, False, 25),
        (99, 1.0, False, 1),
        (100, 1.0, True, 1),
        (130, 1.0, True, 1),
        (0, 0.001, False, 1000),  # never more than that
        (0, 1000.0, False, 1),
    ],
)
def test_time(since: float, per_step: float | None, due: bool, ahead: int) -> None:
    plan = Every(time=timedelta(seconds=100))
    passed = timedelta(seconds=since)
    assert plan.due(7, passed) is due
    one = None if per_step is None else timedelta(seconds=per_step)
    assert plan.steps_ahead(7, passed, one) == ahead


def test_a_schedule_by_time_is_met_closely() -> None:
    """However many steps are allowed at a time, the last one is at most a step late."""
    plan, passed, step = Every(time=timedelta(seconds=100)), 0.0, 0
    while not plan.due(step, timedelta(seconds=passed)):
        ahead = plan.steps_ahead(step, timedelta(seconds=passed), SECOND)
        step += ahead
        passed += ahead
    assert 100 <= passed <= 101


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (2, KeepLast(n=2) | KeepNamed()),
        ("all", KeepAll()),
        (KeepEvery(m=7), KeepEvery(m=7)),
    ],
)
def test_what_is_kept(keep: Any, expected: Any) -> None:
    assert retention(keep) == expected


@pytest.mark.parametrize("keep", [0, -1, "some", True])
def test_what_cannot_be_kept_is_refused(keep: Any) -> None:
    with pytest.raises(ConfigError):
        retention(keep)


def test_presets() -> None:
    plain = ek.incremental()
    assert plain.strategy.layout == "intermittent"
    assert not plain.strategy.lossy
    assert plain.schedule == Every(time=timedelta(minutes=30))
    assert plain.retention == KeepLast(n=3) | KeepNamed()
    paper = ek.check_n_run()
    assert paper.strategy.codecs(0)["weight"].to_dict()["bits"] == 2
    assert paper.strategy.codecs(2)["weight"].to_dict()["bits"] == 8
    assert paper.retention == KeepLast(n=1) | KeepNamed()
    assert ek.check_n_run(bits=4).strategy.codecs(9)["weight"].to_dict()["bits"] == 4
    assert ek.check_n_run(every=10, expected_restores=20, keep=3) == ek.incremental(
        every=10, expected_restores=20
    )


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"bits": 4, "expected_restores": 3}, "not both"),
        ({"bits": 5}, "bits"),
        ({"layout": "spiral"}, "layout must be one of"),
        ({"expected_restores": -1}, "0 or more"),
        ({"every": 0}, "1 step or more"),
        ({"keep": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(wrong: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ek.incremental(**wrong)

"""Plans of a run as tables: what was seen in, a decision out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from emberkeep.checkpoint.failure_history import FailureHistory
from emberkeep.checkpoint.run_plan import (
    Measured,
    RunPlan,
    Target,
    bits_within,
    plan_run,
    rounding_loss,
    target_from,
)
from emberkeep.errors import ConfigError, DamageError

HOUR, MINUTE, SECOND = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=1)
TARGET = Target(pls=0.05, mtbf=10 * HOUR)


def seen(**changes: Any) -> Measured:
    given: dict[str, Any] = {
        "left": 200 * HOUR, "done": 0.0, "shards": 8, "pls": 0.0, "stall": 2 * MINUTE,
        "write": 3 * MINUTE, "load": 3 * MINUTE, "failures": FailureHistory.known(10 * HOUR),
    }  # fmt: skip
    mtbf = changes.pop("mtbf", None)
    if mtbf is not None:
        given["failures"] = FailureHistory.known(mtbf * HOUR)
    return Measured(**{**given, **changes})


def test_partial_recovery_where_it_pays_and_full_where_it_does_not() -> None:
    plan = plan_run(TARGET, seen(), None)
    assert plan.scope == "partial"
    assert plan.interval / HOUR == pytest.approx(2 * 0.05 * 8 * 10, rel=0.1)
    assert plan.most_pls == 0.05
    assert "PLS 0.05" in plan.reason
    assert "partial recovery costs" in plan.reason
    exact = plan_run(replace(TARGET, pls=0.0), seen(), None)
    assert exact.scope == "full"
    assert plan_run(TARGET, seen(), None, partial=False).scope == "full"


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, False),
        ({"mtbf": 10.5}, False),
        ({"mtbf": 2.5}, True),
        ({"mtbf": 40.0}, True),
        ({"stall": 2.1 * MINUTE}, False),
        ({"pls": 0.045, "done": 0.5, "left": 100 * HOUR}, True),
    ],
)
def test_a_plan_stays_until_what_was_seen_has_moved(changes: dict[str, Any], moves: bool) -> None:
    plan = plan_run(TARGET, seen(), None)
    assert (plan_run(TARGET, seen(**changes), plan) is not plan) is moves


def test_the_interval_follows_failures_and_saves() -> None:
    exact = replace(TARGET, pls=0.0)
    first = plan_run(exact, seen(), None)
    often = plan_run(exact, seen(mtbf=2.5), first)
    assert often.interval / first.interval == pytest.approx(0.5, rel=0.1)
    dear = plan_run(exact, seen(stall=8 * MINUTE), first)
    assert dear.interval / first.interval == pytest.approx(2, rel=0.1)


def test_what_is_lost_already_counts() -> None:
    half = plan_run(TARGET, seen(pls=0.025, done=0.5, left=100 * HOUR), None)
    whole = plan_run(TARGET, seen(), None)
    assert half.interval / whole.interval == pytest.approx(1, rel=0.1)
    spent = plan_run(TARGET, seen(pls=0.05, done=0.5, left=100 * HOUR), None)
    assert spent.scope == "full"


def test_layout_and_bits_follow_from_writing() -> None:
    target = Target(accuracy_loss=0.002, slope=0.02, mtbf=10 * HOUR)
    plan = plan_run(target, seen(), None)
    assert (plan.layout, plan.bits) == ("intermittent", None)
    whole = plan_run(target, seen(increments=0.8), plan)
    assert whole.layout == "full"
    assert "increments are 80% of a baseline" in whole.reason
    slow = plan_run(target, seen(write=12 * HOUR, increments=0.2), plan)
    assert slow.layout == "consecutive"
    assert slow.bits == 4
    assert "versions in 4 bits, because writing one takes 12 h" in slow.reason
    # Rounding takes its share of what may be lost.
    assert slow.most_pls == pytest.approx(0.8 * plan.most_pls)
    strict = replace(target, accuracy_loss=0.000001)
    assert plan_run(strict, seen(write=12 * HOUR), replace(plan, bits=4)).bits is None


@pytest.mark.parametrize(
    ("restores", "loss", "bits"),
    [(1, 1e-4, 2), (2, 1e-4, 3), (20, 1e-4, 4), (21, 1e-4, 8), (100, 1e-4, 8), (101, 1e-4, None)],
)
def test_bits_are_those_of_the_check_n_run_paper(
    restores: int, loss: float, bits: int | None
) -> None:
    assert bits_within(loss, restores) == bits
    assert rounding_loss(4, 20) == pytest.approx(1e-4)


def test_recent_failures_count_more_and_a_long_quiet_is_news() -> None:
    history = FailureHistory.expected(TARGET.mtbf)
    for _ in range(30):
        history = history.passed(10 * HOUR).failed(1)
    assert history.mtbf / HOUR == pytest.approx(10, rel=0.05)
    for _ in range(14):
        history = history.passed(2.5 * HOUR).failed(4)
    assert 2 < history.mtbf / HOUR < 5
    assert history.together == 4
    assert history.seen == 44
    assert history.passed(100 * HOUR).mtbf / HOUR > 10
    assert FailureHistory.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    with pytest.raises(DamageError, match="damaged"):
        FailureHistory.from_dict({"hours": 1.0})


def test_plans_are_plain_data() -> None:
    plan = plan_run(TARGET, seen(), None, step=40)
    document = json.loads(json.dumps(plan.to_dict()))
    assert document["interval_seconds"] == plan.interval.total_seconds()
    assert RunPlan.from_dict(document) == plan
    with pytest.raises(DamageError, match="the plan of a version is damaged"):
        RunPlan.from_dict({"scope": "full"})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("accuracy loss 0.01%", {"accuracy_loss": 0.0001}),
        ("Accuracy loss of 0.001", {"accuracy_loss": 0.001}),
        ("PLS 0.1", {"pls": 0.1}),
        ("pls 10%", {"pls": 0.1}),
        ("accuracy loss 1e-4", {"accuracy_loss": 1e-4}),
    ],
)
def test_targets(text: str, found: dict[str, float]) -> None:
    assert target_from(text) == pytest.approx(found)


@pytest.mark.parametrize(
    "given",
    [
        {"pls": 0.1, "accuracy_loss": 0.1}, {"pls": 2.0}, {"accuracy_loss": -1.0},
        {"slope": 0.1}, {"accuracy_loss": 0.1, "slope": 0.0}, {"mtbf": 0 * HOUR},
        {"together": 0}, {"reschedule": -1 * HOUR}, {"max_interval": 0 * HOUR},
        {"accuracy_loss": 5.0}, {"together": 2.5},
    ],
)  # fmt: skip
def test_targets_that_cannot_be(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Target(**given)


@pytest.mark.parametrize("text", ["much", "0.1", "PLS", "PLS 1.2.3", "", None, 0.1])
def test_what_is_no_target(text: Any) -> None:
    with pytest.raises(ConfigError, match="is no target: write 'accuracy loss"):
        target_from(text)


def test_failures_that_leave_no_shard_are_counted_separately() -> None:
    """The end of a process counted as a failure of all shards, and partial recovery was planned as
    if every failure took half of them."""
    history = FailureHistory.expected(TARGET.mtbf)
    for number in range(40):
        history = history.passed(10 * HOUR).failed(None if number % 4 == 0 else 1)
    assert history.together == 1
    assert 0.15 < history.total_losses < 0.35
    assert FailureHistory.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    some = plan_run(TARGET, seen(failures=history), None)
    none = plan_run(TARGET, seen(failures=replace(history, total=0.0)), None)
    assert some.scope == none.scope == "partial"
    assert some.interval < 0.6 * none.interval  # versions for those that take everything
    for _ in range(80):
        history = history.passed(10 * HOUR).failed(None)
    assert plan_run(TARGET, seen(failures=history), None).scope == "full"


def test_costs_are_those_of_the_interval_that_is_wanted_at_most() -> None:
    wanted = replace(TARGET, max_interval=10 * MINUTE)
    plan = plan_run(wanted, seen(), None)
    assert plan.interval == 10 * MINUTE
    assert plan.overhead > 2 / 10  # 2 of 12 minutes are saves; 3% were promised
    assert plan_run(replace(wanted, pls=0.0), seen(), None).interval == 10 * MINUTE


def test_intervals_beyond_the_end_are_no_news() -> None:
    plan = plan_run(TARGET, seen(left=6 * HOUR, done=0.97), None)
    assert plan.interval >= 5.5 * HOUR
    for left in (5, 4, 3, 2, 1):
        later = seen(left=left * HOUR, done=1 - left / 200)
        assert plan_run(TARGET, later, plan) is plan


def test_a_plan_for_a_run_that_would_never_end_can_be_stored() -> None:
    plan = plan_run(replace(TARGET, reschedule=10 * HOUR), seen(mtbf=0.1), None)
    assert math.isinf(plan.overhead)
    document = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert document["overhead"] is None
    assert RunPlan.from_dict(document) == plan
    assert "inf" not in plan_run(replace(TARGET, pls=1e-12), seen(), None).reason


def test_no_plan_stays_that_is_beyond_the_interval_wanted_at_most() -> None:
    plan = plan_run(replace(TARGET, max_interval=60 * MINUTE), seen(), None)
    again = plan_run(replace(TARGET, max_interval=55 * MINUTE), seen(), plan)
    assert again.interval == 55 * MINUTE
    assert plan_run(replace(TARGET, max_interval=65 * MINUTE), seen(), plan) is plan

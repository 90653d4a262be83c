"""Recommendations as tables of cases."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from emberkeep.checkpoint import Job
from emberkeep.errors import ConfigError
from emberkeep.planning.advisor import Plan, Question, advise, time_text

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


def plan(*, question: dict[str, Any] | None = None, **job: Any) -> Plan:
    paper = {
        "duration": 56 * HOUR,
        "mtbf": 28 * HOUR,
        "shards": 8,
        "save": 5.7 * MINUTE,
        "load": 2.5 * MINUTE,
        "reschedule": 2.5 * MINUTE,
    }
    return advise(Question(job=Job(**{**paper, **job}), **(question or {})))


def test_the_papers_production_job() -> None:
    found = plan(question={"pls": 0.1})
    percents = {name: round(100 * o.overhead.total, 2) for name, o in found.strategies.items()}
    assert percents["full"] == 8.54
    assert percents["partial"] == 4.42
    assert percents["cpr"] == 0.51
    assert percents["cpr_mfu"] == percents["cpr_ssu"] == percents["cpr_scar"] == 0.7
    assert found.recommended == "cpr"
    assert found.strategies["cpr_ssu"].interval == 5.6 * HOUR
    document = found.to_dict()
    assert document["strategies"]["cpr"]["interval_hours"] == pytest.approx(44.8)
    assert document["strategies"]["full"]["overhead"] == pytest.approx(0.0853516)
    assert document["recommended"] == "cpr"
    assert "0.51% of the job where full recovery costs 8.54%" in document["reason"]


@pytest.mark.parametrize(
    ("question", "job", "recommended", "reason"),
    [
        ({"pls": 0.02}, {}, "cpr", "a version every 9.0 h"),
        ({"pls": 0.0}, {}, "full", "lets no update be lost"),
        ({"pls": 0.02}, {"mtbf": 1.4 * HOUR, "failing_together": 4}, "full", "does not pay"),
        ({"pls": 0.001}, {"shards": 1}, "full", "does not pay: PLS 0.001 asks for a version every"),
        ({"max_interval": 2 * HOUR}, {}, "cpr", "a version every 2.0 h"),
        ({"accuracy_loss": 0.0005, "slope": 0.01}, {}, "cpr", "within PLS 0.05"),
        ({"pls": 0.0, "parity_slowdown": 0.02}, {}, "parity", "2.00% slower"),
        ({"parity_slowdown": 0.02}, {}, "cpr", "0.51%"),
        ({"pls": 0.0, "parity_slowdown": 0.2}, {}, "full", "lets no update"),
    ],
)
def test_recommendations(
    question: dict[str, Any], job: dict[str, Any], recommended: str, reason: str
) -> None:
    found = plan(question=question, **job)
    assert found.recommended == recommended
    assert reason in found.reason


@pytest.mark.parametrize(
    ("question", "job", "words"),
    [
        ({}, {"shards": 16}, "longer than the job (56.0 h): no version is taken before its end"),
        ({}, {}, "one version in the whole job"),
        ({"max_interval": 4 * HOUR}, {"mtbf": 100 * HOUR}, "fewer than one failure is expected"),
        ({"pls": 0.02}, {"mtbf": 1.4 * HOUR, "failing_together": 4}, "not a small overhead"),
        ({"pls": 0.5}, {"mtbf": 4 * HOUR}, "is beyond 0.2"),
        ({"pls": 0.001}, {"failing_together": 8}, "would be expected to lose PLS 0.0412"),
    ],
)
def test_warnings(question: dict[str, Any], job: dict[str, Any], words: str) -> None:
    assert any(words in warning for warning in plan(question=question, **job).warnings)


def test_nothing_to_warn_of() -> None:
    assert plan(question={"max_interval": 4 * HOUR}).warnings == ()


def test_hours_money_and_accuracy() -> None:
    question = {"pls": 0.1, "price": 2.5, "machines": 38, "slope": 0.006}
    full, cpr = (plan(question=question).strategies[name] for name in ("full", "cpr"))
    assert full.lost_hours == pytest.approx(56 * 0.0853516, rel=1e-4)
    assert full.cost == pytest.approx(full.lost_hours * 38 * 2.5)
    assert full.accuracy_loss == 0.0
    assert cpr.accuracy_loss == pytest.approx(0.0006)
    without = plan(question={"price": 2.5}).strategies["full"]
    assert without.cost == pytest.approx(without.lost_hours * 8 * 2.5)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"pls": 0.1, "accuracy_loss": 0.1, "slope": 1.0}, "not both"),
        ({"accuracy_loss": 0.1}, "needs the slope"),
        ({"slope": 0.0}, "slope must be above 0"),
        ({"pls": 1.5}, "between 0 and 1"),
        ({"price": -1.0}, "price must be 0 or more"),
        ({"machines": 0}, "machines must be 1 or more"),
        ({"max_interval": 0 * HOUR}, "max_interval must be longer"),
    ],
)
def test_questions_that_cannot_be(question: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(question=question)


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (100 * HOUR, "4.2 days"),
        (56 * HOUR, "56.0 h"),
        (HOUR / 2, "30.0 min"),
        (HOUR / 3600, "1.0 s"),
    ],
)
def test_times_for_people(time: timedelta, text: str) -> None:
    assert time_text(time) == text

"""The equations as tables of cases; the first row is the paper's emulated production job."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep.checkpoint import Job
from emberkeep.checkpoint.overheads import (
    expected_pls,
    interval_for_pls,
    optimal_full_interval,
    overhead_full,
    overhead_partial,
    partial_pays,
    pls_of_loss,
)
from emberkeep.errors import ConfigError

HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)
PAPER: dict[str, Any] = {
    "duration": 56 * HOUR,
    "mtbf": 28 * HOUR,
    "shards": 8,
    "save": 5.7 * MINUTE,
    "load": 2.5 * MINUTE,
    "reschedule": 2.5 * MINUTE,
}


def job(**changes: Any) -> Job:
    return Job(**{**PAPER, **changes})


def test_the_papers_production_job() -> None:
    paper = job()
    optimal = optimal_full_interval(paper)
    wide = interval_for_pls(paper, 0.1)
    assert round(100 * overhead_full(paper, optimal).total, 2) == 8.54
    assert round(100 * overhead_partial(paper, optimal).total, 2) == 4.42
    assert round(100 * overhead_partial(paper, wide).total, 2) == 0.51
    assert wide == 44.8 * HOUR
    assert expected_pls(paper, wide) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("changes", "interval_hours", "save", "load", "lost", "reschedule"),
    [
        ({}, 2.0, 0.0475, 1 / 672, 1 / 28, 1 / 672),
        ({"mtbf": 14 * HOUR}, 2.0, 0.0475, 1 / 336, 1 / 14, 1 / 336),
        ({"reschedule": 0 * HOUR}, 4.0, 0.02375, 1 / 672, 1 / 14, 0.0),
        ({"save": 6 * MINUTE, "load": 0 * HOUR}, 1.0, 0.1, 0.0, 1 / 56, 1 / 672),
        # The length of the job and the number of shards change no fraction.
        ({"duration": 5600 * HOUR, "shards": 1}, 2.0, 0.0475, 1 / 672, 1 / 28, 1 / 672),
    ],
)
def test_overheads(
    changes: dict[str, Any],
    interval_hours: float,
    save: float,
    load: float,
    lost: float,
    reschedule: float,
) -> None:
    full = overhead_full(job(**changes), interval_hours * HOUR)
    partial = overhead_partial(job(**changes), interval_hours * HOUR)
    assert (full.save, full.load, full.lost, full.reschedule) == pytest.approx(
        (save, load, lost, reschedule)
    )
    assert (partial.save, partial.load, partial.lost, partial.reschedule) == pytest.approx(
        (save, load, 0.0, reschedule)
    )
    assert full.total == pytest.approx(save + load + lost + reschedule)


@pytest.mark.parametrize(
    ("changes", "hours"),
    [
        ({}, math.sqrt(5.32)),
        ({"mtbf": 2 * HOUR, "save": 15 * MINUTE}, 1.0),
        ({"duration": 1 * HOUR}, 1.0),  # never beyond the end of the job
    ],
)
def test_the_optimal_interval(changes: dict[str, Any], hours: float) -> None:
    assert optimal_full_interval(job(**changes)) / HOUR == pytest.approx(hours, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "pls", "hours"),
    [
        ({}, 0.1, 44.8),
        ({}, 0.02, 8.96),
        ({"failing_together": 4}, 0.1, 11.2),
        ({"shards": 18, "failing_together": 4, "mtbf": 10 * HOUR}, 0.1, 9.0),
        ({"shards": 16}, 0.1, 56.0),  # 89.6 h by the equation
        ({}, 1.0, 56.0),
        ({}, 0.0, 0.0),
    ],
)
def test_the_interval_for_a_pls(changes: dict[str, Any], pls: float, hours: float) -> None:
    found = interval_for_pls(job(**changes), pls)
    assert found / HOUR == pytest.approx(hours)
    assert expected_pls(job(**changes), found) <= pls + 1e-12


@pytest.mark.parametrize(
    ("changes", "pls", "pays", "words"),
    [
        ({}, 0.1, True, "0.51% of the job against 8.54%"),
        ({}, 0.02, True, "1.36% of the job against 8.54%"),
        ({}, 0.0, False, "a PLS of 0 lets no update be lost"),
        # Twenty times as many failures, half of the shards each time: as in the paper, refused.
        ({"mtbf": 1.4 * HOUR, "failing_together": 4}, 0.02, False, "every 6.7 min"),
        ({"mtbf": 1.4 * HOUR, "failing_together": 1}, 0.02, True, "partial recovery costs"),
        ({"shards": 1}, 0.001, False, "asks for a version every 3.4 min"),
        ({"duration": 0.05 * HOUR}, 0.1, True, "partial recovery costs"),
    ],
)
def test_whether_partial_recovery_pays(
    changes: dict[str, Any], pls: float, pays: bool, words: str
) -> None:
    verdict = partial_pays(job(**changes), pls)
    assert verdict.pays is pays
    assert words in verdict.reason
    assert verdict.pays == (verdict.partial.total < verdict.full.total)


@pytest.mark.parametrize(
    ("lost", "total", "shards", "pls"),
    [(0, 100, 8, 0.0), (50, 100, 1, 0.5), (50, 100, 8, 0.0625), (100, 100, 4, 0.25)],
)
def test_pls_of_one_loss(lost: int, total: int, shards: int, pls: float) -> None:
    assert pls_of_loss(lost_samples=lost, total_samples=total, shards=shards) == pls


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtbf": 0 * HOUR}, "mtbf must be longer"),
        ({"save": 0 * HOUR}, "save must be longer"),
        ({"load": -1 * HOUR}, "load must not be negative"),
        ({"shards": 0}, "shards must be 1 or more"),
        ({"failing_together": 9}, "1 to 8 can fail together, not 9"),
    ],
)
def test_a_job_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(**changes)


def test_arguments_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"between 0 and 1, not 1\.5"):
        interval_for_pls(job(), 1.5)
    with pytest.raises(ConfigError, match="longer than no time"):
        overhead_full(job(), 0 * HOUR)
    with pytest.raises(ConfigError, match="is no loss"):
        pls_of_loss(lost_samples=-1, total_samples=10, shards=2)


@settings(deadline=None, max_examples=100)
@given(
    mtbf=st.floats(0.5, 1000),
    save=st.floats(0.01, 1),
    load=st.floats(0, 1),
    factor=st.floats(0.1, 10),
)
def test_no_interval_is_better_than_the_optimal_one(
    mtbf: float, save: float, load: float, factor: float
) -> None:
    some = job(duration=1e6 * HOUR, mtbf=mtbf * HOUR, save=save * HOUR, load=load * HOUR)
    best = optimal_full_interval(some)
    assert overhead_full(some, best).total <= overhead_full(some, best * factor).total * (1 + 1e-6)

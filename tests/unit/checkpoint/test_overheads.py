"""The equations as tables of cases; the first row is the paper's emulated production job."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep.checkpoint import Job
from emberkeep.checkpoint.failure_gaps import Gaps
from emberkeep.checkpoint.overheads import (
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
    """The paper has 8.5%, 4.4% and 0.5%: a little less, since there time that is lost is not struck
    by failures itself."""
    paper = job()
    optimal = optimal_full_interval(paper)
    wide = interval_for_pls(paper, 0.1)
    assert round(100 * overhead_full(paper, optimal).total, 1) == 9.0
    assert round(100 * overhead_partial(paper, optimal).overhead.total, 1) == 4.6
    average = overhead_partial(paper, wide)
    assert round(100 * average.overhead.total, 1) == 0.5
    assert average.pls == pytest.approx(0.079, abs=0.001)
    assert wide == 44.8 * HOUR
    kept = overhead_partial(paper, wide, most_pls=0.1, least_interval=optimal)
    assert round(100 * kept.overhead.total, 1) == 1.2
    assert kept.pls < average.pls


@pytest.mark.parametrize(
    ("changes", "interval_hours", "save", "load", "lost", "reschedule"),
    [
        ({}, 2.0, 0.0475, 1 / 672, 1 / 28, 1 / 672),
        ({"mtbf": 14 * HOUR}, 2.0, 0.0475, 1 / 336, 1 / 14, 1 / 336),
        ({"reschedule": 0 * HOUR}, 4.0, 0.02375, 1 / 672, 1 / 14, 0.0),
        ({"save": 1 * MINUTE, "load": 0 * HOUR}, 1.0, 1 / 60, 0.0, 1 / 56, 1 / 672),
    ],
)
def test_small_overheads_are_those_of_the_papers_equations(
    changes: dict[str, Any],
    interval_hours: float,
    save: float,
    load: float,
    lost: float,
    reschedule: float,
) -> None:
    """Everything a hundred times shorter than the time between failures, in a long job."""
    given = {**PAPER, **changes, "duration": 56000 * HOUR}
    given |= {key: given[key] / 100 for key in ("save", "load", "reschedule")}
    interval = interval_hours / 100 * HOUR
    full = overhead_full(Job(**given), interval)
    partial = overhead_partial(Job(**given), interval).overhead
    assert (full.save, full.load, full.lost, full.reschedule) == pytest.approx(
        (save, load / 100, lost / 100, reschedule / 100), rel=0.16
    )
    assert (partial.save, partial.load, partial.lost, partial.reschedule) == pytest.approx(
        (save, load / 100, 0.0, reschedule / 100), rel=0.16
    )
    assert full.total == pytest.approx(full.save + full.load + full.lost + full.reschedule)


def test_full_recovery_is_exact_for_failures_at_any_moment() -> None:
    """Daly's equation, for a job of many intervals."""
    long = job(duration=56000 * HOUR, mtbf=4 * HOUR)
    rate, cycle = 1 / 4, 2 + 5.7 / 60
    expected = math.exp(rate * 5 / 60) / rate * math.expm1(rate * cycle) / 2 - 1
    assert overhead_full(long, 2 * HOUR).total == pytest.approx(expected, rel=1e-3)


def test_failures_that_come_in_bursts_cost_full_recovery_less() -> None:
    bursts = job(mtbf=4 * HOUR, gaps=Gaps(kind="weibull", shape=0.6))
    assert (
        overhead_full(bursts, 2 * HOUR).total
        < 0.9 * overhead_full(job(mtbf=4 * HOUR), 2 * HOUR).total
    )


def test_a_job_that_never_ends() -> None:
    assert overhead_full(job(mtbf=0.05 * HOUR), 2 * HOUR).total == math.inf


@pytest.mark.parametrize(
    ("changes", "hours"),
    [
        # √(2 · save · MTBF) = 2.31 where saves are short; less where they are not.
        ({}, 2.22),
        ({"save": 1 * MINUTE}, 0.955),
        ({"mtbf": 2 * HOUR, "save": 15 * MINUTE}, 0.835),
        ({"duration": 1 * HOUR}, 1.0),  # never beyond the end of the job
    ],
)
def test_the_optimal_interval(changes: dict[str, Any], hours: float) -> None:
    assert optimal_full_interval(job(**changes)) / HOUR == pytest.approx(hours, rel=0.02)


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
    if found:
        # A shard that has just come back loses less: the average stays below the target.
        assert overhead_partial(job(**changes), found).pls <= 1.05 * pls


def test_the_papers_production_case() -> None:
    """50 h, 5 failures of 4 of 18 shards."""
    case = job(duration=50 * HOUR, mtbf=10 * HOUR, shards=18, failing_together=4)
    found = [interval_for_pls(case, pls) / HOUR for pls in (0.025, 0.05, 0.1)]
    assert found == pytest.approx([2.25, 4.5, 9.0])


@pytest.mark.parametrize(
    ("changes", "pls", "pays", "words"),
    [
        ({}, 0.1, True, "1.20% of the job against 8.99%"),
        ({}, 0.02, True, "of the job against 8.99%"),
        ({}, 0.0, False, "a PLS of 0 lets no update be lost"),
        # Twenty times as many failures, half of the shards each time: as in the paper, refused.
        ({"mtbf": 1.4 * HOUR, "failing_together": 4}, 0.02, False, "every 6.7 min"),
        ({"mtbf": 1.4 * HOUR, "failing_together": 1}, 0.1, True, "partial recovery costs"),
        ({"shards": 1}, 0.001, False, "takes the only shard"),
        ({"duration": 0.05 * HOUR}, 0.1, True, "partial recovery costs"),
        # What is left of the target pays for saves; as an average it would not have to.
        ({"mtbf": 2.8 * HOUR}, 0.01, True, "29.20% of the job against 35.10%"),
    ],
)
def test_whether_partial_recovery_pays(
    changes: dict[str, Any], pls: float, pays: bool, words: str
) -> None:
    verdict = partial_pays(job(**changes), pls)
    assert verdict.pays is pays
    assert words in verdict.reason
    assert verdict.pays == (verdict.partial.total < verdict.full.total)


def test_prioritised_versions_count_in_the_verdict() -> None:
    """Seven eighths of a model more for each whole version: here it makes partial recovery dearer
    than full recovery."""
    case = job(mtbf=2.8 * HOUR)
    plain, ranked = partial_pays(case, 0.01), partial_pays(case, 0.01, prioritised=7 / 8)
    assert plain.pays
    assert not ranked.pays
    assert ranked.partial.save == pytest.approx(1.85 * plain.partial.save, rel=0.05)


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


@settings(deadline=None, max_examples=25)
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
    assert overhead_full(some, best).total <= overhead_full(some, best * factor).total * (1 + 1e-3)

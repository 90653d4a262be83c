"""Simulated jobs: what can be counted by hand, what must hold whatever is drawn, and that estimates
predict their mean."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.checkpoint.failure_gaps import Gaps
from emberkeep.checkpoint.overheads import Job
from emberkeep.kernels import job_events
from emberkeep.planning import job_simulator
from emberkeep.planning.advisor import Question, ranked
from emberkeep.planning.candidates import candidates
from emberkeep.planning.job_simulator import Tactic, drawn_gaps, drawn_strikes, simulate

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
JOB = Job(
    duration=10 * HOUR, mtbf=5 * HOUR, shards=4, save=0.5 * HOUR, load=0.25 * HOUR,
    reschedule=0.25 * HOUR,
)  # fmt: skip
GAPS = [
    Gaps(),
    Gaps(kind="gamma", shape=0.6),
    Gaps(kind="weibull", shape=0.65),
    Gaps(kind="log-normal", shape=1.2),
    Gaps(kind="recorded", recorded=(1.0, 5.0, 0.5, 9.0, 2.0, 2.5)),
]


def one_job(mode: int, times: list[float], counts: list[int] | None = None, **given: Any) -> Any:
    """A job of 10 h on 4 shards with versions every 2 h that take 0.5 h; restarts take 0.5 h."""
    settings: dict[str, Any] = {
        "interval": 2.0, "save": 0.5, "rounds": 1, "prioritised_save": 0.0, "restart": 0.5,
        "most_pls": math.inf, "least_interval": 0.0, "together": 1, "speed": 1.0, "spare": 0,
        "stall": 0.25, "rebuild": 1.0, "rebuild_speed": 0.5, **given,
    }  # fmt: skip
    at = np.array([[*times, 1e9]])
    shards = np.array([[*(counts or [1] * len(times)), 1]], np.int64)
    out = np.zeros((1, job_events.COLUMNS))
    short = job_events.run_jobs(
        at, shards, np.zeros_like(shards), mode, 10.0, 4, settings["interval"], settings["save"],
        settings["rounds"], settings["prioritised_save"], settings["restart"],
        settings["most_pls"], settings["least_interval"], settings["together"], settings["speed"],
        settings["spare"], settings["stall"], settings["rebuild"], settings["rebuild_speed"], out,
    )  # fmt: skip
    assert short == 0
    names = ["wall", "saving", "restarting", "again", "pls", "fulls", "recoveries", "versions"]
    return dict(zip(names, out[0], strict=True))


@pytest.mark.parametrize(
    ("mode", "times", "given", "expected"),
    [
        # Work until 2, 4.5, 7, 9.5: four versions of half an hour.
        (job_events.FULL, [], {}, {"wall": 12.0, "saving": 2.0, "versions": 4}),
        # An hour after the first version: that hour, and the restart.
        (job_events.FULL, [3.5], {}, {"wall": 13.5, "again": 1.0, "restarting": 0.5}),
        # In the first save: what it took is void, and two hours of work.
        (job_events.FULL, [2.2], {}, {"wall": 14.7, "saving": 2.2, "again": 2.0}),
        # In the recovery of another: it starts over.
        (job_events.FULL, [3.5, 3.8], {}, {"wall": 13.8, "restarting": 0.8, "recoveries": 2}),
        # Partial: time is lost for the restart alone, and an hour of a quarter of the samples.
        (job_events.PARTIAL, [3.5], {}, {"wall": 12.5, "again": 0.0, "pls": 0.025}),
        # The same shard again, half an hour later: it had been brought back in between.
        (job_events.PARTIAL, [3.5, 4.25], {}, {"pls": 0.025 + 0.25 * 0.25 / 10, "recoveries": 2}),
        # Two shards.
        (job_events.PARTIAL, [3.5], {"counts": [2]}, {"pls": 0.05}),
        # All of them: nobody is left to go on.
        (job_events.PARTIAL, [3.5], {"counts": [4]}, {"pls": 0.0, "fulls": 1, "again": 1.0}),
        # Beyond the bound: fully.
        (job_events.PARTIAL, [3.5], {"most_pls": 0.02, "least_interval": 2.0},
         {"pls": 0.0, "fulls": 1, "again": 1.0}),
        # A version is due before a failure could lose that much: after 0.8 h each time.
        (job_events.PARTIAL, [], {"most_pls": 0.02}, {"versions": 12, "pls": 0.0}),
        # With half of it lost, every 0.4 h from there on.
        (job_events.PARTIAL, [0.4], {"most_pls": 0.02, "save": 0.0},
         {"versions": 24, "pls": 0.01}),
        # A save that is struck is made again, as soon as the job goes on.
        (job_events.PARTIAL, [2.2], {}, {"wall": 12.7, "saving": 2.2, "pls": 0.05}),
        # Prioritised versions in between: three for each whole one.
        (job_events.PARTIAL, [], {"rounds": 4, "prioritised_save": 0.1}, {"versions": 4 + 15}),
        # Parity: a stall, then half speed for an hour.
        (job_events.PARITY, [3.5], {"spare": 1}, {"wall": 12.75, "again": 0.0, "fulls": 0}),
        # Two shards are more than it can bring back.
        (job_events.PARITY, [3.5], {"spare": 1, "counts": [2]}, {"again": 1.0, "fulls": 1}),
        # One, and another while the first is rebuilt.
        (job_events.PARITY, [3.5, 4.0], {"spare": 1}, {"fulls": 1, "recoveries": 2}),
        # One, and another after it was.
        (job_events.PARITY, [3.5, 5.5], {"spare": 1}, {"fulls": 0, "recoveries": 2}),
        (job_events.FULL, [], {"speed": 0.5}, {"wall": 22.0}),
    ],
)  # fmt: skip
def test_jobs_that_are_counted_by_hand(
    mode: int, times: list[float], given: dict[str, Any], expected: dict[str, float]
) -> None:
    found = one_job(mode, times, **given)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    # Nothing passes that is not accounted for.
    if mode != job_events.PARITY and "speed" not in given:
        spent = 10 + found["saving"] + found["restarting"] + found["again"]
        assert found["wall"] == pytest.approx(spent)


@pytest.mark.parametrize("gaps", GAPS, ids=lambda gaps: gaps.kind)
def test_gaps_have_the_mean_and_the_survival_that_estimates_use(gaps: Gaps) -> None:
    drawn = drawn_gaps(gaps, 4000, 40, np.random.default_rng(1))
    assert drawn[:, 1:].mean() == pytest.approx(1.0, rel=0.04)
    for means in (0.2, 0.7, 1.5, 3.0):
        longer = (drawn[:, 1:] > means).mean()
        assert longer == pytest.approx(float(gaps.survival(np.array(means))), abs=0.02)
        # The gap in which a job starts.
        first = (drawn[:, 0] > means).mean()
        assert first == pytest.approx(float(gaps.tail(np.array(means))), abs=0.03)


@pytest.mark.parametrize("gaps", GAPS, ids=lambda gaps: gaps.kind)
def test_failures_are_as_many_as_the_time_that_passes(gaps: Gaps) -> None:
    job = replace(JOB, duration=200 * HOUR, save=0.05 * HOUR, gaps=gaps)
    found = simulate(job, Tactic(mode="partial", interval=4 * HOUR), jobs=600)
    expected = (1 + found.overhead) * (job.duration / job.mtbf)
    assert found.failures.mean() == pytest.approx(expected.mean(), rel=0.06)


def test_the_same_seed_strikes_every_tactic_alike() -> None:
    few, many = (drawn_strikes(JOB, 5, columns, seed=7) for columns in (8, 32))
    np.testing.assert_array_equal(few.times_JF, many.times_JF[:, :8])
    np.testing.assert_array_equal(few.firsts_JF, many.firsts_JF[:, :8])
    assert not np.array_equal(few.times_JF, drawn_strikes(JOB, 5, 8, seed=8).times_JF)
    recorded = drawn_strikes(JOB, 50, 8, seed=0, together=(1, 1, 9))
    assert set(recorded.counts_JF.ravel().tolist()) == {1, 4}


def test_a_job_that_gets_nowhere_is_infinitely_long() -> None:
    job = replace(JOB, mtbf=0.05 * HOUR)
    found = simulate(job, Tactic(mode="full", interval=4 * HOUR), jobs=2)
    assert found.mean == math.inf


def test_the_bound_holds_in_every_job() -> None:
    job = replace(JOB, duration=200 * HOUR, save=2 * MINUTE)
    tactic = Tactic(mode="partial", interval=4 * HOUR, most_pls=0.05, least_interval=1 * HOUR)
    found = simulate(job, tactic)
    assert found.pls.max() <= 0.05 + 1e-12
    assert simulate(job, replace(tactic, most_pls=math.inf)).pls.max() > 0.06


# 20 of the 200 points of benchmarks/planning.py: MTBF in hours, target PLS, save in minutes.
POINTS = [
    (Gaps(), 1, 2.8, 0.02, 0.5), (Gaps(), 1, 2.8, 0.1, 5.7), (Gaps(), 1, 2.8, 0.005, 2.0),
    (Gaps(), 1, 7.0, 0.05, 2.0), (Gaps(), 1, 7.0, 0.2, 15.0), (Gaps(), 1, 14.0, 0.005, 5.7),
    (Gaps(), 1, 14.0, 0.1, 0.5), (Gaps(), 1, 28.0, 0.02, 15.0), (Gaps(), 1, 28.0, 0.1, 5.7),
    (Gaps(), 1, 56.0, 0.05, 2.0), (Gaps(), 1, 56.0, 0.2, 15.0), (Gaps(), 1, 28.0, 0.2, 0.5),
    (GAPS[2], 2, 2.8, 0.05, 0.5), (GAPS[2], 2, 7.0, 0.005, 5.7), (GAPS[2], 2, 7.0, 0.1, 2.0),
    (GAPS[2], 2, 14.0, 0.02, 2.0), (GAPS[2], 2, 28.0, 0.05, 5.7), (GAPS[2], 2, 28.0, 0.2, 15.0),
    (GAPS[2], 2, 56.0, 0.1, 0.5), (GAPS[2], 2, 56.0, 0.005, 2.0),
]  # fmt: skip


@pytest.mark.long
def test_estimates_predict_the_mean_of_simulated_jobs_and_recommend_well() -> None:
    """In points of job time, or in percent where overheads are large; the whole grid is in
    benchmarks/planning.py."""
    points, percents, regrets = [], [], []
    for gaps, together, mtbf, pls, save in POINTS:
        job = Job(
            duration=56 * HOUR, mtbf=mtbf * HOUR, shards=8, failing_together=together,
            save=save * MINUTE, load=2.5 * MINUTE, reschedule=2.5 * MINUTE, gaps=gaps,
        )  # fmt: skip
        question = Question(job=job, pls=pls, parity_slowdown=0.026)
        found = {c.name: c for c in candidates(question.wish())}
        means = {}
        for name in ("full", "partial", "cpr", "cpr_ssu", "parity"):
            tactic = found[name].tactic
            assert tactic is not None
            means[name] = simulate(job, tactic).mean
            error = abs(found[name].overhead.total - means[name])
            if means[name] < 0.1:
                points.append(100 * error)
            else:
                percents.append(error / means[name])
        chosen = ranked(question, found)
        best = min(means[name] for name in chosen if name in means)
        regrets.append(100 * (means[chosen[0]] - best))
    assert np.mean(points) <= 0.5
    assert np.mean(percents) <= 0.05
    assert np.mean(np.array(regrets) <= 1.0) >= 0.95


@pytest.mark.parametrize(("mtbf", "pls"), [(8, 0.02), (8, 0.1), (15, 0.02), (60, 0.02)])
def test_estimates_hold_where_failures_are_hardly_rarer_than_saves(mtbf: float, pls: float) -> None:
    """Estimates had a failure that strikes in a full recovery take the same work back again: up to
    three times of what such a job costs, and full recovery was preferred."""
    job = Job(
        duration=56 * HOUR, mtbf=mtbf * MINUTE, shards=8, save=2.7 * MINUTE,
        load=2.5 * MINUTE, reschedule=2.5 * MINUTE,
    )  # fmt: skip
    found = {c.name: c for c in candidates(Question(job=job, pls=pls).wish())}
    for name in ("full", "cpr", "cpr_ssu"):
        tactic = found[name].tactic
        assert tactic is not None
        simulated = simulate(job, tactic, jobs=40)
        assert found[name].overhead.total == pytest.approx(simulated.mean, rel=0.16), name


def test_a_loss_of_every_shard_is_a_full_recovery_in_estimates_too() -> None:
    """Estimates had partial recovery go on without a single shard: 3.6% instead of 12%."""
    for together, counts in ((8, ()), (3, (1, 1, 1, 8)), (5, (8, 8, 2))):
        job = Job(
            duration=56 * HOUR, mtbf=14 * HOUR, shards=8, failing_together=together,
            save=5 * MINUTE, load=2 * MINUTE,
        )  # fmt: skip
        question = Question(job=job, pls=0.1, together=counts)
        found = {c.name: c for c in candidates(question.wish())}
        for name in ("partial", "cpr", "cpr_ssu"):
            tactic = found[name].tactic
            assert tactic is not None
            simulated = simulate(job, tactic, jobs=4000, together=counts)
            assert found[name].overhead.total == pytest.approx(simulated.mean, rel=0.04), name
        assert (ranked(question, found)[0] == "full") is (together == 8)


def test_prioritised_versions_are_saved_before_the_first_whole_one_too() -> None:
    """An interval as long as the job has no whole version, and seven others."""
    job = Job(
        duration=5 * HOUR, mtbf=500 * HOUR, shards=8, save=10 * MINUTE, load=2 * MINUTE
    )  # fmt: skip
    found = {c.name: c for c in candidates(Question(job=job, pls=0.5).wish())}
    ssu = found["cpr_ssu"]
    assert ssu.tactic is not None
    assert ssu.overhead.total == pytest.approx(simulate(job, ssu.tactic).mean, rel=0.05)
    assert ssu.overhead.total > found["cpr"].overhead.total + 0.025


def test_many_failures_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job with a failure a second gigabytes were drawn, and the process was killed."""
    drawn = list[int]()
    real = drawn_strikes

    def counted(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        drawn.append(found.times_JF.size)
        return found

    monkeypatch.setattr(job_simulator, "drawn_strikes", counted)
    monkeypatch.setattr(job_simulator, "_AT_ONCE", 1000)
    job = replace(JOB, mtbf=0.2 * HOUR, save=1 * MINUTE, load=1 * MINUTE, reschedule=0 * HOUR)
    found = simulate(job, Tactic(mode="full", interval=0.1 * HOUR), jobs=50)
    assert max(drawn) <= 1000
    assert np.isfinite(found.overhead).all()
    assert np.unique(found.overhead).size > 40
    hopeless = replace(JOB, mtbf=timedelta(seconds=1))
    assert simulate(hopeless, Tactic(mode="full", interval=HOUR), jobs=2).mean == math.inf

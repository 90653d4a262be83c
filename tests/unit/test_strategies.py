"""Strategies and schedules: pure decisions, as tables of cases."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch import nn

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Job, SaveSettings, VersionSpec
from emberkeep.checkpoint.codec_choice import choose
from emberkeep.checkpoint.recovery import Recovery
from emberkeep.checkpoint.run_plan import Target
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.codecs import Quantized
from emberkeep.errors import ConfigError
from emberkeep.repository import KeepAll, KeepEvery, KeepFor, KeepLast, KeepNamed
from emberkeep.rows.priority import Priority
from emberkeep.strategies import Every, Strategy, auto, cpr, partial, retention, schedule, tiered

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


@pytest.mark.parametrize("keep", [0, -1, "some", True, 2.5, None, [3], KeepLast])
def test_what_cannot_be_kept_is_refused(keep: Any) -> None:
    with pytest.raises(ConfigError):
        retention(keep)
    with pytest.raises(ConfigError):
        retention(keep, keep_for="3d")


JOB = Job(
    duration=timedelta(days=5), mtbf=timedelta(days=2), shards=4, save=timedelta(seconds=1),
    load=timedelta(minutes=1),
)  # fmt: skip


def test_the_width_follows_from_the_failures_of_the_job() -> None:
    assert JOB.expected_restores == 3  # 2.5 failures
    chosen = choose(ek.check_n_run(job=JOB).spec, 0)
    assert chosen.codecs["weight"].to_dict()["bits"] == 3
    assert "3 expected restores" in chosen.why
    often = replace(JOB, mtbf=timedelta(hours=6))
    assert choose(ek.check_n_run(job=often).spec, 0).codecs["weight"].to_dict()["bits"] == 4
    assert "4 restores, 3 were expected: 8 bits" in choose(ek.check_n_run(job=JOB).spec, 4).why


def test_bins_and_ratio_of_the_search_are_those_given_where_there_is_a_search() -> None:
    spec = ek.check_n_run(expected_restores=3, bins=9, range_ratio=0.4).spec
    assert choose(spec, 0).codecs["weight"] == Quantized(bits=3, bins=9, ratio=0.4)
    assert choose(spec, 4).codecs["weight"] == Quantized(bits=8)


def test_tables_have_widths_of_their_own() -> None:
    spec = ek.incremental(bits={"users": 2, "items": 8}, expected_restores=1).spec
    assert choose(spec, 1).codecs == {
        "users/weight": Quantized(bits=2), "items/weight": Quantized(bits=8)
    }  # fmt: skip
    assert choose(spec, 2).codecs["users/weight"] == Quantized(bits=8)


@pytest.mark.parametrize(
    "strategy",
    [
        ek.parity,
        lambda **given: partial(every=5, **given),
        lambda **given: partial(pls=0.1, job=job(), **given),
        lambda **given: partial(pls=0.001, job=job(), **given),  # full recovery
    ],
)
def test_every_recovery_takes_what_says_how_rows_are_stored(strategy: Any) -> None:
    chosen = {"bits": {"t": 4}, "bins": 7, "range_ratio": 0.5, "quantize_optimizer": True}
    spec = strategy(predictor="paper", **chosen).spec
    assert spec == ek.incremental(predictor="paper", **chosen).spec
    assert (spec.bins, spec.range_ratio, spec.predictor) == (7, 0.5, "paper")


def test_what_is_kept_by_age() -> None:
    two_weeks = KeepFor(age=timedelta(days=14))
    assert retention(3, keep_for="14d") == (KeepLast(n=3) | two_weeks) | KeepNamed()
    assert retention(3, drop_after="14d") == (KeepLast(n=3) & two_weeks) | KeepNamed()
    assert retention("all", drop_after=timedelta(days=14)) == (KeepAll() & two_weeks) | KeepNamed()


@pytest.mark.parametrize("budget", ["500 steps", 500, "some"])
def test_the_budget_of_a_restore_is_a_time(budget: Any) -> None:
    with pytest.raises(ConfigError, match=r"restore_budget=.* is no duration"):
        ek.all_versions(restore_budget=budget)


def test_a_wrong_remote_is_called_by_its_name() -> None:
    with pytest.raises(ConfigError, match="remote='rarely' is no interval"):
        tiered(remote="rarely")


@pytest.mark.parametrize(
    "wrong", [{"steps": 2.5}, {"steps": True}, {"time": 5}, {"steps": 2, "parts": 1.5}]
)
def test_a_schedule_of_other_types_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="a schedule takes whole numbers"):
        Every(**wrong)


def test_presets() -> None:
    plain = ek.incremental()
    assert plain.spec.layout == "intermittent"
    assert not plain.spec.lossy
    assert plain.schedule == Every(time=timedelta(minutes=30))
    assert plain.retention == KeepLast(n=3) | KeepNamed()
    paper = ek.check_n_run()
    assert paper.spec.predictor == "paper"
    assert choose(paper.spec, 0).codecs["weight"].to_dict()["bits"] == 2
    assert choose(paper.spec, 2).codecs["weight"].to_dict()["bits"] == 8
    assert paper.retention == KeepLast(n=1) & KeepFor(age=timedelta(days=14)) | KeepNamed()
    assert choose(ek.check_n_run(bits=4).spec, 9).codecs["weight"].to_dict()["bits"] == 4
    assert ek.check_n_run(
        every=10, expected_restores=20, keep=3, drop_after=None
    ) == ek.incremental(every=10, expected_restores=20, predictor="paper")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"bits": 4, "expected_restores": 3}, "not both"),
        ({"bits": 5}, "bits"),
        ({"layout": "spiral"}, "layout must be one of"),
        ({"expected_restores": -1}, "0 or more"),
        ({"bits": "4"}, "bits must be 2, 3, 4 or 8"),
        ({"bits": {"users": 5}}, "bits must be 2, 3, 4 or 8"),
        ({"bits": 4, "accuracy_budget": 1e-4}, "leave out accuracy_budget="),
        ({"bits": {"users": 4}, "accuracy_budget": 1e-4}, "measures the width of every table"),
        ({"accuracy_budget": 2}, "share of the validation loss"),
        ({"accuracy_budget": 1e-4, "quantize_optimizer": True}, "leave out quantize_optimizer="),
        ({"bins": 25}, "bins= and range_ratio= are for weights of 4, 3 or 2 bits"),
        ({"bits": 8, "range_ratio": 0.5}, "bins= and range_ratio= are for"),
        ({"bits": 4, "bins": 0}, "bins must be"),
        ({"bits": 4, "range_ratio": 2.0}, "ratio must be"),
        ({"predictor": "oracle"}, "predictor must be one of growth, paper"),
        ({"predictor": "paper", "layout": "full"}, "when an intermittent layout starts over"),
        ({"job": JOB, "expected_restores": 2}, "job= expects 3 restores"),
        ({"keep_for": "some"}, "keep_for='some' is no age"),
        ({"drop_after": "0d"}, "an age is above 0"),
        ({"keep_for": "30d", "drop_after": "14d"}, "leave out one of them, or drop later"),
        ({"every": 0}, "1 step or more"),
        ({"keep": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(wrong: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ek.incremental(**wrong)


def job(**more: Any) -> Job:
    given: dict[str, Any] = {
        "duration": timedelta(hours=56), "mtbf": timedelta(hours=28), "shards": 8,
        "save": timedelta(minutes=5.7), "load": timedelta(minutes=2.5),
        "reschedule": timedelta(minutes=2.5),
    }  # fmt: skip
    return Job(**{**given, **more})


def test_partial_recovery_saves_as_often_as_its_target_needs() -> None:
    strategy = partial(pls=0.1, job=job(), priority=None)
    assert strategy.schedule.time == timedelta(hours=44.8)
    assert strategy.recovery is not None
    assert strategy.recovery.scope == "partial"
    assert "1.20% of the job against 8.99%" in strategy.recovery.reason
    ranked = partial(pls=0.1, job=job(), priority="ssu")
    assert ranked.schedule == Every(time=timedelta(hours=44.8), parts=8)
    assert ranked.schedule.due(1, timedelta(hours=5.6))
    assert ranked.spec.priority == Priority(kind="ssu", fraction=1 / 8)
    assert cpr is partial


def test_partial_recovery_that_does_not_pay_is_full_recovery_and_says_why() -> None:
    strategy = partial(pls=0.001, job=job())
    assert strategy.recovery is not None
    assert strategy.recovery.scope == "full"
    assert "with full recovery" in strategy.recovery.reason
    assert strategy.spec.priority is None
    assert strategy.schedule.time is not None
    assert timedelta(hours=2) < strategy.schedule.time < timedelta(hours=3)


def test_prioritised_versions_divide_the_interval_and_multiply_what_is_kept() -> None:
    strategy = partial(every=800, priority="ssu", fraction=1 / 4, keep=2)
    assert strategy.schedule == Every(steps=800, parts=4)
    assert strategy.schedule.steps_ahead(0, timedelta(0), None) == 200
    assert strategy.retention == retention(8)
    short = partial(every=3, priority="ssu", keep=2)
    assert [s for s in range(1, 8) if short.schedule.due(s, timedelta(0))] == [*range(1, 8)]
    assert [s for s in range(1, 8) if short.schedule.due_whole(s)] == [3, 6]
    assert short.retention == retention(6)
    assert partial(every="2h", priority=None, keep="all").retention == KeepAll()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partial(), "give one of the two"),
        (lambda: partial(every=5, job=job()), "give one of the two"),
        (lambda: partial(every=5, priority="ssu", fraction=0.9), "fraction"),
        (lambda: partial(every=5, priority="ssu", period=0), "period must be 1 or more"),
        (lambda: partial(every=5, pls=0.1, accuracy_loss=0.1, slope=1.0), "not both"),
        (lambda: partial(every=5, slope=1.0), "give accuracy_loss too"),
        (lambda: auto(target="little"), "is no target: write 'accuracy loss 0.01%'"),
        (lambda: auto(target="PLS 2"), "between 0 and 1"),
        (lambda: auto(mtbf="often"), "mtbf='often' is no duration"),
        (lambda: auto(mtbf=timedelta(0)), "mtbf must be longer"),
        (lambda: partial(every=5, most_pls=2.0), "between 0 and 1"),
        (lambda: Strategy(spec=VersionSpec(priority=Priority())), "need partial recovery"),
        (
            lambda: Strategy(spec=VersionSpec(priority=Priority()), recovery=Recovery()),
            "need partial recovery",
        ),
    ],
)
def test_recoveries_that_cannot_be_combined_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("steps", [1, 3, 8, 20, 100])
def test_whole_versions_come_as_often_as_was_asked(steps: int) -> None:
    """Prioritised ones in between are spread evenly, and never change when whole ones come."""
    plan = partial(every=steps, priority="ssu").schedule
    due = [step for step in range(1, 4 * steps + 1) if plan.due(step, timedelta(0))]
    whole = [step for step in due if plan.due_whole(step)]
    assert whole == [steps, 2 * steps, 3 * steps, 4 * steps]
    assert len(due) == 4 * plan.saves == 4 * min(8, steps)
    step, met = 0, []
    while step < 4 * steps:  # asked only as often as it says
        step += plan.steps_ahead(step, timedelta(0), None)
        met.append(step)
    assert met == due


def test_priority_is_what_is_asked_for_in_every_place() -> None:
    """One default: none, in Python, in TOML and in what `emberkeep plan` recommends."""
    from emberkeep.planning.advisor import Question, advise
    from emberkeep.train.checkpoint_settings import CheckpointSettings

    assert partial(every=5).spec.priority is None
    settings = CheckpointSettings(path="r", every="5 steps", recovery="partial")
    assert settings.strategy() == partial(every=5)
    assert advise(Question(job=job())).recommended == "cpr"


def test_prioritised_versions_that_do_not_pay_are_left_out() -> None:
    """Full recovery 35%, partial 29%, with prioritised versions 51%."""
    often = job(mtbf=timedelta(hours=2.8))
    strategy = partial(pls=0.01, job=often, priority="ssu")
    assert strategy.recovery is not None
    assert strategy.recovery.scope == "partial"
    assert strategy.spec.priority is None
    assert "prioritised versions do not pay: they would cost 50.51%" in strategy.recovery.reason
    kept = partial(pls=0.1, job=often, priority="ssu")
    assert kept.spec.priority is not None


def test_the_target_is_kept() -> None:
    recovery = partial(pls=0.05, job=job()).recovery
    assert recovery is not None
    assert recovery.most_pls == 0.05
    by_accuracy = partial(accuracy_loss=0.0005, slope=0.01, job=job(failing_together=2)).recovery
    assert by_accuracy is not None
    assert (by_accuracy.most_pls, by_accuracy.together) == (0.05, 2)
    average = partial(pls=0.05, job=job(), most_pls=1.0)
    assert average.recovery is not None
    assert (average.recovery.most_pls, average.least) == (1.0, None)
    assert partial(every=16, pls=0.05).least == Every(steps=2)
    assert partial(every="8h", pls=0.05).least == Every(time=timedelta(hours=1))
    without = partial(every=16).recovery
    assert without is not None
    assert without.most_pls == 1.0


def test_the_first_version_is_not_later_than_any_may_be() -> None:
    assert auto(max_interval="1min").schedule.time == timedelta(minutes=1)
    assert auto(first="30s", max_interval="1min").schedule.time == timedelta(seconds=30)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: auto(first="x"), "first='x' is no interval"),
        (lambda: auto(first=0), "first= must be 1 step or more"),
        (lambda: auto(first=500, max_interval="1h"), "first= counts steps and max_interval= time"),
        (lambda: auto(mtbf=28), "mtbf=28 is no duration"),
        (lambda: auto(max_interval=5), "max_interval=5 is no duration"),
        (lambda: auto(target=None), "target=None is no target"),
        (lambda: auto(slope=0.02), "a target such as 'accuracy loss 0.01%'"),
    ],
)
def test_plans_that_cannot_be_made_are_refused_by_name(make: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert words in str(refused.value)


def test_a_run_that_plans_itself_starts_with_full_recovery() -> None:
    strategy = auto(target="accuracy loss 0.01%", mtbf="28h", reschedule="5min")
    assert strategy.auto is not None
    assert strategy.auto.accuracy_loss == pytest.approx(0.0001)
    assert strategy.auto.most_pls == pytest.approx(0.005)
    assert strategy.auto.mtbf == timedelta(hours=28)
    assert strategy.recovery is not None
    assert strategy.recovery.scope == "full"
    assert auto(target="pls 0.2").auto == Target(pls=0.2)
    assert auto().auto == Target(pls=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expected_restores": 2.5}, "expected_restores must be a whole number, not 2.5"),
        ({"expected_restores": math.nan}, "expected_restores must be a whole number, not nan"),
        ({"expected_restores": "3"}, "expected_restores must be a whole number, not '3'"),
        ({"accuracy_budget": "1e-4"}, "accuracy_budget must be a number, not '1e-4'"),
        ({"quantize_optimizer": "yes"}, "quantize_optimizer must be true or false, not 'yes'"),
        ({"predictor": None}, "predictor must be one of growth, paper, not None"),
        ({"bits": {"u": 8}, "bins": 25}, "are for weights of 4, 3 or 2 bits"),
        ({"bits": {}, "range_ratio": 0.5}, "are for weights of 4, 3 or 2 bits"),
        ({"bits": 4, "range_ratio": 1.5}, "range_ratio must be a number from 0 to 1, not 1.5"),
        ({"job": 5}, "job= takes an emberkeep.Job, not 5"),
    ],
)  # fmt: skip
def test_values_of_a_wrong_type_or_without_effect_are_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ek.incremental(**given)


def test_a_search_for_ranges_goes_with_widths_that_have_one() -> None:
    assert ek.incremental(bits={"u": 8, "v": 4}, bins=25).spec.bins == 25
    measured = ek.incremental(accuracy_budget=1e-4, bins=25).spec
    eight = Widths(tables={"u": Width(bits=8)})
    assert replace(measured, widths=eight).bins == 25  # which was not known before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mirror_mb_per_second": -1}, "mirror_mb_per_second must be above 0, not -1"),
        ({"most_mb_per_second": "50"}, "most_mb_per_second must be a number, not '50'"),
        ({"background_share": "0.1"}, "background_share must be a number, not '0.1'"),
        ({"read_depth": 1.5}, "read_depth must be a whole number, not 1.5"),
        ({"read_depth": "16"}, "read_depth must be a whole number, not '16'"),
        ({"threads": 1.5}, "threads must be a whole number, not 1.5"),
        ({"nice": 2.5}, "nice must be a whole number, not 2.5"),
        ({"nice": "x"}, "nice must be a whole number, not 'x'"),
        ({"grace": 5}, "grace must be a timedelta or a duration such as '90s' or '5min', not 5"),
        ({"grace": timedelta(seconds=-5)}, "grace must not be negative"),
        ({"overlap": "often"}, "overlap must be one of wait, cancel, not 'often'"),
    ],
)  # fmt: skip
def test_settings_of_a_wrong_type_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SaveSettings(**given)


def test_a_grace_may_be_a_text() -> None:
    assert SaveSettings(grace="90s").grace == timedelta(seconds=90)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="grace must be a timedelta"):
        ek.Keeper(MemoryStore(), nn.Linear(1, 1), [], grace=5)  # type: ignore[arg-type]


def test_a_job_has_times_and_whole_shards() -> None:
    times: dict[str, Any] = dict.fromkeys(("duration", "mtbf", "save", "load"), "5min")
    assert ek.Job(**times, shards=2).duration == timedelta(minutes=5)
    with pytest.raises(ConfigError, match="load must be a timedelta"):
        ek.Job(**{**times, "load": 5}, shards=2)
    with pytest.raises(ConfigError, match="shards must be a whole number"):
        ek.Job(**times, shards=1.5)  # type: ignore[arg-type]

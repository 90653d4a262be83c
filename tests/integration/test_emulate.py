"""The emulator on a tiny task: real training, real kills, time as if it were a job of days."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from emberkeep.checkpoint import Job
from emberkeep.cli import app
from emberkeep.errors import ConfigError
from emberkeep.planning import emulator, sweeps
from emberkeep.planning.emulator import (
    Emulation,
    Name,
    Outcome,
    Task,
    emulate,
    named,
    run,
    run_all,
    small_task,
)

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
TINY = [
    "data.samples=6000", "data.rows_total=1000", "run.batch_size=100", "tables.dim=4",
    "model.bottom=[8]", "model.top=[8]",
]  # fmt: skip
JOB = Job(
    duration=56 * HOUR,
    mtbf=28 * HOUR,
    shards=4,
    save=5.7 * MINUTE,
    load=2.5 * MINUTE,
    reschedule=2.5 * MINUTE,
)
# In step 20 and step 40 of 54, one after a version that full recovery takes every second step.
SPEC = Emulation(settings=small_task(TINY), job=JOB, times=(20.7 * HOUR, 41.5 * HOUR))
NAMES: tuple[Name, ...] = ("full", "partial", "cpr", "cpr_ssu")


_outcomes: dict[str, Outcome] = {}


def ran(task: Task) -> Outcome:
    """Of runs that several tests look at, one: a soak test shows that they are all the same."""
    if repr(task) not in _outcomes:
        _outcomes[repr(task)] = run(task)
    return _outcomes[repr(task)]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own are for those who wait; soak tests have them."""

    def in_turn(tasks: Sequence[Task], *, progress: emulator.Progress) -> list[Outcome]:
        outcomes = [ran(task) for task in tasks]
        progress(len(tasks), len(tasks))
        return outcomes

    monkeypatch.setattr(emulator, "run_all", in_turn)
    monkeypatch.setattr(sweeps, "run_all", in_turn)


def test_strategies_under_the_same_failures() -> None:
    found = emulate(SPEC, NAMES)
    assert list(found.outcomes) == list(NAMES)
    full = found.outcomes["full"]
    # Full recovery loses time and nothing else: the model is the same, to the bit.
    assert (full.auc, full.log_loss) == (found.alone.auc, found.alone.log_loss)
    assert full.pls == 0.0
    assert full.steps_again > 0
    assert full.overhead.lost == full.steps_again / full.steps
    for name in NAMES[1:]:
        outcome = found.outcomes[name]
        assert outcome.steps_again == 0
        assert outcome.overhead.lost == 0.0
        assert outcome.pls > 0
        assert outcome.log_loss != found.alone.log_loss
        assert outcome.overhead.load == pytest.approx(2 * 2.5 / 60 / 56)
    assert found.outcomes["cpr"].pls == pytest.approx(found.outcomes["cpr_ssu"].pls, rel=0.15)
    assert found.outcomes["partial"].pls < found.outcomes["cpr"].pls
    assert found.outcomes["cpr"].overhead.total < found.outcomes["partial"].overhead.total
    assert found.outcomes["cpr_ssu"].versions > found.outcomes["cpr"].versions
    document = found.to_dict()
    assert set(document["strategies"]["cpr"]) >= {"overhead", "auc", "pls", "interval_hours"}
    assert len(document["failures"]) == 2


@pytest.mark.soak
def test_an_emulation_is_the_same_every_time() -> None:
    task = Task(spec=SPEC, strategy="cpr_mfu")
    first, again = run(task), run(task)
    assert replace(first, seconds=0.0) == replace(again, seconds=0.0)


def test_partial_recovery_that_does_not_pay_is_full() -> None:
    job = replace(JOB, mtbf=5.6 * HOUR, failing_together=2, save=HOUR)
    refused = run(Task(spec=replace(SPEC, job=job, pls=0.002), strategy="cpr"))
    assert refused.pls == 0.0
    assert refused.steps_again > 0
    assert "recovered fully: PLS 0.002 asks for a version every" in refused.note
    forced = run(Task(spec=replace(SPEC, job=job, pls=0.002, force=True), strategy="cpr"))
    assert forced.steps_again == 0
    assert forced.overhead.save > refused.overhead.save


def test_a_shard_that_was_never_saved_starts_over() -> None:
    early = replace(SPEC, times=(30 * HOUR,), pls=0.2)
    assert run(Task(spec=early, strategy="cpr")).started_over
    assert not run(Task(spec=replace(SPEC, times=(2 * HOUR,)), strategy="cpr")).started_over


def test_a_sweep_over_targets() -> None:
    points, alone = sweeps.over_targets(SPEC, ["cpr"])
    assert [point.target_pls for point in points] == list(sweeps.TARGETS)
    overheads = [point.outcome.overhead.total for point in points]
    assert overheads == sorted(overheads, reverse=True)
    assert points[0].auc_loss == alone.auc - points[0].outcome.auc


@pytest.mark.soak
def test_a_sweep_over_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "COUNTS", (2, 40))
    monkeypatch.setattr(sweeps, "FRACTIONS", (1 / 2,))
    points, _ = sweeps.over_failures(replace(SPEC, times=None))
    assert [(point.failures, point.fraction) for point in points] == [(2, 0.5), (40, 0.5)]
    assert [point.refused for point in points] == [False, True]
    assert points[0].outcome.overhead.total < points[0].full_overhead


@pytest.mark.soak
def test_random_runs_go_through_the_same_failures() -> None:
    spec = replace(SPEC, times=None, settings=small_task(TINY))
    points = sweeps.over_random_runs(spec, ["cpr", "cpr_ssu"], runs=2, seeds=2)
    assert [point.seed for point in points] == [0, 1, 0, 1]
    for plain, listed in zip(points[:2], points[2:], strict=True):
        assert plain.outcome.pls == listed.outcome.pls > 0
        assert plain.failures == listed.failures


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pls": 3.0}, "a PLS lies between 0 and 1, not 3"),
        ({"count": -1}, "0 failures or more, not -1"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_what_cannot_be_emulated(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(SPEC, **changes)


def test_random_runs_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="1 random run or more, not 0"):
        sweeps.over_random_runs(SPEC, runs=0)


def test_names() -> None:
    assert named("CPR-SSU") == "cpr_ssu"
    with pytest.raises(ConfigError, match=r"strategies are full, partial, cpr, .*, not 'magic'"):
        named("magic")


def test_tasks_and_outcomes_go_from_process_to_process() -> None:
    task = Task(spec=SPEC, strategy="cpr")
    assert pickle.loads(pickle.dumps(task)) == task
    assert pickle.loads(pickle.dumps(ran(task))) == ran(task)


@pytest.mark.soak  # ten seconds, nearly all of it torch's own
def test_a_process_of_its_own_gives_the_same_outcome() -> None:
    task = Task(spec=SPEC, strategy="cpr")
    progress = list[tuple[int, int]]()
    (outcome,) = run_all([task], progress=lambda *done: progress.append(done))
    assert replace(outcome, seconds=0.0) == replace(run(task), seconds=0.0)
    assert progress == [(1, 1)]


def test_who_interrupts_while_processes_start_does_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C within the first seconds was heard when every run had ended."""
    made: list[Future[Outcome]] = []

    class Interrupted(ProcessPoolExecutor):
        def submit(self, *given: Any, **named: Any) -> Any:
            if made:
                raise KeyboardInterrupt
            made.append(super().submit(*given, **named))
            return made[0]

    monkeypatch.setattr(emulator, "ProcessPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([Task(spec=SPEC, strategy=None)] * 2)
    assert made[0].cancelled() or made[0].exception() is not None


def test_the_command(tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    sets = [part for setting in TINY for part in ("--set", setting)]
    done = CliRunner().invoke(
        app,
        [
            "emulate", "--json", "--shards", "4", "--strategy", "full", "--strategy", "cpr",
            "--report", str(report), *sets,
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert set(printed["strategies"]) == {"full", "cpr"}
    assert printed["strategies"]["full"]["auc"] == printed["alone"]["auc"]
    assert printed["strategies"]["cpr"]["pls"] > 0
    assert "written:" in done.stderr
    assert "<svg" in report.read_text()
    assert json.loads(report.with_suffix(".json").read_text()) == printed
    assert report.with_suffix(".csv").read_text().count("\n") == 3


@pytest.mark.soak
def test_a_number_of_failures_is_planned_for(tmp_path: Path) -> None:
    """20 failures planned for as if there were 2 lost five times the target."""
    done = CliRunner().invoke(
        app,
        [
            "emulate", "--json", "--shards", "8", "--strategy", "cpr", "--count", "20",
            "--report", str(tmp_path / "page.html"), *_sets(),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["failures"]) == 20
    assert 0 < found["strategies"]["cpr"]["pls"] <= 0.1
    assert found["strategies"]["cpr"]["interval_hours"] == pytest.approx(2 * 0.1 * 8 * 2.8)


def _sets() -> list[str]:
    return [part for setting in TINY for part in ("--set", setting)]


def _log(tmp_path: Path, hours: float) -> Path:
    gaps = np.random.default_rng(1).gamma(0.8, hours / 0.8, 300)
    path = tmp_path / "failures.csv"
    path.write_text("gap_hours\n" + "".join(f"{gap}\n" for gap in gaps))
    return path


def test_a_log_decides_how_often_jobs_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Emulation] = []

    def seen(tasks: Sequence[Task], *, progress: emulator.Progress) -> list[Outcome]:
        specs.extend(task.spec for task in tasks)
        raise KeyboardInterrupt

    monkeypatch.setattr(emulator, "run_all", seen)
    arguments = ["emulate", "--failures", str(_log(tmp_path, 5.0)), *_sets()]
    CliRunner().invoke(app, arguments)
    assert specs[0].job.mtbf / HOUR == pytest.approx(5.0, rel=0.2)
    assert len(specs[0].failures()) > 5
    refused = CliRunner().invoke(app, [*arguments, "--mtbf", "28h"])
    assert "give one of them" in refused.stderr


def test_cells_of_a_sweep_have_failures_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[Emulation] = []

    def seen(tasks: Sequence[Task], *, progress: emulator.Progress) -> list[Outcome]:
        specs.extend(task.spec for task in tasks)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps, "run_all", seen)
    log = str(_log(tmp_path, 5.0))
    for sweep in ("failures", "fraction"):
        specs.clear()
        CliRunner().invoke(app, ["emulate", "--sweep", sweep, "--failures", log, *_sets()])
        drawn = {spec.failures() for spec in specs}
        assert len(drawn) > 5
    specs.clear()
    CliRunner().invoke(app, ["emulate", "--sweep", "failures", "--failures", log, *_sets()])
    counts = [len(spec.failures()) for spec in specs if spec.job.failing_together == 1]
    assert min(counts) < 8 < 15 < max(counts)


def test_versions_are_written_as_the_config_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from emberkeep.train import loop

    seen: list[Any] = []

    def train(settings: Any, **_: Any) -> Any:
        seen.append(settings.checkpoint)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "run", train)
    given = small_task([*TINY, "checkpoint.bits=4", "checkpoint.layout=full",
                        "checkpoint.path=unused"])  # fmt: skip
    for strategy in ("full", "cpr"):
        with pytest.raises(KeyboardInterrupt):
            run(Task(spec=replace(SPEC, settings=given), strategy=named(strategy)))
    assert [(it.bits, it.layout) for it in seen] == [(4, "full")] * 2


@pytest.mark.soak
def test_the_target_is_kept_under_more_failures_than_planned_for() -> None:
    often = replace(SPEC, times=tuple(2.5 * HOUR * n for n in range(1, 22)), pls=0.05)
    found = run(Task(spec=often, strategy="cpr"))
    assert 0 < found.pls <= 0.05


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["servers", "ray"])
def test_real_servers_are_killed_on_the_clock_of_the_job(kind: str) -> None:
    """The same failures on real servers: full recovery ends with the same bits."""
    full = run(Task(spec=on_servers(kind), strategy="full"))
    local = run(Task(spec=SPEC, strategy="full"))
    assert (full.auc, full.log_loss) == (local.auc, local.log_loss)
    assert full.steps_again > 0
    _check_partial(kind)


@pytest.mark.soak
def test_servers_that_are_killed_lose_what_shards_of_this_process_do() -> None:
    _check_partial("servers")


def on_servers(kind: str) -> Any:
    given = small_task([*TINY, f"cluster.kind={kind}", "cluster.shards=4"])
    return replace(SPEC, settings=given)


def _check_partial(kind: str) -> None:
    """The same steps and the same PLS."""
    partial = run(Task(spec=on_servers(kind), strategy="cpr"))
    assert partial.steps_again == 0
    assert partial.pls == pytest.approx(run(Task(spec=SPEC, strategy="cpr")).pls, abs=0.01)
    assert partial.pls > 0

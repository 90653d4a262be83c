"""`emberkeep train` with versions: it resumes by itself, refuses what differs, tells the cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emberkeep.blobs import LocalStore
from emberkeep.cli import app
from emberkeep.errors import ConfigError, NoRepositoryError, StateError
from emberkeep.repository import Repository
from emberkeep.train.hooks import Hook, Step
from emberkeep.train.loop import run
from emberkeep.train.result import Result
from emberkeep.train.run_config import RunConfig, demo

PLAIN = [
    "data.samples=2000",
    "data.rows_total=1000",
    "run.batch_size=100",
    "run.compare=false",
    "model.bottom=[8]",
    "model.top=[8]",
    "tables.dim=4",
]
SMALL = [*PLAIN, "checkpoint.every=4 steps"]


def settings(path: Path, *overrides: str) -> RunConfig:
    return demo([*SMALL, f"checkpoint.path={path}", *overrides])


class Ends(RuntimeError):
    """What ends a run before its time."""


class Recorder(Hook):
    def __init__(self, end_at: int = 0) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.steps: list[int] = []
        self.end_at = end_at

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        self.events.append((event, details))

    def on_step(self, step: Step) -> None:
        self.steps.append(step.number)
        if step.number == self.end_at:
            raise Ends


def interrupted(given: RunConfig, end_at: int) -> Recorder:
    recorder = Recorder(end_at)
    with pytest.raises(Ends):
        run(given, hooks=[recorder])
    return recorder


def same(one: Result, other: Result) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("digest", "auc", "log_loss", "loss", "steps", "samples", "rows_trained")
    )


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "row_wise_adagrad", "adam"])
def test_a_run_that_was_stopped_twice_comes_to_the_same_result(
    tmp_path: Path, optimizer: str
) -> None:
    kind = f"optimizer.kind={optimizer}"
    whole = run(demo([*PLAIN, kind]))
    assert whole.checkpoints is None
    given = settings(tmp_path / "run", kind)
    first = interrupted(given, 7)
    assert first.events[0][0] == "saved"
    second = interrupted(given, 13)
    assert second.events[0] == ("resumed", {"version": 1, "step": 4, "lost": []})
    assert second.steps == [*range(5, 14)]
    last = Recorder()
    result = run(given, hooks=[last])
    assert last.steps == [*range(13, 19)]
    assert same(result, whole)
    assert result.resumed_step == 12
    assert result.checkpoints is not None
    assert result.checkpoints.versions == 2  # of step 16, and of the end
    again = Recorder()
    finished = run(given, hooks=[again])
    assert again.steps == []
    assert [name for name, _ in again.events] == ["resumed", "finished"]
    assert same(finished, whole)


def test_other_settings_are_refused_by_name_before_anything_is_opened(tmp_path: Path) -> None:
    interrupted(settings(tmp_path / "run"), 9)
    epochs = list((tmp_path / "run" / "writers").iterdir())
    with pytest.raises(StateError, match=r"optimizer\.lr was 0\.02, is 0\.5"):
        run(settings(tmp_path / "run", "optimizer.lr=0.5"))
    assert list((tmp_path / "run" / "writers").iterdir()) == epochs
    # How a run is saved is no part of what it computes.
    assert run(settings(tmp_path / "run", "checkpoint.every=5 steps")).resumed_step == 8


def test_a_run_that_must_exist_does_not_start_over(tmp_path: Path) -> None:
    given = settings(tmp_path / "run", "checkpoint.must_exist=true")
    for fresh in (False, True):
        with pytest.raises(NoRepositoryError, match="mounted"):
            run(given, fresh=fresh)
    assert not (tmp_path / "run").exists()
    interrupted(settings(tmp_path / "run"), 9)
    assert run(given).resumed_step == 8
    with pytest.raises(ConfigError, match="must_exist needs versions: set path"):
        demo([*SMALL, "checkpoint.must_exist=true"])


def test_a_fresh_start_begins_a_version_of_its_own(tmp_path: Path) -> None:
    whole = run(settings(tmp_path / "whole"))
    interrupted(settings(tmp_path / "run", "optimizer.lr=0.5"), 9)
    given = settings(tmp_path / "run")
    recorder = Recorder(2)
    with pytest.raises(Ends):
        run(given, hooks=[recorder], fresh=True)
    # Killed before its first regular version it still is the new run that goes on.
    result = run(given)
    assert result.resumed_step == 0
    assert same(result, whole)
    with pytest.raises(ConfigError, match=r"checkpoint\.path"):
        run(demo(SMALL), fresh=True)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("checkpoint.every=often", "every='often'"),
        ("checkpoint.bits=5", "bits"),
        ("checkpoint.keep=0", "keep"),
        ("checkpoint.layout=square", "layout"),
        ("checkpoint.expected_restores=-1", "expected_restores"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, override: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        settings(tmp_path, override)


def test_quantized_versions_end_in_an_exact_one(tmp_path: Path) -> None:
    given = settings(tmp_path / "run", "checkpoint.bits=4", "checkpoint.layout=consecutive")
    result = run(given)
    repository = Repository.open(LocalStore(tmp_path / "run"))
    newest = repository.manifest(repository.versions()[-1])
    assert newest.layout["codecs"] == {}
    assert run(given).digest == result.digest


def test_the_command_says_what_happened_and_what_it_cost(tmp_path: Path) -> None:
    arguments = [
        *("train", "--demo"),
        *(part for it in [*SMALL, f"checkpoint.path={tmp_path / 'run'}"] for part in ("--set", it)),
    ]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "5 versions were saved beside training" in first.stdout
    assert "kB were written" in first.stdout
    second = CliRunner().invoke(app, [*arguments, "--json"])
    assert "resumed from version 5, after step 18" in second.stderr
    assert "this training is finished" in second.stderr
    printed = json.loads(second.stdout)
    assert printed["checkpoints"]["versions"] == 0
    assert printed["checkpoints"]["kept_nbytes"] > 0
    assert printed["resumed_step"] == printed["steps"] == 18
    fresh = CliRunner().invoke(app, [*arguments, "--fresh"])
    assert "6 versions were saved" in fresh.stdout


def test_failures_under_parity_leave_no_trace() -> None:
    given = [line for line in SMALL if not line.startswith("checkpoint")]
    whole = run(demo([*given, "cluster.shards=4"]))
    hurt = run(
        demo([*given, "cluster.shards=4", "parity.k=2", "parity.r=2",
              'failures.at=["1, 3 at 5", "0 at 12 push"]'])
    )  # fmt: skip
    assert hurt.digest == whole.digest
    assert hurt.auc == whole.auc


def test_widths_are_measured_on_samples_that_come_next_and_nothing_is_changed(
    tmp_path: Path,
) -> None:
    plain = run(demo(PLAIN))
    given = settings(
        tmp_path / "run", "checkpoint.accuracy_budget=1e-3", "checkpoint.calibrate_at=6",
        "checkpoint.calibration_samples=300",
    )  # fmt: skip
    recorder = interrupted(given, 13)
    ((name, chosen),) = [event for event in recorder.events if event[0] == "calibrated"]
    assert name == "calibrated"
    assert all("%" in table["why"] for table in chosen["tables"].values())
    manifest = Repository.open(LocalStore(tmp_path / "run")).manifest(3)
    assert manifest.layout["widths"] == json.loads(json.dumps(chosen))
    assert manifest.layout["codecs"]
    again = Recorder()
    run(given, hooks=[again])
    assert "calibrated" not in [event for event, _ in again.events]  # the version says it
    # A run that is never restored has the bits of one that was never calibrated.
    whole = settings(tmp_path / "other", "checkpoint.accuracy_budget=1e-3")
    assert same(run(whole), plain)


def test_a_budget_that_comes_when_few_samples_are_left_ends_no_run(tmp_path: Path) -> None:
    interrupted(settings(tmp_path / "run"), 13)
    late = settings(
        tmp_path / "run", "checkpoint.accuracy_budget=1e-3", "checkpoint.calibrate_at=6"
    )
    recorder = Recorder()
    with pytest.warns(UserWarning, match="too few .* versions stay exact"):
        ended = run(late, hooks=[recorder])
    assert ended.resumed_step == 12
    assert same(ended, run(demo(PLAIN)))
    assert "calibrated" not in [event for event, _ in recorder.events]


@pytest.mark.parametrize("at", [17, 100_000])
def test_too_late_a_calibration_is_refused_before_anything_is_trained(
    tmp_path: Path, at: int
) -> None:
    given = settings(
        tmp_path / "run", "checkpoint.accuracy_budget=1e-3", f"checkpoint.calibrate_at={at}"
    )
    with pytest.raises(ConfigError, match=r"calibrate_at to an earlier step"):
        run(given)
    assert not (tmp_path / "run").exists()


def test_a_run_moves_to_another_disk_by_its_mirror(tmp_path: Path) -> None:
    mirror = f"checkpoint.mirror={tmp_path / 'mirror'}"
    whole = run(demo(PLAIN))
    interrupted(settings(tmp_path / "run", mirror), 9)
    result = run(settings(tmp_path / "other", mirror, "checkpoint.mirror_every=8 steps"))
    assert result.resumed_step is not None
    assert result.resumed_step > 0
    assert same(result, whole)
    assert result.checkpoints is not None
    assert result.checkpoints.mirror is not None
    assert result.checkpoints.mirror.step == 18
    with pytest.raises(StateError, match=r"mirror holds a run with other settings"):
        run(settings(tmp_path / "third", mirror, "optimizer.lr=0.5"))


def test_what_versions_cost_is_printed_one_by_one(tmp_path: Path) -> None:
    arguments = [f"--set={each}" for each in (*SMALL, f"checkpoint.path={tmp_path / 'run'}")]
    printed = CliRunner().invoke(app, ["train", "--demo", *arguments, "--json"])
    costs = json.loads(printed.stdout.splitlines()[-1])["checkpoints"]
    assert [cost["step"] for cost in costs["each"]] == [4, 8, 12, 16, 18]
    assert sum(cost["nbytes"] for cost in costs["each"]) == costs["written_nbytes"]
    assert sum(cost["core_seconds"] for cost in costs["each"]) == pytest.approx(
        costs["core_seconds"]
    )
    assert all(cost["core_seconds"] > 0 and cost["pause_ms"] > 0 for cost in costs["each"])
    held = sum(cost["held_ms"] for cost in costs["each"])
    assert held == pytest.approx(1e3 * costs["held_seconds"])
    assert costs["stall_seconds"] > costs["held_seconds"]
    printed = CliRunner().invoke(app, ["train", "--demo", *arguments, "--fresh"])
    assert "core-seconds were spent on them" in printed.stdout
    assert "of which pushes were held up" in printed.stdout


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["calibrate_at=3"], "calibrate_at is for accuracy_budget"),
        (["mirror_every=2h"], "mirror_every is for a mirror"),
        (["mirror=x", "layout=grid"], "a grid cannot be mirrored"),
        (["mirror=x", "mirror_every=often"], "every='often' is no interval"),
        (["mtbf=2d"], "belong together"),
        (["mtbf=2d", "job_duration=5d", "bits=4"], "leave them out"),
        (["mtbf=2x", "job_duration=5d"], "mtbf is a duration"),
        (["keep_for=long"], "keep_for='long' is no age"),
        (["most_mb_per_second=0"], "most_mb_per_second must be above 0"),
        (["background_share=0"], "background_share must be above 0"),
        (["read_depth=0"], "read_depth must be 1 or more"),
        (["recovery=partial", "accuracy_budget=1e-3"], "not for partial recovery"),
        (["predictor=paper", "layout=full"], "when an intermittent layout starts over"),
    ],
)
def test_settings_of_versions_that_cannot_work(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        demo(["checkpoint.path=x", *(f"checkpoint.{each}" for each in overrides)])


def test_settings_reach_the_strategy() -> None:
    given = demo([
        "checkpoint.path=x", "checkpoint.job_duration=5d", "checkpoint.mtbf=2d",
        "checkpoint.quantize_optimizer=true", "checkpoint.bins=30", "checkpoint.range_ratio=0.4",
        "checkpoint.predictor=paper", "checkpoint.drop_after=14d",
    ]).checkpoint.strategy()  # fmt: skip
    spec = given.spec
    assert (spec.expected_restores, spec.quantize_optimizer, spec.predictor) == (3, True, "paper")
    assert (spec.bins, spec.range_ratio) == (30, 0.4)
    assert "14" in str(given.retention)
    partial = demo([
        "checkpoint.path=x", "checkpoint.recovery=partial", "checkpoint.bits=4",
        "checkpoint.quantize_optimizer=true", "checkpoint.keep_for=2d",
    ]).checkpoint.strategy()  # fmt: skip
    assert (partial.spec.bits, partial.spec.quantize_optimizer) == (4, True)
    with pytest.raises(ConfigError, match="mirror needs versions"):
        demo(["checkpoint.mirror=x"])

"""What the emulated keeper takes of `[checkpoint]`, and what an emulation refuses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from emberkeep.checkpoint import Job
from emberkeep.errors import ConfigError
from emberkeep.planning.emulator import Emulation, Name, Task, run, small_task
from emberkeep.train import loop
from emberkeep.train.checkpoint_settings import CheckpointSettings

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
JOB = Job(
    duration=56 * HOUR, mtbf=28 * HOUR, shards=4, save=5.7 * MINUTE, load=2.5 * MINUTE,
    reschedule=2.5 * MINUTE,
)  # fmt: skip


class Seen(Exception):
    """The settings that a run would be trained with."""


def spec(*overrides: str) -> Emulation:
    tiny = ["data.samples=6000", "data.rows_total=1000", "run.batch_size=100"]
    given = small_task([*tiny, *(f"checkpoint.{each}" for each in overrides)])
    return Emulation(settings=given, job=JOB)


def kept(monkeypatch: pytest.MonkeyPatch, name: Name, *overrides: str) -> CheckpointSettings:
    def train(settings: Any, **_: Any) -> None:
        raise Seen(settings.checkpoint)

    monkeypatch.setattr(loop, "run", train)
    with pytest.raises(Seen) as seen:
        run(Task(spec=spec(*overrides), strategy=name))
    found: CheckpointSettings = seen.value.args[0]
    return found


@pytest.mark.parametrize("name", ["full", "partial", "cpr", "cpr_ssu"])
def test_versions_are_as_they_are_set(monkeypatch: pytest.MonkeyPatch, name: Name) -> None:
    found = kept(
        monkeypatch, name, "bits=4", "quantize_optimizer=true", "predictor=paper", "bins=7",
        "range_ratio=0.5",
    )  # fmt: skip
    assert (found.bits, found.quantize_optimizer, found.predictor) == (4, True, "paper")
    assert (found.bins, found.range_ratio) == (7, 0.5)


def test_bits_by_restores_are_of_full_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    by_job = ["job_duration=5d", "mtbf=2d", "bins=7"]
    full = kept(monkeypatch, "full", *by_job)
    assert (full.strategy().spec.expected_restores, full.bins) == (3, 7)
    partial = kept(monkeypatch, "cpr", *by_job)
    assert (partial.job_duration, partial.mtbf, partial.bins) == (None, None, None)
    assert not partial.strategy().spec.quantizes
    widths = kept(monkeypatch, "cpr", "expected_restores=3", "bins=7", "table_bits.C1=4", "path=r")
    assert (widths.bins, widths.table_bits) == (7, {"C1": 4})


def test_what_belongs_to_no_emulated_recovery_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = kept(monkeypatch, "full", "path=r", "recovery=auto", "mtbf=28h")
    assert (auto.recovery, auto.mtbf) == ("full", None)


def test_a_budget_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"accuracy_budget .* and set checkpoint\.bits or"):
        spec("path=r", "accuracy_budget=1e-4")
    assert spec("path=r", "accuracy_budget=1e-4", "accuracy_budget=").settings

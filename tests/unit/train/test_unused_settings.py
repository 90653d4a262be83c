"""Settings of versions are refused where a run starts that keeps none, and not before."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import ConfigError
from emberkeep.train import build
from emberkeep.train.checkpoint_settings import CheckpointSettings
from emberkeep.train.loop import check_start, run
from emberkeep.train.run_config import RunConfig, demo

SMALL = [
    "data.samples=600", "data.rows_total=300", "run.batch_size=100", "run.compare=false",
    "model.bottom=[8]", "model.top=[8]", "tables.dim=4",
]  # fmt: skip
SET = {
    "every": "20min",
    "layout": "consecutive",
    "predictor": "paper",
    "bits": 4,
    "expected_restores": 3,
    "quantize_optimizer": "true",
    "bins": 7,
    "range_ratio": 0.5,
    "keep": 5,
    "keep_for": "2d",
    "drop_after": "14d",
    "calibration_samples": 100,
    "fraction": 0.25,
    "period": 3,
}


def settings(*overrides: str) -> RunConfig:
    return demo([*SMALL, *overrides])


@pytest.mark.parametrize("key", SET)
@pytest.mark.parametrize("tiered", [False, True])
def test_a_setting_of_versions_is_refused_where_there_are_none(
    tmp_path: Path, key: str, tiered: bool
) -> None:
    tier = [f"tier.path={tmp_path}", "tier.every=20min"] if tiered else []
    given = settings(*tier, f"checkpoint.{key}={SET[key]}")
    with pytest.raises(ConfigError, match=rf"checkpoint\.{key}: .*; set checkpoint\.path, or"):
        check_start(given, fresh=False)


@pytest.mark.parametrize("key", SET)
def test_it_is_taken_with_a_path(key: str) -> None:
    needed = ["checkpoint.bits=2"] if key in ("bins", "range_ratio") else []
    check_start(settings("checkpoint.path=r", f"checkpoint.{key}={SET[key]}", *needed), fresh=False)


def test_all_of_them_are_named_before_anything_is_trained(tmp_path: Path) -> None:
    given = settings(
        f"tier.path={tmp_path}", "tier.every=20min", "checkpoint.bits=4",
        "checkpoint.quantize_optimizer=true",
    )  # fmt: skip
    message = r"checkpoint\.bits, checkpoint\.quantize_optimizer: .* keeps the run exactly"
    with pytest.raises(ConfigError, match=message):
        run(given)
    assert list(tmp_path.iterdir()) == []


def test_both_settings_of_expected_failures_are_refused() -> None:
    given = settings("checkpoint.job_duration=5d", "checkpoint.mtbf=36h")
    with pytest.raises(ConfigError, match=r"checkpoint\.job_duration, checkpoint\.mtbf: "):
        check_start(given, fresh=False)


def test_a_width_that_there_is_not_is_refused_without_a_path_too() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.bits: "):
        check_start(settings("checkpoint.bits=5"), fresh=False)


def test_metrics_are_of_a_run_that_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics_port .* set checkpoint\.path or tier\.every"):
        check_start(settings("checkpoint.metrics_port=0"), fresh=False)
    tier = [f"tier.path={tmp_path}", "tier.every=20min"]
    check_start(settings(*tier, "checkpoint.metrics_port=0"), fresh=False)


def test_what_is_as_usual_is_no_setting(tmp_path: Path) -> None:
    usual: dict[str, Any] = {known.name: known.default for known in fields(CheckpointSettings)}
    assert CheckpointSettings(**usual).without_effect() == []
    check_start(settings("checkpoint.keep=3", "checkpoint.layout=intermittent"), fresh=False)
    check_start(settings(f"tier.path={tmp_path}", "tier.every=20min"), fresh=False)


def test_a_command_that_has_its_own_place_reads_settings_without_a_path() -> None:
    assert settings("checkpoint.bits=4").checkpoint.bits == 4


def test_a_width_of_a_table_that_is_not_there_is_refused_by_its_key() -> None:
    given = settings("checkpoint.path=r", "checkpoint.table_bits.x=4")
    message = r"checkpoint\.table_bits names x; the tables are C1, C2, .*: name one of these, or"
    with pytest.raises(ConfigError, match=message):
        build.tables(given, build.feature_rows(given))
    known = settings("checkpoint.path=r", "checkpoint.table_bits.C1=4")
    assert build.tables(known, build.feature_rows(known))

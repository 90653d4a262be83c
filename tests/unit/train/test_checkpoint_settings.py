"""What is set in TOML arrives in the strategy, whatever recovery is set."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.errors import ConfigError
from emberkeep.strategies import incremental
from emberkeep.train.checkpoint_settings import CheckpointSettings

SETTINGS = {known.name for known in fields(CheckpointSettings)}
SPEC = {known.name for known in fields(VersionSpec)} & SETTINGS

# A value of each that is not the usual one, with what it needs.
UNUSUAL: dict[str, dict[str, Any]] = {
    "layout": {"layout": "consecutive"},
    "predictor": {"predictor": "paper"},
    "bits": {"bits": 4},
    "expected_restores": {"expected_restores": 3},
    "accuracy_budget": {"accuracy_budget": 1e-4},
    "quantize_optimizer": {"quantize_optimizer": True},
    "bins": {"bins": 7, "bits": 2},
    "range_ratio": {"range_ratio": 0.5, "bits": 2},
}
NOT_PARTIAL = {"expected_restores", "accuracy_budget"}


def spec_of(recovery: str | None, **chosen: Any) -> VersionSpec:
    settings = CheckpointSettings(path="versions", recovery=recovery, **chosen)  # type: ignore
    return settings.strategy().spec


def test_every_setting_of_a_version_is_tried() -> None:
    assert UNUSUAL.keys() | {"priority"} == SPEC


def test_what_a_call_takes_is_a_setting_too() -> None:
    calls = set(inspect.signature(incremental).parameters)
    assert calls & {known.name for known in fields(VersionSpec)} <= SETTINGS


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("recovery", [None, "full", "partial"])
def test_a_setting_arrives(recovery: str | None, name: str) -> None:
    if recovery == "partial" and name in NOT_PARTIAL:
        with pytest.raises(ConfigError, match=f"{name} is not for partial recovery"):
            spec_of(recovery, **UNUSUAL[name])
        return
    assert spec_of(recovery, **UNUSUAL[name]) == VersionSpec(**UNUSUAL[name])


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_run_that_plans_itself_takes_none_of_them(name: str) -> None:
    with pytest.raises(ConfigError, match=f"leave out .*{name}"):
        spec_of("auto", **{name: UNUSUAL[name][name]})


@pytest.mark.parametrize("priority", [None, "mfu"])
def test_a_priority_is_that_of_partial_recovery(priority: str | None) -> None:
    made = spec_of("partial", priority=priority, bits=4).priority
    assert (None if made is None else made.kind) == priority

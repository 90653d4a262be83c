"""What is set in TOML arrives in the strategy, whatever recovery is set."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.config import parse, to_toml
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


@pytest.mark.parametrize("recovery", [None, "full", "partial"])
def test_tables_have_widths_of_their_own(recovery: str | None) -> None:
    given = {"user": 4, "item": 8}
    expected = {"user": Width(bits=4), "item": Width(bits=8)}
    assert spec_of(recovery, table_bits=given).widths == Widths(tables=expected)
    assert incremental(bits=given).spec.widths == Widths(tables=expected)


def test_widths_of_tables_are_read_and_written() -> None:
    text = 'path = "versions"\ntable_bits = {user = 4}'
    read = parse(CheckpointSettings, text, source="x", overrides=["table_bits.item=8"])
    assert read.table_bits == {"user": 4, "item": 8}
    assert parse(CheckpointSettings, to_toml(read), source="y") == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 4}, "bits= is the width of every table"),
        ({"accuracy_budget": 1e-4}, "accuracy_budget measures the width of every table"),
        ({"recovery": "auto"}, "leave out .*table_bits"),
        ({"table_bits": {"user": 5}}, "bits must be 2, 3, 4 or 8, not 5"),
        ({"path": None}, "table_bits needs versions"),
    ],
)
def test_widths_of_tables_that_cannot_be_had(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckpointSettings(**{"path": "versions", "table_bits": {"user": 4}, **given})

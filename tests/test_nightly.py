"""The nightly run draws examples that nobody has seen before, and says how to repeat them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings

from tests import nightly


def config_with(**options: str) -> Any:
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    return SimpleNamespace(getoption=given.get, option=SimpleNamespace())


def test_nights_differ_and_days_do_not() -> None:
    day, night = settings.get_profile("emberkeep"), settings.get_profile("nightly")
    assert day.derandomize
    assert not night.derandomize
    assert night.print_blob
    assert (night.deadline, night.suppress_health_check) == (None, day.suppress_health_check)


def test_one_seed_is_drawn_for_all_processes_of_a_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBERKEEP_NIGHTLY_SEED", raising=False)
    drawn = []
    for _ in range(2):  # the second has the environment of the first, as a worker of xdist does
        config = config_with(hypothesis_profile="nightly")
        nightly.pytest_configure(config)
        drawn.append(config.option.hypothesis_seed)
    assert drawn == [os.environ["EMBERKEEP_NIGHTLY_SEED"]] * 2
    monkeypatch.delenv("EMBERKEEP_NIGHTLY_SEED")
    config = config_with(hypothesis_profile="nightly")
    nightly.pytest_configure(config)
    assert config.option.hypothesis_seed != drawn[0]


@pytest.mark.parametrize(
    "options", [{}, {"hypothesis_profile": "nightly", "hypothesis_seed": "1234"}]
)
def test_a_given_seed_and_a_day_are_left_alone(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMBERKEEP_NIGHTLY_SEED", raising=False)
    config = config_with(**options)
    nightly.pytest_configure(config)
    assert not hasattr(config.option, "hypothesis_seed")
    assert "EMBERKEEP_NIGHTLY_SEED" not in os.environ


@pytest.mark.parametrize("seed", ["1234", None])
def test_the_seed_is_printed(seed: str | None) -> None:
    lines: list[str] = []
    config = config_with(**({} if seed is None else {"hypothesis_seed": seed}))
    config.pluginmanager = SimpleNamespace(
        get_plugin=lambda _: SimpleNamespace(write_line=lines.append)
    )
    nightly.pytest_sessionstart(SimpleNamespace(config=config))  # type: ignore[arg-type]
    assert bool(lines) == (seed is not None)
    assert all("hypothesis seed: 1234" in line for line in lines)

"""A search for ranges is refused where the width is known to be 8 bits, which has none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.checkpoint.widths import Width, Widths
from emberkeep.errors import ConfigError
from emberkeep.train.checkpoint_settings import CheckpointSettings


def job(failures: int) -> ek.Job:
    return ek.Job(
        duration=timedelta(hours=failures), mtbf=timedelta(hours=1), shards=8,
        save=timedelta(minutes=1), load=timedelta(minutes=1),
    )  # fmt: skip


@pytest.mark.parametrize("search", [{"bins": 10}, {"range_ratio": 0.5}])
def test_restores_that_need_8_bits_have_no_search(search: dict[str, Any]) -> None:
    message = "50 expected restores need 8: leave them out, or give bits="
    with pytest.raises(ConfigError, match=message):
        ek.incremental(expected_restores=50, **search)
    with pytest.raises(ConfigError, match=message):
        ek.incremental(job=job(50), **search)
    with pytest.raises(ConfigError, match=message):
        CheckpointSettings(path="r", expected_restores=50, **search)


@pytest.mark.parametrize("expected", [0, 1, 3, 20])
def test_fewer_restores_have_one(expected: int) -> None:
    assert ek.incremental(expected_restores=expected, bins=10).spec.bins == 10


def test_widths_of_tables_and_budgets_have_one_however_many_restores() -> None:
    four = Widths(tables={"user": Width(bits=4)})
    assert VersionSpec(widths=four, expected_restores=50, bins=10).bins == 10
    assert ek.incremental(accuracy_budget=1e-4, expected_restores=50, bins=10).spec.bins == 10


def test_a_job_and_bits_are_refused_in_words_that_the_caller_used() -> None:
    with pytest.raises(ConfigError, match="job= expects 2 restores") as refused:
        ek.incremental(job=job(2), bits=4)
    assert "leave out bits=, or job=" in str(refused.value)
    assert "expected_restores" not in str(refused.value)
    assert ek.incremental(job=job(2), bits={"user": 4}).spec.expected_restores == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep_for": "2d", "drop_after": "1d"}, "keep_for='2d' keeps .*drop_after='1d' lets go"),
        ({"drop_after": "0d"}, "drop_after='0d': an age is above 0"),
        ({"bits": 8, "bins": 9}, "weights of 4, 3 or 2 bits, not 8: give such bits="),
    ],
)
def test_messages_name_what_was_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ek.incremental(every=10, **given)

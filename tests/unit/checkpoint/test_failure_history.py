"""How often a run fails, from what it has seen."""

from __future__ import annotations

import itertools
import json
import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from emberkeep.checkpoint.failure_history import FailureHistory
from emberkeep.errors import DamageError

HOUR = timedelta(hours=1)


def after(gaps: list[float], believed: float = 10.0) -> FailureHistory:
    history = FailureHistory.expected(believed * HOUR)
    for gap in gaps:
        history = history.passed(gap * HOUR).failed(1)
    return history


def hours(time: timedelta) -> float:
    return time / HOUR


def test_belief_counts_as_one_failure_and_is_not_trusted_alone() -> None:
    believed = FailureHistory.expected(10 * HOUR)
    assert hours(believed.mtbf) == pytest.approx(10)
    assert hours(believed.cautious_mtbf) == pytest.approx(10 / 1.5)
    assert hours(believed.passed(90 * HOUR).mtbf) == pytest.approx(100)
    assert hours(FailureHistory.expected(None).mtbf) == pytest.approx(24)
    assert hours(FailureHistory.known(10 * HOUR).cautious_mtbf) == pytest.approx(10, rel=1e-3)


def test_caution_becomes_less_with_every_failure() -> None:
    few, many = after([10.0] * 3), after([10.0] * 40)
    caution = [hours(h.mtbf) / hours(h.cautious_mtbf) for h in (few, many)]
    assert caution[0] > 1.2
    assert 1.05 < caution[1] < 1.15


def test_the_rate_is_found_wherever_belief_was() -> None:
    for seed, believed in itertools.product(range(2, 6), (2.5, 10.0, 40.0)):
        gaps = np.random.default_rng(seed).exponential(10.0, 60).tolist()
        assert hours(after(gaps, believed).mtbf) == pytest.approx(np.mean(gaps), rel=0.2)


def test_a_change_is_noticed_after_a_few_failures() -> None:
    steady = [10.0] * 20
    assert hours(after(steady).mtbf) == pytest.approx(10)
    found = [hours(after([*steady, *[1.0] * count]).mtbf) for count in range(8)]
    assert found == sorted(found, reverse=True)
    assert found[5] < 5  # the mean of all 25 gaps is above 8
    assert found[7] < 3
    cautious = [hours(after([*steady, *[1.0] * count]).cautious_mtbf) for count in range(8)]
    assert cautious[3] < 6.2
    # One short gap among long ones is no change.
    assert hours(after([*steady, 1.0, *[10.0] * 3]).mtbf) > 9


def test_a_long_quiet_is_news() -> None:
    often = after([2.5] * 20)
    assert hours(often.mtbf) == pytest.approx(2.5, rel=0.2)
    assert hours(often.passed(20 * HOUR).mtbf) > 5
    assert hours(often.passed(2000 * HOUR).mtbf) > 500


@pytest.mark.parametrize("gaps", [[0.0] * 200, [1e9] * 200, [1e-9, 1e9] * 50, [1e6] + [0.0] * 50])
def test_no_gap_is_too_short_or_too_long(gaps: list[float]) -> None:
    history = after(gaps)
    for later in (history, history.passed(1e9 * HOUR)):
        assert timedelta(0) < later.cautious_mtbf <= later.mtbf
    assert len(history.stretches) <= 12
    assert sum(stretch.weight for stretch in history.stretches) == pytest.approx(1)


def test_it_is_plain_data() -> None:
    history = after([3.0, 8.0, 1.0]).passed(2 * HOUR).failed(None).passed(HOUR)
    document = json.loads(json.dumps(history.to_dict()))
    assert FailureHistory.from_dict(document) == history


@pytest.mark.parametrize(
    "damage", [{"stretches": []}, {"stretches": [[1.0, -1.0, 1.0]]}, {"stretches": [[1.0]]},
               {"stretches": "x"}, {"other": 1}, {"since": math.nan}, {"since": -1.0},
               {"believed": 0.0}, {"believed": "x"}, {"shards": math.inf},
               {"stretches": [[math.nan, 1.0, 1.0]]}, {"stretches": [[0.0, 1.0, 1.0]]}]
)  # fmt: skip
def test_damage_is_named(damage: dict[str, Any]) -> None:
    document = {**FailureHistory.expected(HOUR).to_dict(), **damage}
    with pytest.raises(DamageError, match="the counters of a version are damaged"):
        FailureHistory.from_dict(document)


def test_what_is_rarer_than_any_time_can_be_said() -> None:
    history = FailureHistory.expected(timedelta.max).passed(1000 * HOUR)
    assert history.mtbf >= history.cautious_mtbf > timedelta(days=100_000_000)

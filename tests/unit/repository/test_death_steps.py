"""In which steps deaths are recorded."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep.repository.grid.death_steps import COST_NBYTES, steps_of, worth_moving


def cost(birth: int, deaths: list[int], recorded: list[int], row_nbytes: int) -> int:
    """What all versions read in vain: rows after their deaths, and pieces."""
    rows = sum(row_nbytes * (late - death) for death, late in zip(deaths, recorded, strict=True))
    return rows + sum(COST_NBYTES * (late - birth) for late in set(recorded))


@settings(deadline=None, max_examples=80)
@given(
    deaths=st.lists(st.integers(5, 14), min_size=1, max_size=12),
    birth=st.integers(0, 5),
    row_nbytes=st.sampled_from([1, 100, 1000, 4096, 2**20]),
)
def test_no_other_steps_cost_less(deaths: list[int], birth: int, row_nbytes: int) -> None:
    steps = steps_of(birth, [(np.array(deaths, np.int32), row_nbytes)])
    recorded = steps.record(np.array(deaths, np.int32)).tolist()
    assert all(late >= death for death, late in zip(deaths, recorded, strict=True))
    assert set(recorded) <= set(deaths)
    assert steps.vain_nbytes == cost(birth, deaths, recorded, row_nbytes)
    assert steps.single_nbytes == cost(birth, deaths, [max(deaths)] * len(deaths), row_nbytes)
    values = sorted(set(deaths))
    for ends in itertools.product([False, True], repeat=len(values) - 1):
        last = [v for v, end in zip(values, (*ends, True), strict=True) if end]
        other = [min(end for end in last if end >= death) for death in deaths]
        assert steps.vain_nbytes <= cost(birth, deaths, other, row_nbytes)


@settings(deadline=None, max_examples=40)
@given(
    deaths=st.lists(st.integers(0, 3000), max_size=400),
    more=st.lists(st.integers(0, 3000), max_size=40),
    row_nbytes=st.sampled_from([4, 512, 4096]),
)
def test_deaths_are_recorded_in_few_steps_and_never_too_early(
    deaths: list[int], more: list[int], row_nbytes: int
) -> None:
    parts = [(np.array(each, np.int32), row_nbytes) for each in (deaths, more)]
    steps = steps_of(0, parts)
    found = [steps.record(each) for each, _ in parts]
    for (given_, _), late in zip(parts, found, strict=True):
        assert ((late == 0) == (given_ == 0)).all()
        assert (late >= given_).all()
    nbytes = row_nbytes * sum(death > 0 for death in (*deaths, *more))
    most = 2 + math.sqrt(nbytes / COST_NBYTES * math.log(3000))
    assert np.unique(np.concatenate(found)).size <= 1 + most


@pytest.mark.parametrize(
    ("deaths", "worth"),
    [
        ([], False),
        ([7] * 1000, False),
        ([2] * 500 + [3] * 500, False),  # to move them takes more than it saves
        ([2] * 900 + [90] * 100, True),
        ([80, 90], False),  # a second piece costs all versions more
    ],
)
def test_what_has_ended_is_moved_only_where_that_saves(deaths: list[int], worth: bool) -> None:
    assert worth_moving(1, np.array(deaths, np.int32), 512) is worth

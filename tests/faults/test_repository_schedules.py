"""Two and three processes on one repository under every schedule: see `interleavings`."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from emberkeep.blobs import Buffer, MemoryStore
from emberkeep.errors import UnsupportedStoreError
from emberkeep.repository import Repository
from tests.faults import interleavings
from tests.faults.interleavings import Pair
from tests.nightly import examples, some

BESIDE_THE_WRITER = [
    pair
    for pair in interleavings.pairs()
    if pair[1][0] in interleavings.WRITER
    # What these meet is the gc of a writer, however that has saved before.
    and (pair[1][0] is interleavings.collects or pair[1][1] not in interleavings.READERS)
]
GRID_BESIDE_THE_WRITER = [p for p in interleavings.pairs() if p[1][0] in interleavings.GRID_WRITER]

# The longest: by day, who opens meets a chain, and who takes over and keeps meets a whole version.
BY_NIGHT = {"saves-opens", "saves_chained-takes_over_and_keeps"}


def name(pair: Any) -> str:
    return "-".join(action.__name__ for action in pair[1])


class Overwriting(MemoryStore):
    """Creates whatever is there already, as stores without conditional puts do."""

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        self.put(name, data)
        return True


def test_a_store_that_cannot_decide_between_two_writers_is_refused() -> None:
    with pytest.raises(UnsupportedStoreError, match="exclusive=True"):
        Repository.create(Overwriting(), schema={})
    assert Repository.create(Overwriting(), schema={}, exclusive=True)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair,
            id=name(pair),
            marks=[pytest.mark.soak] if at % 2 or name(pair) in BY_NIGHT else [],
        )
        for at, pair in enumerate(BESIDE_THE_WRITER)
    ],
)
def test_processes_that_stop_right_before_they_change_something(pair: Pair) -> None:
    # A successor's opening changes little and decides all: there one stop more.
    cases = interleavings.changes_of(pair, 3 if interleavings.opens in pair[1] else 2)
    for case in some(list(cases)):
        interleavings.checked(case)


@pytest.mark.parametrize("pair", GRID_BESIDE_THE_WRITER, ids=name)
def test_grids_under_schedules_of_two_preemptions(pair: Pair) -> None:
    for case in random.Random(8).sample(list(interleavings.schedules_of(pair)), examples(8)):
        interleavings.checked(case)


def test_two_preemptions_three_processes_and_single_faults() -> None:
    """A sample by seed of all that the soak tries."""
    counts = interleavings.run(20260726, examples(160))
    print(dict(counts))
    assert min(counts[fault.name] for fault in interleavings.FAULTS) >= 1


def test_calls_that_are_made_at_once_take_effect_in_any_order() -> None:
    """The same sample on stores behind a network, where calls do not wait for each other."""
    counts = interleavings.run(20261118, examples(120), at_once=True)
    assert min(counts[fault.name] for fault in interleavings.FAULTS) >= 1


@pytest.mark.soak
@pytest.mark.parametrize("pair", interleavings.pairs(), ids=name)
def test_every_schedule_and_every_single_fault(pair: Pair) -> None:
    print(name(pair), dict(interleavings.run_all([pair])))


@pytest.mark.soak
def test_many_samples_of_two_and_three_processes() -> None:
    """`EMBERKEEP_SEED` starts elsewhere."""
    print(dict(interleavings.run(int(os.environ.get("EMBERKEEP_SEED", 1)), 50_000)))

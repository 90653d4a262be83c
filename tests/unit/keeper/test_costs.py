"""What versions cost: one by one and in all, also when a save ends before its cut has returned."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

import emberkeep as ek
from emberkeep.blobs import MemoryStore
from emberkeep.keeper.costs import Costs, Ledger
from emberkeep.keeper.mirror import MirrorStatus
from emberkeep.testing.virtual_clock import VirtualClock


class Training:
    """Steps that take as long as they are said to."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.ledger = Ledger(self.clock)
        self.ledger.step = 0

    def steps(self, *milliseconds: float) -> None:
        for each in milliseconds:
            self.clock.advance(timedelta(milliseconds=each))
            self.ledger.step += 1

    def saved(
        self, version: int, core_seconds: float | None = 0.5, *, held_seconds: float = 0.0
    ) -> None:
        details = {
            "version": version, "step": self.ledger.step, "kind": "full", "nbytes": 100,
            "pause_ms": 1.0, "commit_ms": 70.0, "core_seconds": core_seconds, "whole": True,
            "held_seconds": held_seconds,
        }  # fmt: skip
        self.ledger.hear("saved", details)

    def cut(self) -> None:
        self.ledger.cutting()
        self.ledger.paused(3.0)


def test_the_stall_is_what_steps_beside_a_save_take_longer() -> None:
    run = Training()
    run.steps(10, 10, 11, 10, 9, 10)
    run.cut()
    run.steps(40, 15, 15)
    run.saved(1)
    run.steps(12, 10, 10)  # the commit came within the first of these
    run.cut()
    run.saved(2, core_seconds=None)
    run.steps(10, 10)
    (first, second) = run.ledger.costs(0).each
    assert first.slowdown_ms == pytest.approx(40 + 15 + 15 + 12 - 4 * 10)
    assert second.slowdown_ms == pytest.approx(0, abs=1e-6)
    assert (first.pause_ms, first.core_seconds, second.core_seconds) == (3.0, 0.5, None)
    costs = run.ledger.costs(7)
    assert costs.slowdown_seconds == pytest.approx(0.042)
    assert costs.core_seconds == 0.5
    assert (costs.versions, costs.written_nbytes, costs.kept_nbytes) == (2, 200, 7)


def test_pushes_that_wait_for_copies_are_part_of_the_time_that_training_stood_still() -> None:
    run = Training()
    with run.ledger.stalling():
        run.clock.advance(timedelta(milliseconds=4))
        run.cut()
    run.saved(1, held_seconds=0.25)
    run.cut()
    run.saved(2, held_seconds=0.5)
    costs = run.ledger.costs(0)
    assert [cost.held_ms for cost in costs.each] == [250, 500]
    assert (costs.held_seconds, costs.pause_seconds) == (0.75, 0.006)
    assert costs.stall_seconds == pytest.approx(0.754)
    assert run.ledger.counters()["stall_seconds"] == 0.754
    page = run.ledger.exposition()
    assert "emberkeep_held_seconds_total 0.75\n" in page
    assert "emberkeep_stall_seconds_total 0.754\n" in page


def test_too_few_steps_say_nothing() -> None:
    run = Training()
    run.steps(10, 10)
    run.cut()
    run.steps(50)
    run.saved(1)
    run.steps(10)
    costs = run.ledger.costs(0)
    assert (costs.each[0].slowdown_ms, costs.slowdown_seconds) == (None, None)


def test_a_save_that_ends_before_its_cut_returns_has_its_pause() -> None:
    run = Training()
    run.steps(*[10] * 6)
    run.ledger.cutting()
    run.saved(1)
    run.ledger.paused(5.0)
    run.steps(17, 10)
    (cost,) = run.ledger.costs(0).each
    assert cost.pause_ms == 5.0
    assert cost.slowdown_ms == pytest.approx(7)


@pytest.mark.parametrize("event", ["save_failed", "save_cancelled"])
def test_steps_beside_a_save_that_failed_are_of_no_version(event: str) -> None:
    run = Training()
    run.steps(*[10] * 6)
    run.cut()
    run.steps(90)
    run.ledger.hear(event, {"step": 7, "error": "x"})
    run.steps(90)
    run.steps(*[10] * 3)
    run.cut()
    run.saved(1)
    run.steps(10)
    (cost,) = run.ledger.costs(0).each
    assert cost.slowdown_ms == pytest.approx(0, abs=1e-6)


def test_steps_that_are_taken_again_are_not_measured_across_the_gap() -> None:
    run = Training()
    run.steps(*[10] * 6)
    run.clock.advance(timedelta(seconds=60))
    run.ledger.step = 2  # resumed
    run.steps(10)
    run.cut()
    run.saved(1)
    run.steps(10)
    assert run.ledger.costs(0).each[0].slowdown_ms == pytest.approx(0, abs=1e-6)


def test_costs_come_through_json() -> None:
    run = Training()
    run.cut()
    run.saved(1)
    mirror = MirrorStatus(
        url="memory://", step=3, copied=1, copied_nbytes=5, failed=0, failing_since=None, error=None
    )
    costs = run.ledger.costs(3, mirror)
    document: dict[str, Any] = json.loads(json.dumps(costs.to_dict()))
    assert Costs.from_dict(document) == costs


def test_the_first_version_is_no_part_of_bringing_rows_back() -> None:
    """`resume` of a new run writes one where shards may be lost."""
    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=64, dim=4)], optimizer=ek.SGD(lr=0.1), cluster=ek.local(shards=2)
    )
    strategy = ek.partial(every=50)
    with ek.Keeper(
        MemoryStore(), bags, bags.optimizer, strategy=strategy, total_steps=99
    ) as keeper:
        assert keeper.resume() is None
        costs = keeper.costs()
        assert costs.versions == 1
        assert costs.stall_seconds >= costs.pause_seconds > 0

"""Counts of superseded records are those that a list of all of them would give."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkeep._types import I64
from emberkeep.cluster.local.local_cluster import LocalCluster, local
from emberkeep.tables import Adagrad, Table, Tier
from emberkeep.tiers import durable_open, upkeep
from emberkeep.tiers.superseded import Superseded
from emberkeep.tiers.tiered_slab import TieredSlab
from tests.contracts.engine import grads_of, state, wanted_of
from tests.unit.tiers.test_tiered_slab import Unsynced, root

__all__ = ["root"]


class Listed:
    """The rule in so many words: each record with its successor's stamp, until that is
    committed."""

    def __init__(self) -> None:
        self.pending: list[tuple[int, int]] = []

    def note(self, segments: I64, stamps: I64) -> None:
        self.pending += zip(segments.tolist(), stamps.tolist(), strict=True)

    def decide(self, committed: int) -> list[int]:
        dead = [segment for segment, stamp in self.pending if stamp <= committed]
        self.pending = [entry for entry in self.pending if entry[1] > committed]
        return dead

    def undecided(self, segments: int) -> list[int]:
        return np.bincount([segment for segment, _ in self.pending], minlength=segments).tolist()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 5), st.booleans()),
        st.just("begin"),
        st.just("commit"),
        st.just("segment"),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_what_dies_is_what_has_a_committed_successor(events: list[object]) -> None:
    """A batch that is given up is one that is never committed: another begins."""
    counted, listed, segments = Superseded(6), Listed(), 6
    now, started, committed = 1, 0, 0
    for event in events:
        if event == "begin":
            started = now
            counted.begin_batch(now)
        elif event == "commit" and started > committed:
            committed = started
            dead = np.bincount(listed.decide(committed), minlength=segments).tolist()
            assert counted.decide(committed).tolist() == dead
        elif event == "segment":
            segments += 1
            counted.add_segment()
        elif isinstance(event, tuple):
            # A copy for the batch under way has the stamp of a write before it.
            _, segment, copied = event
            now += 1
            stamp = started if copied and started > committed else now
            for one in (counted, listed):
                one.note(np.array([segment, segment, 0]), np.full(3, stamp))
        assert counted.undecided.tolist() == listed.undecided(segments)


def test_an_earlier_batch_that_is_recorded_late_frees_nothing_too_early() -> None:
    counted = Superseded(1)
    counted.note(np.zeros(3, np.int64), np.array([1, 1, 1]))
    counted.begin_batch(1)
    counted.note(np.zeros(2, np.int64), np.array([2, 2]))
    counted.begin_batch(2)
    assert counted.decide(1).tolist() == [0]  # two of the five are needed by the batch at 1
    assert counted.decide(2).tolist() == [5]


# -- in a slab -------------------------------------------------------------------------------------

OPTIMIZER = Adagrad(lr=0.1)
ROWS = 400


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_open, "SEGMENT_NBYTES", 16384)
    monkeypatch.setattr(durable_open, "DISK", Unsynced)


class History:
    """A tier that is trained, saved and cleaned in turn, beside the list of what it superseded."""

    def __init__(self, path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.random, self.monkeypatch = path, np.random.default_rng(seed), monkeypatch
        self.batches = itertools.count(1)
        self.checked = self.moves = self.kept = self.at_once = 0
        self.open()
        self.durable = self.requested = state(self.cluster)

    def open(self) -> None:
        tables = [
            Table("a", rows=ROWS, dim=6, tier=Tier(self.path, memory=100 * 96)),
            Table("b", rows=None, capacity=60, dim=6, tier=Tier(self.path, memory=100 * 96)),
        ]
        self.cluster = local(threads=1).open(tables, OPTIMIZER, seed=0)
        (self.slab,) = self.cluster.shards[0].tiers()
        self.slab._upkeep.stop()
        log, listed = self.slab.log, Listed()
        supersede, decide = log.supersede, log.decide

        def superseding(records: I64, stamps: I64) -> None:
            before, segments = log.live.sum(), records // log.slots
            kept = np.array([not log._superseded.is_loose(segment) for segment in segments], bool)
            kept &= log.horizon is not None
            supersede(records, stamps)
            assert before - log.live.sum() == (~kept).sum()
            listed.note(segments[kept], stamps[kept])
            self.at_once += int((~kept).sum()) if log.horizon is not None else 0
            self.check(listed)

        def deciding() -> None:
            assert log.horizon is not None
            live = log.live.copy()
            dead = np.bincount(listed.decide(log.horizon), minlength=live.size)
            decide()
            assert (live - log.live).tolist() == dead.tolist()
            self.kept += len(listed.pending)
            self.check(listed)

        log.supersede, log.decide = superseding, deciding  # type: ignore[method-assign]

    def check(self, listed: Listed) -> None:
        self.checked += 1
        assert self.slab.log.undecided.tolist() == listed.undecided(self.slab.log.live.size)

    def push(self) -> None:
        batch = {
            "a": self.random.choice(ROWS, 40, replace=False).tolist(),
            "b": self.random.choice(55, 8, replace=False).tolist(),
        }
        grads = {name: self.random.standard_normal((len(ids), 6)) for name, ids in batch.items()}
        wanted = wanted_of(self.cluster, batch)
        self.cluster.push(wanted, grads_of(self.cluster, grads), lr=0.1)

    def delete(self) -> None:
        self.cluster.delete("b", self.random.choice(55, 8, replace=False))

    def clear(self) -> None:
        self.cluster.clear()

    def round(self) -> None:
        """Of upkeep; sometimes rows change while it moves some."""
        move = upkeep._move

        def moving(slab: TieredSlab, segment: int, words: np.ndarray) -> object:
            moved = move(slab, segment, words)
            self.moves += len(moved)
            (self.push, self.delete, self.clear, lambda: None)[self.random.integers(4)]()
            return moved

        with self.monkeypatch.context() as patch:
            patch.setattr(upkeep, "_move", moving)
            upkeep.run(self.slab)

    def request(self) -> None:
        if self.slab.saving is None:
            self.requested = state(self.cluster)
            self.cluster.prepare_tiers(next(self.batches))

    def commit(self) -> None:
        saving = self.slab.saving
        if saving is None:
            return
        while not saving.prepared.done():
            self.push()
            self.round()
        saving.prepared.result()
        if self.random.random() < 0.3:
            self.slab.abandon()  # what is decided about it is found out later
        for _ in range(int(self.random.integers(3))):
            self.push()
        self.cluster.commit_tiers()
        self.durable = self.requested

    def abandon(self) -> None:
        self.cluster.abandon_tiers()

    def reopen(self) -> None:
        """Whatever came after it, the rows are those of the durable batch."""
        self.cluster.close()
        self.open()
        self.cluster.choose_rows()
        assert state(self.cluster) == self.durable

    def run(self, events: int) -> None:
        often = [self.push, self.push, self.round]
        seldom = [self.delete, self.request, self.commit]
        rarely = [self.abandon, self.clear, self.reopen]
        for _ in range(events):
            some = (often, seldom, rarely)[np.searchsorted([0.75, 0.97], self.random.random())]
            some[int(self.random.integers(len(some)))]()
        self.reopen()
        self.cluster.close()


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6])
def test_a_history_of_a_tier_frees_what_the_list_says(
    root: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(root / "t", seed, monkeypatch)
    history.run(250)
    assert history.checked > 100
    assert history.moves
    assert history.kept  # successors that came between a request and its commit


def test_rows_of_no_batch_take_no_space_once_they_are_superseded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that keeps no batches, on files that have one, which it has not asked to give up."""
    history = History(root / "t", 0, monkeypatch)
    for _ in range(15):
        history.push()
    history.request()
    history.commit()
    history.reopen()
    before = history.slab.log.states.size
    history.clear()
    for _ in range(150):
        history.push()
        upkeep.run(history.slab)
    assert history.slab.log.states.size <= 3 * before
    assert history.at_once > 500
    history.reopen()  # the batch is whole
    # And the next batch of this run takes its place, also where rows were cleared before.
    history.clear()
    for _ in range(15):
        history.push()
    history.request()
    history.commit()
    history.reopen()
    history.cluster.close()


def test_records_are_loose_from_a_clear_to_the_next_batch_where_their_segment_is() -> None:
    counted = Superseded(3)
    counted.begin_batch(1)
    counted.begin_segment(0)
    counted.clear()
    counted.begin_segment(1)
    stamps = np.array([5, 5, 5])
    assert counted.note(np.array([0, 1, 1]), stamps).tolist() == [1, 1]
    assert counted.undecided.tolist() == [1, 0, 0]
    counted.begin_batch(6)
    counted.begin_segment(2)
    assert counted.note(np.array([0, 1, 2]), stamps + 2).tolist() == []
    assert counted.undecided.tolist() == [2, 1, 1]
    assert counted.decide(6).tolist() == [1, 0, 0]


@pytest.fixture
def cluster(root: Path) -> Iterator[LocalCluster]:
    tables = [Table("t", rows=300_000, dim=1, tier=Tier(root / "t", memory="3MB"))]
    cluster = local(threads=1).open(tables, OPTIMIZER, seed=0)
    (slab,) = cluster.shards[0].tiers()
    slab._upkeep.stop()
    yield cluster
    cluster.close()


def durable(cluster: LocalCluster) -> TieredSlab:
    """A slab that has a batch, so that what it supersedes is undecided."""
    (slab,) = cluster.shards[0].tiers()
    cluster.push(wanted_of(cluster, {"t": [0]}), grads_of(cluster, {"t": np.ones((1, 1))}), lr=0.1)
    futures = cluster.prepare_tiers(1)
    while not futures[0].done():
        upkeep.run(slab)
    cluster.commit_tiers()
    return slab


def test_superseded_records_take_no_memory_until_the_next_batch(cluster: LocalCluster) -> None:
    slab = durable(cluster)
    segment = np.zeros(10_000, np.int64)
    tracemalloc.start()
    try:
        for _ in range(50):
            slab.stamp += 1
            slab.log.supersede(segment, np.full(segment.size, slab.stamp))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert slab.log.undecided[0] == 500_000
    assert kept < 100_000


def test_clearing_takes_memory_for_a_slice_of_the_rows(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = durable(cluster)
    monkeypatch.setattr("emberkeep.tiers.tiered_slab._CLEAR_SLICE", 4096, raising=False)
    slab.positions[:] = 1
    tracemalloc.start()
    try:
        cluster.clear()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not slab.positions.any()
    assert slab.log.undecided[0] == slab.rows
    assert (kept < 300_000, peak < 600_000) == (True, True), (kept, peak)

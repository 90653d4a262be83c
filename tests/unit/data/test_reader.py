"""The resumable reader against a plain list of samples: nothing lost, nothing twice, ever."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.data import Batch, Mark, Reader, Synthetic, Window
from emberkeep.errors import ConfigError, DataError, DeadlineError, StateError
from tests.threads import started_since
from tests.waiting import until


@dataclass(frozen=True)
class Numbers:
    """Samples whose labels are their own numbers; `read` and `skip` are recorded."""

    samples: int
    fails_at: set[int] = field(default_factory=set)
    reads: list[int] = field(default_factory=list)

    def fingerprint(self) -> str:
        return "numbers"

    def count(self) -> int:
        return self.samples

    def open(self, position: int, mark: Mark | None = None) -> _NumbersCursor:
        if mark is not None:
            assert mark == {"at": position}, "a mark belongs to its position"
        return _NumbersCursor(self, position)


class _NumbersCursor:
    def __init__(self, source: Numbers, position: int) -> None:
        self.source, self.position = source, position

    def read(self, count: int) -> Batch:
        numbers = range(self.position, min(self.position + count, self.source.samples))
        for number in numbers:
            if number in self.source.fails_at:
                raise DataError(f"sample {number} is damaged")
        self.position += len(numbers)
        self.source.reads.extend(numbers)
        labels = np.array(numbers, np.float32)
        return Batch(dense=np.zeros((len(labels), 0), np.float32), ids={}, labels=labels)

    def skip(self, count: int) -> int:
        skipped = max(min(count, self.source.samples - self.position), 0)
        self.position += skipped
        return skipped

    def mark(self) -> Mark:
        return {"at": self.position}

    def close(self) -> None:
        pass


def numbers_of(batches: list[Batch]) -> list[int]:
    return [int(label) for batch in batches for label in batch.labels]


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it comes back from a file."""
    restored: dict[str, Any] = json.loads(json.dumps(state))
    return restored


@dataclass(frozen=True)
class Life:
    """One process's part of a run: some workers, some budgets, then an interruption."""

    batch_size: int
    world: int
    prefetch: int
    budgets: list[int | None]
    steps: int


lives = st.lists(
    st.builds(
        Life,
        batch_size=st.integers(1, 7),
        world=st.integers(1, 3),
        prefetch=st.integers(0, 3),
        budgets=st.lists(st.none() | st.integers(0, 4), max_size=4),
        steps=st.integers(0, 12),
    ),
    max_size=5,
)


@given(samples=st.integers(0, 150), limit=st.none() | st.integers(0, 160), lives=lives)
def test_any_run_sees_every_sample_once_and_in_order(
    samples: int, limit: int | None, lives: list[Life]
) -> None:
    end = samples if limit is None else min(samples, limit)
    seen: list[int] = []
    state: dict[str, Any] | None = None
    last = Life(batch_size=5, world=2, prefetch=2, budgets=[], steps=samples + 1)
    for life in [*lives, last]:
        readers = [
            Reader(
                Numbers(samples),
                batch_size=life.batch_size,
                rank=rank,
                world=life.world,
                prefetch=life.prefetch,
                limit=limit,
            )
            for rank in range(life.world)
        ]
        if state is not None:
            for reader in readers:
                reader.load_state_dict(saved(state))
        left = life.steps
        for budget in [*life.budgets, None]:
            for reader in readers:
                reader.hand_out(budget)
            handed = 0
            while left and (parts := [next(reader, None) for reader in readers])[0] is not None:
                batches = [part for part in parts if part is not None]
                assert len(batches) == life.world, "all workers hand out the same number"
                assert [len(batch) for batch in batches] == slices(life, end - len(seen))
                seen += numbers_of(batches)
                handed += 1
                left -= 1
                assert all(reader.samples == len(seen) for reader in readers)
            if left and budget is not None:
                assert handed == budget or (handed < budget and len(seen) == end)
        states = [reader.state_dict() for reader in readers]
        assert all(other == states[0] for other in states)
        state = states[0]
        for reader in readers:
            reader.close()
    assert seen == list(range(end))


def slices(life: Life, left: int) -> list[int]:
    return [
        min(max(left - rank * life.batch_size, 0), life.batch_size) for rank in range(life.world)
    ]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_budget_is_exact_and_nothing_is_read_beyond_it(prefetch: int) -> None:
    source = Numbers(100)
    with Reader(source, batch_size=4, prefetch=prefetch) as reader:
        assert numbers_of(list(reader.hand_out(3))) == list(range(12))
        assert next(reader, None) is None
        assert not reader.finished
        assert source.reads == list(range(12))
        assert reader.state_dict()["samples"] == 12
        assert numbers_of(list(reader.hand_out(2))) == list(range(12, 20))
        assert source.reads == list(range(20))
        assert list(reader.hand_out(0)) == []
        assert numbers_of(list(reader.hand_out(None))) == list(range(20, 100))
        assert reader.finished


def test_what_was_prefetched_before_a_budget_is_handed_out_later_not_lost() -> None:
    source = Numbers(100)
    with Reader(source, batch_size=5, prefetch=4) as reader:
        next(reader)
        until(lambda: len(source.reads) == 25, "25 reads")
        assert reader.state_dict()["samples"] == 5
        assert numbers_of(list(reader.hand_out(2))) == list(range(5, 15))
        assert reader.state_dict()["samples"] == 15
        assert numbers_of(list(reader.hand_out(1))) == list(range(15, 20))


def test_a_new_budget_replaces_the_old_one() -> None:
    with Reader(Numbers(100), batch_size=1) as reader:
        reader.hand_out(5)
        next(reader)
        assert len(list(reader.hand_out(2))) == 2


def test_what_was_lent_and_not_renewed_is_refused_not_ended() -> None:
    with Reader(Numbers(40), batch_size=4) as reader:
        reader.lend(3, "renew it")
        taken = [next(reader) for _ in range(3)]
        assert reader.peek() is None  # nothing beyond it is read ahead
        for _ in range(2):
            with pytest.raises(StateError, match="renew it"):
                next(reader)
        reader.lend(2, "renew it")
        taken += [next(reader) for _ in range(2)]
        reader.lend(None)
        assert numbers_of([*taken, *reader]) == list(range(40))
        assert reader.finished
        reader.lend(0, "renew it")
        assert list(reader) == []  # the end of the data is one, whatever was lent


def test_a_budget_within_what_was_lent_ends_the_iteration() -> None:
    with Reader(Numbers(40), batch_size=4) as reader:
        reader.lend(5, "renew it")
        assert numbers_of(list(reader.hand_out(2))) == list(range(8))
        assert numbers_of(list(reader.hand_out(3))) == list(range(8, 20))
        with pytest.raises(StateError, match="renew it"):
            list(reader.hand_out(None))


@pytest.mark.parametrize(("world", "kept"), [(1, 20), (2, 16)])
def test_drop_last_leaves_out_the_incomplete_global_batch(world: int, kept: int) -> None:
    seen, states = [], []
    for rank in range(world):
        reader = Reader(Numbers(23), batch_size=4, rank=rank, world=world, drop_last=True)
        seen += numbers_of(list(reader))
        states.append(reader.state_dict())
    assert sorted(seen) == list(range(kept))
    assert all(state["samples"] == kept for state in states)


def test_an_error_of_the_thread_comes_in_its_place_and_can_be_retried() -> None:
    source = Numbers(20, fails_at={9})
    with Reader(source, batch_size=3, prefetch=5) as reader:
        reader.hand_out(5)
        assert numbers_of([next(reader) for _ in range(3)]) == list(range(9))
        for _ in range(2):
            with pytest.raises(DataError, match="sample 9 is damaged"):
                next(reader)
            assert reader.state_dict()["samples"] == 9
        source.fails_at.clear()
        assert numbers_of(list(reader)) == list(range(9, 15))


def test_nobody_waits_for_ever_for_a_source_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    honest = _NumbersCursor.read

    def read(self: _NumbersCursor, count: int) -> Batch:
        assert release.wait(60)
        return honest(self, count)

    monkeypatch.setattr(_NumbersCursor, "read", read)
    reader = Reader(Numbers(20), batch_size=5)
    with monkeypatch.context() as patched:
        patched.setattr("emberkeep.data.reader._PATIENCE", timedelta(milliseconds=10))
        with pytest.raises(DeadlineError, match="the next batch, which emberkeep-reader"):
            next(reader)
    release.set()
    assert numbers_of(list(reader)) == list(range(20))  # nothing was skipped


def test_close_ends_the_thread_and_reading_may_go_on_afterwards() -> None:
    before = set(threading.enumerate())
    reader = Reader(Numbers(100), batch_size=10)
    next(reader)
    assert started_since(before, "emberkeep-reader")
    reader.close()
    assert not started_since(before, "emberkeep-reader")
    assert numbers_of([next(reader)]) == list(range(10, 20))
    reader.close()
    reader.close()


def test_a_forgotten_reader_takes_its_thread_with_it() -> None:
    before = set(threading.enumerate())
    reader = Reader(Numbers(100), batch_size=10)
    next(reader)
    del reader
    gc.collect()
    until(lambda: not started_since(before, "emberkeep-reader"), "the end of the thread")


def test_the_thread_ends_with_the_data() -> None:
    before = set(threading.enumerate())
    reader = Reader(Numbers(10), batch_size=10)
    assert len(list(reader)) == 1
    until(lambda: not started_since(before, "emberkeep-reader"), "the end of the thread")
    assert next(reader, None) is None


def test_the_state_is_small_plain_and_the_same_for_all_batch_sizes() -> None:
    states = []
    for batch_size, steps in ((4, 6), (8, 3), (24, 1)):
        with Reader(Numbers(100), batch_size=batch_size) as reader:
            list(reader.hand_out(steps))
            states.append(reader.state_dict())
    assert states[0] == states[1] == states[2]
    assert states[0] == {"version": 1, "source": "numbers", "samples": 24, "mark": {"at": 24}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, this release reads up to 1: upgrade"),
        ({"version": None}, "no state of a reader"),
        ({"source": "other"}, "belongs to other, this reader reads numbers"),
        ({"samples": -1}, "-1 samples: it is damaged"),
        ({"samples": "8"}, "'8' samples: it is damaged"),
        ({"samples": 51}, "beyond this reader's limit of 50"),
        ({"mark": [1]}, r"the mark \[1\]: it is damaged"),
        ({"mark": {"at": "x"}}, "the mark .* is damaged"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    with Reader(Numbers(100), batch_size=4, limit=50) as reader:
        next(reader)
        with pytest.raises(StateError, match=message):
            reader.load_state_dict(reader.state_dict() | change)
        assert numbers_of([next(reader)]) == [4, 5, 6, 7]


def test_another_source_is_refused_but_a_later_end_is_not() -> None:
    source = Synthetic(samples=100, rows_total=1000)
    reader = Reader(source, batch_size=10, limit=20, prefetch=0)
    assert len(list(reader)) == 2
    state = saved(reader.state_dict())

    longer = Reader(Synthetic(samples=200, rows_total=1000), batch_size=10, prefetch=0)
    longer.load_state_dict(state)
    np.testing.assert_array_equal(next(longer).dense, source.batch(20, 10).dense)

    other_seed = Reader(Synthetic(samples=100, rows_total=1000, seed=1), batch_size=10)
    other_start = Reader(Window(source=source, start=50), batch_size=10)
    for stranger in (other_seed, other_start):
        with pytest.raises(StateError, match="resume with the same files"):
            stranger.load_state_dict(state)


def test_going_back_to_an_earlier_state() -> None:
    with Reader(Numbers(30), batch_size=10) as reader:
        start = reader.state_dict()
        first = numbers_of(list(reader))
        assert reader.finished
        reader.load_state_dict(saved(start))
        assert not reader.finished
        assert numbers_of(list(reader)) == first


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 1, "world": 0},
        {"batch_size": 1, "rank": 2, "world": 2},
        {"batch_size": 1, "rank": -1},
        {"batch_size": 1, "prefetch": -1},
        {"batch_size": 1, "limit": -1},
    ],
)
def test_impossible_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Reader(Numbers(1), **options)  # type: ignore[arg-type]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more batches"):
        Reader(Numbers(1), batch_size=1).hand_out(-1)


def test_numbers_of_numpy_leave_no_trace_in_the_state() -> None:
    world, size = np.int64(2), np.int32(3)
    reader = Reader(
        Synthetic(samples=100, rows_total=1000), batch_size=size, world=world, limit=np.int64(50)
    )
    with reader:
        next(reader.hand_out(np.int64(1)))
        state = json.loads(json.dumps(reader.state_dict()))
        assert state["samples"] == 6
        reader.load_state_dict(reader.state_dict())


def test_what_is_no_whole_number_is_refused() -> None:
    for options in ({"batch_size": 2.5}, {"batch_size": 4, "limit": 2.5}, {"batch_size": "4"}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            Reader(Numbers(10), **options)
    reader = Reader(Numbers(10), batch_size=1)
    for take in (reader.hand_out, reader.lend):
        with pytest.raises(ConfigError, match="must be a whole number"):
            take(2.5)


# Anything resumable can stand in the reader's place.

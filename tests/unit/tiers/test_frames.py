"""Which frames are given away: those of rows that were used seldom and long ago."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emberkeep.tiers import frames as module
from emberkeep.tiers.frames import HELD, Frames


def given_away(frames: Frames, count: int, before: int) -> list[int]:
    taken = frames.least(count, before)
    rows = frames.row_of[taken].tolist()
    frames.unbind(taken)
    return rows


def test_rows_that_are_used_once_go_in_the_order_of_their_use() -> None:
    frames = Frames(6, 100)
    for row in (30, 10, 20):
        frames.turn += 1
        frames.bind(np.array([row]))
    assert given_away(frames, 2, frames.turn + 1) == [30, 10]
    assert given_away(frames, 2, frames.turn + 1) == [20]


def test_a_row_of_every_second_batch_outlives_one_that_came_later_and_once() -> None:
    frames = Frames(6, 100)
    often = frames.bind(np.array([1]))
    for _ in range(4):
        frames.turn += 2
        frames.used[often] = frames.turn
        frames.touch(often, frames.turn)
    frames.turn += 1
    frames.bind(np.array([2]))
    frames.turn += 2
    assert given_away(frames, 1, frames.turn) == [2]


def test_what_was_used_often_is_forgotten_in_time() -> None:
    frames = Frames(6, 100)
    often = frames.bind(np.array([1]))
    for _ in range(50):
        frames.turn += 1
        frames.used[often] = frames.turn
        frames.touch(often, frames.turn)
    frames.turn += 150  # no count is worth more turns than that: log(1 / _FADING) / _FADING
    frames.bind(np.array([2]))
    frames.turn += 2
    assert given_away(frames, 1, frames.turn) == [1]


def test_what_this_turn_uses_stays_whatever_its_worth() -> None:
    frames = Frames(2000, 5000)
    frames.bind(np.arange(1500))
    frames.turn += 1
    frames.bind(np.arange(2000, 2400))
    assert sorted(given_away(frames, 1900, frames.turn)) == [*range(1500)]
    assert given_away(frames, 1, frames.turn) == []


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many frames each look was at."""
    monkeypatch.setattr(module, "_WINDOW", 1000, raising=False)
    looks: list[int] = []
    look = module.kernels.list_idle

    def looking(worth: Any, *rest: Any) -> int:
        looks.append(worth.size)
        return int(look(worth, *rest))

    monkeypatch.setattr(module.kernels, "list_idle", looking)
    return looks


def filled(count: int) -> Frames:
    frames = Frames(count, count)
    for start in range(0, count, count // 8):
        frames.turn += 1
        frames.bind(np.arange(start, start + count // 8))
    frames.turn += 1
    random = np.random.default_rng(0)
    frames.worth[:] = frames.turn - random.random(count)
    return frames


def test_a_refill_looks_at_few_of_many_frames(looked_at: list[int]) -> None:
    frames = filled(64_000)
    order = np.argsort(frames.worth)
    taken = frames.least(20, frames.turn)
    assert taken.size == 20
    assert sum(looked_at) <= 3000
    # Which are not the least worthy of all, and are of the least worthy part of them.
    assert np.isin(taken, order[:4000]).all()


def test_every_frame_that_can_be_given_away_is_found_wherever_it_is(looked_at: list[int]) -> None:
    frames = filled(16_000)
    free = np.array([3, 7777, 15_999])
    frames.busy[:] = HELD
    frames.busy[free] = 0
    for _ in free:
        taken = frames.least(1, frames.turn)
        assert taken.size == 1
        assert taken[0] in free
        frames.unbind(taken)
    assert frames.least(1, frames.turn).size == 0
    frames.busy[:] = 0
    everything = frames.least(16_000, frames.turn)
    assert np.unique(everything).size == everything.size == 16_000 - free.size


def test_what_is_queued_is_given_away_once(looked_at: list[int]) -> None:
    frames = filled(16_000)
    seen: set[int] = set()
    while (taken := frames.least(700, frames.turn)).size:
        assert not seen & {*taken.tolist()}
        seen |= {*taken.tolist()}
        frames.unbind(taken)
    assert len(seen) == 16_000


def misses(window: int, skewed: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a stream of batches over 16 times as many rows as there are frames."""
    monkeypatch.setattr(module, "_WINDOW", window, raising=False)
    random, frames, missed = np.random.default_rng(7), Frames(8192, 131_072), 0
    for _ in range(120):
        drawn = random.random(1000)
        ids = 131_072**drawn if skewed else drawn * 131_072
        rows = np.unique(ids.astype(np.int64) % 131_072)
        frames.turn += 1
        found = frames.of(rows)
        frames.used[found[found >= 0]] = frames.turn
        frames.touch(found[found >= 0], frames.turn)
        missing = rows[found < 0]
        missed += missing.size
        while frames.free < missing.size:
            frames.unbind(frames.least(min(256, missing.size - frames.free), frames.turn))
        frames.bind(missing)
    return missed


@pytest.mark.parametrize("skewed", [True, False])
def test_windows_miss_no_more_than_a_look_at_all_frames(
    skewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = misses(8192, skewed, monkeypatch)
    assert whole > 20_000
    assert misses(256, skewed, monkeypatch) <= 1.02 * whole

"""Which frames are given away: those of rows that were used seldom and long ago."""

from __future__ import annotations

import numpy as np

from emberkeep.tiers.frames import Frames


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

"""Memory that is lent, and used again; zeros that cost nothing."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from emberkeep.runtime import memory
from emberkeep.runtime.memory import lazy_zeros, recycled, zero_again

N = 2**20


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_a_buffer_is_used_again_when_its_last_view_is_gone() -> None:
    held = recycled(N)  # as long as one is lent, others are kept
    first = recycled(N)
    at = address(first)
    array = np.frombuffer(first[10:20], np.uint8)[2:].view(np.uint8)
    array_at_once = recycled(N)
    assert address(array_at_once) != at
    del first
    others = [recycled(N) for _ in range(3)]
    assert at not in map(address, others)  # `array` still looks at it
    del array
    again = recycled(N - 5)
    assert address(again) == at
    assert len(again) == N - 5
    del held, array_at_once


def test_nothing_is_kept_when_nothing_is_lent() -> None:
    gc.collect()
    before = len(memory._recyclers)
    views = [recycled(N) for _ in range(20)]
    assert len(memory._recyclers) == max(before, 1)
    (owner,) = memory._recyclers
    del views[1:]
    assert len(owner.free) <= memory._MOST_FREE
    del owner, views
    assert len(memory._recyclers) == before


def test_many_threads_never_share_one() -> None:
    def work(number: int) -> None:
        for _ in range(200):
            view = np.frombuffer(recycled(N // 8), np.uint8)
            view[:] = number
            wrong.append(int((view != number).sum()))

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)
    assert len(wrong) == 1200


def test_buffers_are_kept_between_the_parts_of_a_work() -> None:
    """Also while none is lent; and no longer than that."""
    gc.collect()
    before = len(memory._recyclers)
    with memory.buffers_kept():
        first = address(recycled(N))
        assert address(recycled(N)) == first
        (owner,) = memory._recyclers
        assert len(owner.free) == 1
    del owner
    assert len(memory._recyclers) == before


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (0, 1), (3, 90), (100, 101), (500, 3000), (1, 4999), (0, 5000)]
)
def test_rows_are_zeros_again_and_their_neighbours_are_not(first: int, last: int) -> None:
    for rows in (lazy_zeros((5000, 9), np.uint8), lazy_zeros((5000, 31), np.uint32)):
        rows[:] = 1
        zero_again(rows[first:last])
        assert not rows[first:last].any()
        assert rows[:first].all()
        assert rows[last:].all()
        rows[first:last] = 2
        assert rows.sum() == rows.size + (last - first) * rows.shape[1]


def test_rows_that_are_no_mapping_of_their_own_are_zeros_again() -> None:
    rows = np.ones((100, 3), np.uint32)
    zero_again(rows[10:20])
    assert not rows[10:20].any()
    assert rows.sum() == 90 * 3

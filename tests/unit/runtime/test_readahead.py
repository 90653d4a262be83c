"""Iterating ahead: errors come out where they belong, and nobody is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial

import pytest

from emberkeep.runtime.readahead import Ahead, in_order
from tests.threads import started_since

ERRORS = [MemoryError, OSError, IndexError, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_what_runs_ahead_comes_out_where_it_belongs(kind: type[BaseException]) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise kind("on purpose")

    with Ahead(items()) as running:
        assert next(running) == 1
        with pytest.raises(kind):
            next(running)


def test_who_gives_up_early_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with Ahead(iter(range(10**9))) as running:
        assert next(running) == 0
    assert not started_since(before)


def test_a_priority_that_cannot_be_had_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> None:
        raise PermissionError

    monkeypatch.setattr("emberkeep.runtime.background.be_nice", refuse)
    with Ahead([1, 2, 3], nice=5) as running:
        assert list(running) == [1, 2, 3]


def in_four(calls: list[tuple[int, Callable[[], int]]]) -> Generator[int, None, None]:
    return in_order(calls, depth=4, nbytes=100, name="emberkeep-test")


def test_calls_run_at_once_and_come_back_in_their_order() -> None:
    together = threading.Barrier(4, timeout=60)

    def call(number: int) -> int:
        together.wait()
        return number

    assert list(in_four([(1, partial(call, n)) for n in range(8)])) == [*range(8)]


def test_an_error_of_a_call_comes_out_where_the_call_stands() -> None:
    def fails() -> int:
        raise KeyError("on purpose")

    found = in_four([(1, lambda: 1), (1, fails), (1, lambda: 3)])
    assert next(found) == 1
    with pytest.raises(KeyError, match="on purpose"):
        next(found)


def test_calls_take_no_more_bytes_than_they_may_or_one_alone() -> None:
    started: list[int] = []
    sizes = [40, 40, 40, 500, 10, 10]

    def call(number: int) -> int:
        started.append(number)
        return number

    found = in_four([(size, partial(call, n)) for n, size in enumerate(sizes)])
    for number in range(len(sizes)):
        assert next(found) == number
        # With what was asked for last: that is still in use.
        held = [sizes[n] for n in sorted(started) if n >= number]
        assert sum(held) <= 100 or held == [500]
    assert next(found, None) is None


def test_who_leaves_calls_early_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    found = in_four([(1, lambda: 1)] * 50)
    assert next(found) == 1
    found.close()
    assert not started_since(before)

"""Iterating ahead: errors come out where they belong, and nobody is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from emberkeep.runtime.readahead import Ahead
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

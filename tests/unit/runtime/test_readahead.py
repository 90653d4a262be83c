"""Threads for background work: no error ends them, nothing of finished work stays with them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from emberkeep.runtime.readahead import Ahead, Worker

ERRORS = [MemoryError, OSError, IndexError, KeyboardInterrupt, SystemExit]


class Work:
    """Something that a task holds."""

    def __call__(self) -> None:
        pass


def done(worker: Worker, task: Any) -> BaseException | None:
    ended: list[BaseException | None] = []
    told = threading.Event()

    def end(error: BaseException | None) -> None:
        ended.append(error)
        told.set()

    worker.do(task, end)
    assert told.wait(60)
    return ended[0]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_any_kind_is_told_and_ends_nothing(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("on purpose")

    worker = Worker("test", 0)
    assert isinstance(done(worker, fails), kind)
    assert done(worker, Work()) is None
    worker.close()


def test_an_error_of_who_is_told_is_shown_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))

    def end(_: BaseException | None) -> None:
        raise MemoryError

    worker = Worker("test", 0)
    worker.do(Work(), end)
    assert done(worker, Work()) is None
    assert shown == [MemoryError]


def test_who_is_told_finds_the_work_gone() -> None:
    """What a finished task held must not be freed by the thread at some later time."""
    worker, gone, told = Worker("test", 0), [], threading.Event()
    work = Work()
    known = weakref.ref(work)

    def end(_: BaseException | None) -> None:
        gone.append(known() is None)
        told.set()

    worker.do(work, end)
    del work
    assert told.wait(60)
    # It may be this thread that let go last; then it did so before it waited.
    assert gone == [True] or known() is None
    worker.close()


def test_close_joins_the_thread_and_work_may_go_on() -> None:
    before = threading.active_count()
    worker = Worker("test", 0)
    numbers: list[int] = []
    for number in range(100):
        worker.do(lambda number=number: numbers.append(number), lambda _: None)
    worker.close()
    assert numbers == list(range(100))
    assert threading.active_count() == before
    worker.close()
    assert done(worker, Work()) is None
    worker.close()
    assert threading.active_count() == before


def test_a_forgotten_worker_takes_its_thread_with_it() -> None:
    worker = Worker("forgotten", 0)
    (thread,) = (t for t in threading.enumerate() if t.name == "forgotten")
    del worker
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_what_runs_ahead_comes_out_where_it_belongs(kind: type[BaseException]) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise kind("on purpose")

    with Ahead(items()) as running:
        assert next(running) == 1
        with pytest.raises(kind):
            next(running)


def test_a_priority_that_cannot_be_had_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> None:
        raise PermissionError

    monkeypatch.setattr("emberkeep.runtime.readahead.be_nice", refuse)
    worker = Worker("test", 5)
    assert done(worker, Work()) is None
    with Ahead([1, 2, 3], nice=5) as running:
        assert list(running) == [1, 2, 3]

"""Calls that are made at once."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from emberkeep.blobs import Call, MemoryStore, together


class OneThread(MemoryStore):
    """All the calls that are made at once have one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_at_once: Executor = ThreadPoolExecutor(1)


def test_a_call_that_waits_for_others_does_not_wait_for_its_own_thread() -> None:
    store = OneThread()
    started, results = threading.Event(), list[list[int]]()

    def nested() -> list[int]:
        started.set()
        return together(store, [lambda: 1, lambda: 2, lambda: 3])

    call = Call(store, nested)
    started.wait()
    waiting = threading.Thread(target=lambda: results.append(call.result()), daemon=True)
    waiting.start()
    waiting.join(20)
    assert results == [[1, 2, 3]]


def test_a_call_is_made_once_by_one_of_those_who_wait() -> None:
    store, made, hold = OneThread(), list[int](), threading.Event()
    blocking = Call(store, hold.wait)
    call = Call(store, lambda: made.append(1))
    waiting = [threading.Thread(target=call.wait) for _ in range(8)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    hold.set()
    assert blocking.result() is True
    assert made == [1]


def test_what_a_call_raises_is_raised_where_its_result_is_asked_for() -> None:
    def fails() -> None:
        raise KeyboardInterrupt

    for store in (MemoryStore(), OneThread()):
        call = Call(store, fails)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                call.result()

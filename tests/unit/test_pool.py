"""The pool of threads that run kernels."""

from __future__ import annotations

import gc
import threading
from functools import partial

import pytest

from emberkeep.errors import ConfigError
from emberkeep.pool import Pool, default_threads, spans


def test_every_task_runs_once_and_errors_come_out() -> None:
    pool = Pool(4)
    for count in (0, 1, 2, 50):
        done: list[int] = []
        pool.run([partial(done.append, i) for i in range(count)])
        assert sorted(done) == list(range(count))

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        pool.run([lambda: None, fail, lambda: None])


def test_several_threads_may_share_a_pool() -> None:
    pool, totals = Pool(3), [0] * 4

    def work(caller: int) -> None:
        for _ in range(200):
            done: list[int] = []
            pool.run([partial(done.append, 1)] * 5)
            totals[caller] += len(done)

    threads = [threading.Thread(target=work, args=(caller,)) for caller in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [1000] * 4


def test_threads_end_with_their_pool() -> None:
    before = set(threading.enumerate())
    pool = Pool(5)
    pool.run([lambda: None] * 5)
    mine = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("emberkeep-")
    ]
    assert len(mine) == 4
    del pool
    gc.collect()
    for thread in mine:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("total", "parts", "least"), [(0, 3, 1), (10, 3, 1), (10, 3, 6), (7, 9, 1)]
)
def test_spans_cover_the_range_in_order(total: int, parts: int, least: int) -> None:
    cut = spans(total, parts, least)
    assert [i for start, stop in cut for i in range(start, stop)] == list(range(total))
    assert len(cut) <= parts
    assert len(cut) <= 1 or all(stop - start >= least for start, stop in cut)


@pytest.mark.parametrize("given", ["0", "two", "-1"])
def test_a_wrong_number_of_threads_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKEEP_THREADS", given)
    with pytest.raises(ConfigError, match="EMBERKEEP_THREADS"):
        default_threads()

"""The pool of threads that run kernels."""

from __future__ import annotations

import gc
import threading
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from emberkeep.errors import ConfigError, StoppedError
from emberkeep.kernels import batch_rows
from emberkeep.runtime import pool as pools
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.pool import Job, Pool, default_threads, shares, spans
from tests.threads import started_since


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
    started = started_since(before, "emberkeep-")
    assert len(started) == 4
    del pool
    gc.collect()
    for thread in started:
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


@pytest.mark.parametrize(
    ("total", "threads", "least", "parts"),
    [
        (0, 2, 1, 0), (600, 2, 256, 2), (400, 2, 256, 1), (5000, 2, 256, 2), (10_000, 2, 256, 4),
        (10**6, 2, 256, 8), (10**6, 2, 500_000, 2), (10**6, 1, 256, 1), (10**6, 200, 1, 256),
        (10**6, 256, 1, 256),
    ],
)  # fmt: skip
def test_much_work_is_cut_into_several_shares_for_each_thread(
    total: int, threads: int, least: int, parts: int
) -> None:
    cut = shares(total, threads, least)
    assert len(cut) == parts
    assert sum(stop - start for start, stop in cut) == total
    assert all(a[1] == b[0] for a, b in pairwise(cut))


@pytest.mark.parametrize("given", ["0", "two", "-1"])
def test_a_wrong_number_of_threads_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERKEEP_THREADS", given)
    with pytest.raises(ConfigError, match="EMBERKEEP_THREADS"):
        default_threads()


def nonfinite_rows(pool: Pool, seed: int) -> None:
    """Two jobs at once: the first bad row of each part, and the unique ids of two tables."""
    random = np.random.default_rng(seed)
    values = np.ones((400, 3), np.float32)
    bad = int(random.integers(400))
    values[bad, 1] = np.nan
    ids, offsets = random.integers(0, 40, 300), np.array([0, 120, 300])
    staged, inverse = np.empty(300, np.int64), np.empty(300, np.int32)
    counts = np.zeros(2, np.int64)
    cut = spans(400, pool.threads)
    found, nothing = pool.together(
        Job(batch_rows.write_first_nonfinite, cut, (values,)),
        Job(batch_rows.write_dedupe, [(0, 1), (1, 2)], (ids, offsets, staged, inverse, counts)),
    )
    assert found == [bad if start <= bad < stop else -1 for start, stop in cut]
    assert nothing == [0, 0]
    for t in range(2):
        part = slice(offsets[t], offsets[t + 1])
        assert counts[t] == np.unique(ids[part]).size
        assert (staged[part][inverse[part]] == ids[part]).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_jobs_run_part_by_part_on_any_thread(threads: int) -> None:
    pool, errors = Pool(threads), []

    def work(caller: int) -> None:
        try:
            for i in range(300):
                nonfinite_rows(pool, seed=caller * 1000 + i)
        except BaseException as error:
            errors.append(error)

    callers = [threading.Thread(target=work, args=(caller,)) for caller in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not errors


def test_no_parts_are_no_work() -> None:
    assert Pool(2).together(
        Job(batch_rows.write_first_nonfinite, [], (np.ones((1, 1), np.float32),))
    ) == [[]]


def test_a_thread_that_dies_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    before = background_failures.errors("emberkeep-pool")
    real, dying = pools._Join.run, threading.Event()

    def run(self: pools._Join, task: pools.Task) -> None:
        if threading.current_thread() is not threading.main_thread() and not dying.is_set():
            dying.set()
            raise MemoryError("with a task in its hands")
        real(self, task)

    monkeypatch.setattr(pools._Join, "run", run)
    pool = Pool(2)
    with pytest.raises(StoppedError, match="half done"):
        pool.run([lambda: dying.wait(60), lambda: None])
    assert background_failures.errors("emberkeep-pool") - before == 1
    done: list[int] = []
    pool.run([partial(done.append, i) for i in range(20)])
    assert sorted(done) == list(range(20))


def test_a_thread_that_dies_at_its_start_is_counted_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(_nice: int) -> None:
        raise TypeError("on purpose")

    monkeypatch.setattr(pools, "be_nice", dies)
    shown = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: shown.set())
    before, done = background_failures.errors("emberkeep-pool"), list[int]()
    Pool(2, nice=1).run([partial(done.append, i) for i in range(4)])
    assert shown.wait(60)
    assert sorted(done) == [0, 1, 2, 3]
    assert background_failures.errors("emberkeep-pool") > before

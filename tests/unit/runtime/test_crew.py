"""Threads that share a queue of calls."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import Future
from datetime import timedelta

import pytest

from emberkeep.errors import DeadlineError, StoppedError
from emberkeep.runtime import background
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.crew import Crew


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_calls_run_at_once_and_results_keep_their_order() -> None:
    meet = threading.Barrier(3)
    with Crew(3, "crew-at-once") as crew:
        assert list(crew.map(lambda n: (meet.wait(60), n)[1], range(3))) == [0, 1, 2]
        assert list(crew.map(abs, range(-100, 0))) == list(range(100, 0, -1))
        assert len(threads("crew-at-once")) <= 3
    assert threads("crew-at-once") == []
    with pytest.raises(StoppedError, match="crew-at-once was closed"):
        crew.submit(abs, 1)


@pytest.mark.parametrize("error", [MemoryError("m"), OSError(5, "io"), SystemExit()])
def test_an_error_of_any_kind_is_counted_and_raised_where_it_is_awaited(
    error: BaseException,
) -> None:
    def fails() -> None:
        raise error

    before = background_failures.errors("crew-fails")
    with Crew(2, "crew-fails") as crew:
        futures = [crew.submit(fails) for _ in range(5)]
        for future in futures:
            with pytest.raises(type(error)):
                future.result(60)
        assert crew.submit(abs, -1).result(60) == 1
    assert background_failures.errors("crew-fails") - before == 5


def test_a_call_that_nobody_can_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(2, "crew-refuses")

    def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(background._Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            crew.submit(abs, -1)
    assert crew.submit(abs, -2).result(60) == 2
    crew.shutdown()


def test_close_ends_and_says_what_it_has_waited_for() -> None:
    started, release = threading.Event(), threading.Event()
    crew = Crew(1, "crew-hangs", patience=timedelta(milliseconds=10))
    running = crew.submit(lambda: (started.set(), release.wait(60))[1])
    waiting = crew.submit(abs, -1)
    assert started.wait(60)
    with pytest.raises(DeadlineError, match="crew-hangs has not ended"):
        crew.shutdown(cancel_futures=True)
    assert waiting.cancelled()
    release.set()
    assert running.result(60)


def test_after_an_error_no_call_begins() -> None:
    release, started = threading.Event(), threading.Event()
    later: list[Future[int]] = []

    def first() -> None:
        started.set()
        assert release.wait(60)

    def use() -> None:
        with Crew(1, "crew-error") as crew:
            crew.submit(first)
            assert started.wait(60)
            later.append(crew.submit(abs, -1))
            later[0].add_done_callback(lambda _: release.set())
            raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        use()
    assert later[0].cancelled()
    assert threads("crew-error") == []


def test_a_forgotten_crew_takes_its_threads_with_it() -> None:
    crew = Crew(2, "crew-forgotten")
    assert crew.submit(abs, -1).result(60) == 1
    found = threads("crew-forgotten")
    del crew
    gc.collect()
    for thread in found:
        thread.join(60)
    assert threads("crew-forgotten") == []


def test_a_forked_child_has_threads_of_its_own() -> None:
    crew = Crew(1, "crew-forked")
    assert crew.submit(abs, -1).result(60) == 1
    child = os.fork()
    if not child:
        os._exit(crew.submit(abs, -7).result(60))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    crew.shutdown()

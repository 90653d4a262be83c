"""Threads for background work: whatever happens in them is shown, and nobody waits for ever."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from emberkeep.errors import DeadlineError, StoppedError
from emberkeep.runtime import background
from emberkeep.runtime.background import Retry, Worker
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SystemClock

ERRORS = [MemoryError, OSError, IndexError, KeyboardInterrupt, SystemExit]


class Work:
    """Something that a task holds."""

    def __call__(self) -> None:
        pass


def done(worker: Worker, task: Any) -> BaseException | None:
    ended: list[BaseException | None] = []
    heard = threading.Event()

    def end(error: BaseException | None) -> None:
        ended.append(error)
        heard.set()

    worker.do(task, end)
    assert heard.wait(60)
    return ended[0]


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_any_kind_is_reported_and_ends_nothing(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("on purpose")

    worker = Worker("test")
    assert isinstance(done(worker, fails), kind)
    assert done(worker, Work()) is None
    worker.close()


@pytest.mark.parametrize("kind", ERRORS)
def test_a_thread_that_dies_at_its_start_ends_its_tasks(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_nice: int) -> None:
        raise kind("on purpose")

    worker = Worker("test-start")
    with monkeypatch.context() as patch:
        patch.setattr(background, "be_nice", dies)
        error = done(worker, Work())
    if kind is OSError:  # the system may refuse a priority
        assert error is None
    else:
        assert isinstance(error, kind)
        assert worker.error is error
        assert background_failures.stopped_since("test-start") is not None
    assert done(worker, Work()) is None  # by another thread
    assert background_failures.stopped_since("test-start") is None
    worker.close()


def test_a_loop_that_dies_at_its_start_wakes_those_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies(_nice: int) -> None:
        raise TypeError("on purpose")

    monkeypatch.setattr(background, "be_nice", dies)
    worker = Worker("test-start", lambda: None)
    worker.wake()
    with pytest.raises(StoppedError, match="on purpose"):
        worker.wait(lambda: False, "what never comes", timedelta(seconds=60))
    worker.stop()


def test_an_error_of_the_callback_is_shown_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))

    def end(_: BaseException | None) -> None:
        raise MemoryError

    worker = Worker("test")
    worker.do(Work(), end)
    assert done(worker, Work()) is None
    assert shown == [MemoryError]


def test_the_work_is_gone_when_its_end_is_heard() -> None:
    """What a finished task held must not be freed by the thread at some later time."""
    worker, gone, heard = Worker("test"), [], threading.Event()
    work = Work()
    known = weakref.ref(work)

    def end(_: BaseException | None) -> None:
        gone.append(known() is None)
        heard.set()

    worker.do(work, end)
    del work
    assert heard.wait(60)
    # It may be this thread that let go last; then it did so before it waited.
    assert gone == [True] or known() is None
    worker.close()


def test_close_joins_the_thread_and_work_may_go_on() -> None:
    worker = Worker("joined")
    numbers: list[int] = []
    for number in range(100):
        worker.do(lambda number=number: numbers.append(number), lambda _: None)
    worker.close()
    assert numbers == list(range(100))
    assert "joined" not in [thread.name for thread in threading.enumerate()]
    worker.close()
    assert done(worker, Work()) is None
    worker.close()
    assert "joined" not in [thread.name for thread in threading.enumerate()]


def test_a_forgotten_worker_takes_its_thread_with_it() -> None:
    worker = Worker("forgotten")
    assert done(worker, Work()) is None
    (thread,) = (t for t in threading.enumerate() if t.name == "forgotten")
    del worker
    thread.join(60)
    assert not thread.is_alive()


# -- loops ---------------------------------------------------------------------------------------

SOON = timedelta(seconds=60)


class Impatient(SystemClock):
    """Waits for what is asked for, and never for a pause to pass; knows the pauses."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def wait_for(
        self, changed: threading.Condition, until: Callable[[], bool], seconds: float | None
    ) -> bool:
        if seconds is None or seconds == SOON.total_seconds():
            return super().wait_for(changed, until, seconds)
        self.pauses.append(round(seconds, 3))
        return until()


class Owner:
    """Has a loop whose steps follow a script, one after the other."""

    def __init__(self, *script: BaseException | float | None, **settings: Any) -> None:
        self.script = list(script)
        self.steps = 0
        self.errors: list[BaseException] = []
        self.worker = Worker("test-loop", self.step, on_error=self.errors_append, **settings)

    def errors_append(self, error: BaseException) -> None:
        self.errors.append(error)

    def step(self) -> float | None:
        self.steps += 1
        with self.worker.changed:
            self.worker.changed.notify_all()
        done = self.script.pop(0) if self.script else None
        if isinstance(done, BaseException):
            raise done
        return done


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_any_kind_stops_a_loop_and_is_shown_everywhere(
    kind: type[BaseException],
) -> None:
    before, began = background_failures.errors("test-loop"), time.time()
    owner = Owner(0.0, kind("on purpose"))
    owner.worker.wake()
    with pytest.raises(StoppedError, match="on purpose") as raised:
        owner.worker.wait(lambda: False, "what never comes", SOON)
    assert raised.value.__cause__ is owner.worker.error is owner.errors[0]
    assert background_failures.errors("test-loop") == before + 1
    since = background_failures.stopped_since("test-loop")
    assert since == owner.worker.failed_since
    assert since is not None
    assert since >= began
    errors, stopped = background_failures.families({"shard": "3"})
    labels = {"shard": "3", "thread": "test-loop"}
    (counted,) = (sample.value for sample in errors.samples if sample.labels == labels)
    assert counted == before + 1
    assert [sample.value for sample in stopped.samples if sample.labels == labels] == [since]
    assert "on purpose" in background_failures.by_thread()["test-loop"].last
    with pytest.raises(StoppedError, match="on purpose"):
        owner.worker.check()
    with pytest.raises(StoppedError, match="on purpose"):
        owner.worker.close(SOON)
    assert background_failures.stopped_since("test-loop") is None
    assert owner.steps == 2


def test_steps_are_repeated_up_to_a_limit_with_pauses_that_double() -> None:
    clock = Impatient()
    retry = Retry(limit=3, first=timedelta(seconds=1), most=timedelta(seconds=3))
    owner = Owner(OSError(), OSError(), None, *[MemoryError("m")] * 4, retry=retry, clock=clock)
    owner.worker.wake()
    owner.worker.wait(lambda: owner.steps == 3 and owner.worker.error is None, "well again", SOON)
    assert owner.worker.failed_since is None
    owner.worker.wake()
    with pytest.raises(StoppedError, match="MemoryError: m"):
        owner.worker.wait(lambda: False, "what never comes", SOON)
    assert owner.steps == 7
    assert clock.pauses == [1, 0, 1, 1, 1, 0, 1, 1, 1, 2]
    assert len(owner.errors) == 6


def test_what_has_stopped_is_not_repeated() -> None:
    owner = Owner(StoppedError("final"), retry=Retry(limit=None))
    owner.worker.wake()
    with pytest.raises(StoppedError, match="final"):
        owner.worker.wait(lambda: False, "what never comes", SOON)
    assert owner.steps == 1


def test_a_kept_error_holds_nothing_of_its_frames() -> None:
    """Rows and tensors of a failed step would live as long as its error does."""
    work = Work()
    known = weakref.ref(work)

    def step() -> float | None:
        held = box.pop()
        raise MemoryError(str(held is None))

    box = [work]
    del work
    worker = Worker("test-loop", step)
    worker.wake()
    with pytest.raises(StoppedError) as raised:
        worker.wait(lambda: False, "what never comes", SOON)
    assert known() is None
    assert "in step" in "".join(traceback.format_exception(raised.value))
    worker.stop()


def test_a_wait_that_is_over_names_what_it_waited_for() -> None:
    owner = Owner()
    owner.worker.wake()
    with pytest.raises(DeadlineError, match="for the moon, which test-loop has not done") as raised:
        owner.worker.wait(lambda: False, "the moon", timedelta(0))
    assert isinstance(raised.value, TimeoutError)
    owner.worker.close(SOON)


def test_close_ends_although_a_step_does_not() -> None:
    go, began = threading.Event(), threading.Event()

    def step() -> None:
        began.set()
        go.wait()

    worker = Worker("test-loop", step)
    worker.wake()
    assert began.wait(60)
    with pytest.raises(DeadlineError, match="test-loop has not ended within 0 s"):
        worker.close(timedelta(0))
    go.set()
    worker.close(SOON)


def test_a_loop_ends_with_its_owner() -> None:
    owner = Owner()
    owner.worker.wake()
    (thread,) = (t for t in threading.enumerate() if t.name == "test-loop")
    del owner
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_thread_that_cannot_start_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    owner, queue = Owner(), Worker("test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        owner.worker.wake()  # raises nothing: what its caller did is done
        with pytest.raises(RuntimeError):
            queue.do(Work(), lambda _: None)
    with pytest.raises(StoppedError, match="can't start new thread"):
        owner.worker.check()
    assert len(owner.errors) == 1
    with pytest.raises(StoppedError):
        owner.worker.close(SOON)
    assert done(queue, Work()) is None


def test_an_error_of_on_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_type))

    def fails(_: BaseException) -> None:
        raise KeyError

    def step() -> None:
        raise OSError("first")

    worker = Worker("test-loop", step, on_error=fails)
    worker.wake()
    with pytest.raises(StoppedError, match="first"):
        worker.wait(lambda: False, "what never comes", SOON)
    assert shown == [KeyError]
    worker.stop()


def test_a_forked_child_has_no_loop_and_a_queue_of_its_own() -> None:
    owner, queue = Owner(), Worker("test")
    owner.worker.wake()
    owner.worker.wait(lambda: owner.steps == 1, "a step", SOON)
    assert done(queue, Work()) is None
    child = os.fork()
    if not child:
        owner.worker.wake()
        owner.worker.close()
        fine = done(queue, Work()) is None and owner.steps == 1
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    owner.worker.close(SOON)


def test_what_is_shared_with_a_queue_stays_shared_after_close() -> None:
    worker = Worker("test")
    changed = worker.changed
    assert done(worker, Work()) is None
    worker.close(SOON)
    assert done(worker, Work()) is None
    assert worker.changed is changed
    worker.close(SOON)


@pytest.mark.parametrize("where", ["count", "_without_locals"])
def test_the_end_of_a_task_is_heard_also_where_its_error_cannot_be_noted(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("not even that")

    owner = background.background_failures if where == "count" else background
    monkeypatch.setattr(owner, where, fails)

    def task() -> None:
        raise ValueError("on purpose")

    worker = Worker("test")
    assert isinstance(done(worker, task), ValueError)
    assert done(worker, Work()) is None
    worker.close()


def test_a_task_that_comes_while_the_thread_ends_is_done() -> None:
    worker = Worker("test")

    class Late(threading.Condition):
        """Lets the thread end just before it is taken for the next task."""

        armed = False

        def __enter__(self) -> bool:
            if self.armed and threading.current_thread() is threading.main_thread():
                self.armed = False
                worker.stop()
                worker.join()
            return super().__enter__()

    late = Late()
    worker._renew(late)
    assert done(worker, Work()) is None
    late.armed = True
    assert done(worker, Work()) is None
    assert not late.armed
    worker.close()


def test_everything_is_ended_and_the_first_error_raised() -> None:
    ended: list[str] = []

    def fails(name: str) -> None:
        ended.append(name)
        raise ValueError(name)

    with pytest.raises(ValueError, match="b"):
        background.end_all(
            lambda: ended.append("a"), lambda: fails("b"), lambda: fails("c"),
            lambda: ended.append("d"),
        )  # fmt: skip
    assert ended == ["a", "b", "c", "d"]

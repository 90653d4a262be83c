"""Threads of control that a seed takes turns between, on virtual time.

Every thread of a simulated cluster is a thread of the system, but one alone holds the baton. It is
handed on where a thread waits, starts, ends or is preempted, to one that the seed chooses. Time
passes when nobody can run, up to the next wait that is over. So a run is a function of its seed.
"""

from __future__ import annotations

import _thread
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import Any

_PATIENCE_SECONDS = 300.0
_MOST_TURNS = 3_000_000


class Ended(BaseException):
    """The simulation is over: a thread that still waits unwinds.

    Not an `Exception`, so that no handler mistakes it for something to recover from.
    """


class SimulationError(AssertionError):
    """What must never happen has happened in a simulation."""


class StuckError(SimulationError):
    """Everybody waits, or nothing ends within the time that it may take."""


class Process:
    """What stops, dies and has a date of its own together: the threads of one machine's process."""

    def __init__(self, name: str, host: str = "") -> None:
        self.name = name
        self.host = host or name
        """Where it is: a process that takes its place is there, too."""
        self.alive = True
        self.paused = 0
        """How often it was stopped and not resumed since."""
        self.jumped = timedelta(0)
        """How far its date is from that of the others."""
        self._parked: list[Task] = []

    def __repr__(self) -> str:
        return self.name


class Task:
    """A thread of control."""

    __slots__ = (
        "_call", "_token", "carrier", "name", "process", "scheduler", "thread", "waits", "woken",
    )  # fmt: skip
    daemon = True  # as a thread that begins another one is asked

    def __init__(
        self, scheduler: Scheduler, name: str, call: Callable[[], object], process: Process
    ) -> None:
        self.scheduler = scheduler
        self.name = name
        self.process = process
        self.waits = ""
        """What it waits for; nothing while it can run."""
        self.woken = False
        self.thread: Any = None
        """The `threading.Thread` that it runs, if there is one."""
        self.carrier: _Carrier | None = None
        """None until it has its first turn."""
        self._call = call
        self._token = 0


class _Carrier:
    """A thread of the system, which carries one task after the other."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.ident = _thread.start_new_thread(self._carry, ())

    def _carry(self) -> None:
        while True:
            self.baton.acquire()
            task = self.task
            while task is not None:
                # A task that has its first turn when another ends needs no other thread.
                task = task.scheduler._run(task, self)


class _Here(_thread._local):
    """What each thread of the system carries."""

    task: Task | None = None


_idle: list[_Carrier] = []
here = _Here()


def current_task() -> Task | None:
    """The task of the calling thread; None for a thread that is no part of a simulation."""
    return here.task


class Scheduler:
    """Hands the baton on. `preemption` is how often a thread loses it where it takes a lock.

    Nobody but the thread with the baton may call anything here, except `run` and `close`.
    """

    def __init__(self, seed: int | str, *, preemption: float = 0.0) -> None:
        self.random = Random(seed)
        self.preemption = preemption
        self.seconds = 0.0
        self.turns = 0
        self.over = False
        self.failure: BaseException | None = None
        self._tasks: dict[Task, None] = {}
        self._runnable: list[Task] = []
        self._timers: list[tuple[float, int, Task | Callable[[], object], int]] = []
        self._made = 0
        self._main: Task | None = None
        self._stands_still = False
        self._done = _thread.allocate_lock()
        self._done.acquire()

    # -- from outside ----------------------------------------------------------------------------

    def run(self, main: Callable[[], object], process: Process) -> None:
        """Runs `main` and everything that it starts until it ends; raises what ended it."""
        self._main = self.spawn("main", main, process)
        self._runnable.remove(self._main)
        self._hand_to(self._main)
        if not self._done.acquire(timeout=_PATIENCE_SECONDS):
            self._stands_still = True
            raise TimeoutError(f"a simulation stands still in real time:\n{self.describe()}")
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Has every thread that is left unwind, one after the other."""
        if self._stands_still:
            return  # one of them has the baton, and does not hand it on
        self.over = True
        for task in list(self._tasks):
            if task.carrier is None:
                continue  # it never had a turn
            task.carrier.baton.release()
            if not self._done.acquire(timeout=_PATIENCE_SECONDS):
                raise TimeoutError(f"{task.name} of {task.process} does not end")
        self._tasks.clear()
        self._timers.clear()
        self._runnable.clear()
        self._main = None  # workers outlive the run through its clock, and it must not hold them

    # -- threads ---------------------------------------------------------------------------------

    def spawn(self, name: str, call: Callable[[], object], process: Process) -> Task:
        """A thread that can run from now on."""
        task = Task(self, name, call, process)
        self._tasks[task] = None
        self._ready(task)
        return task

    def pass_on(self) -> None:
        """Lets others run, if the seed chooses them."""
        task = self._current()
        self._ready(task)
        self._switch(task)

    def preempt(self) -> None:
        """Maybe lets others run, or stalls for a moment; whenever a lock is taken."""
        if self.preemption and not self.over and self.random.random() < self.preemption:
            if self.random.random() < 0.3:
                self.block("its turn", self.random.random() * 0.02)
            else:
                self.pass_on()

    def block(self, what: str, seconds: float | None = None) -> bool:
        """Waits until somebody wakes the thread; False if the time was over before."""
        task = self._current()
        if self.over:
            raise Ended
        task.waits, task.woken = what, False
        if seconds is not None:
            self._push(self.seconds + max(0.0, seconds), task, task._token)
        self._switch(task)
        return task.woken

    def wake(self, task: Task) -> None:
        """Ends the wait of a thread; nothing if it does not wait."""
        if task.waits:
            task.woken = True
            self._end_wait(task)

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Has something done after so many seconds, by the scheduler itself: it must not wait."""
        self._push(self.seconds + seconds, call, 0)

    # -- processes -------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """None of its threads ever runs again. Not to be called from one of them."""
        process.alive = False
        process._parked.clear()
        self._runnable = [task for task in self._runnable if task.process is not process]

    def pause(self, process: Process) -> None:
        """None of its threads runs until it is resumed as often; time goes on for it."""
        process.paused += 1
        process._parked += [task for task in self._runnable if task.process is process]
        self._runnable = [task for task in self._runnable if task.process is not process]

    def resume(self, process: Process) -> None:
        process.paused -= 1
        if process.alive and not process.paused:
            self._runnable += process._parked
            process._parked.clear()

    # -- details ---------------------------------------------------------------------------------

    def describe(self) -> str:
        """Who waits for what."""
        waiting = sorted(
            f"  {task.process}: {task.name} waits for {task.waits or 'its turn'}"
            for task in self._tasks
            if task.process.alive
        )
        return "\n".join([f"after {self.seconds:.3f} s, {self.turns} turns:", *waiting])

    def _current(self) -> Task:
        task = current_task()
        assert task is not None, "this thread is no part of the simulation"
        return task

    def _push(self, due: float, what: Task | Callable[[], object], token: int) -> None:
        self._made += 1
        heapq.heappush(self._timers, (due, self._made, what, token))

    def _ready(self, task: Task) -> None:
        if not task.process.alive:
            return
        if task.process.paused:
            task.process._parked.append(task)
        else:
            self._runnable.append(task)

    def _end_wait(self, task: Task) -> None:
        task._token += 1
        task.waits = ""
        self._ready(task)

    def _switch(self, task: Task) -> None:
        following = self._next()
        if following is not task:
            assert task.carrier is not None
            self._hand_to(following)
            task.carrier.baton.acquire()
        if self.over:
            raise Ended

    def _hand_to(self, task: Task | None) -> None:
        if task is None:
            self.over = True
            self._done.release()
            return
        carrier = task.carrier
        if carrier is None:
            carrier = _idle.pop() if _idle else _Carrier()
            carrier.task, task.carrier = task, carrier
        carrier.baton.release()

    def _next(self) -> Task | None:
        """The task that has the baton next; None where the run has failed."""
        self.turns += 1
        if self.turns > _MOST_TURNS:
            self.failure = StuckError(f"nothing ends, {self.describe()}")
            return None
        while not self._runnable:
            if not self._timers:
                self.failure = StuckError(f"everybody waits, {self.describe()}")
                return None
            due, _, what, token = heapq.heappop(self._timers)
            if isinstance(what, Task):
                if what._token == token and what.waits:
                    self.seconds = due
                    self._end_wait(what)
                continue
            self.seconds = due
            try:
                what()
            except BaseException as error:
                self.failure = error
            if self.failure is not None:
                return None
        tasks = self._runnable
        chosen = int(self.random.random() * len(tasks)) if len(tasks) > 1 else 0
        task, tasks[chosen] = tasks[chosen], tasks[-1]
        tasks.pop()
        return task

    def _run(self, task: Task, carrier: _Carrier) -> Task | None:
        """The life of a task, on its carrier; the one that it carries next. None once others may
        have the carrier: from then on it waits for its baton."""
        here.task = task
        try:
            if not self.over:
                task._call()
        except Ended:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            here.task = carrier.task = None
        if self.over:
            _idle.append(carrier)
            self._done.release()
            return None
        del self._tasks[task]
        failed = self.failure is not None or task is self._main
        following = None if failed else self._next()
        if following is not None and following.carrier is None:
            following.carrier = carrier
            return following
        _idle.append(carrier)
        self._hand_to(following)
        return None


@contextmanager
def undisturbed() -> Iterator[None]:
    """The calling thread keeps the baton: what is done in the body is done at once."""
    task = current_task()
    if task is None:
        yield
        return
    scheduler = task.scheduler
    before, scheduler.preemption = scheduler.preemption, 0.0
    try:
        yield
    finally:
        scheduler.preemption = before

"""A run that plans itself: measures what saving, loading and failing cost it, and acts on it."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from emberkeep._types import Json
from emberkeep.checkpoint.failure_history import FailureHistory
from emberkeep.checkpoint.recovery import Recovery
from emberkeep.checkpoint.run_plan import Measured, RunPlan, plan_run
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.errors import DamageError
from emberkeep.keeper.costs import Ledger
from emberkeep.keeper.pace import Pace
from emberkeep.keeper.recoverer import Recoverer
from emberkeep.keeper.run_saver import RunSaver
from emberkeep.runtime.clock import Clock
from emberkeep.strategies import Every, Strategy

# Measurements that count: enough for a median, few enough to follow what changes.
_RECENT = 5
# Decisions that a version carries; the history of versions has the earlier ones.
_CARRIED = 10
_UNKNOWN_LENGTH = timedelta(hours=24)


class RunPlanner:
    """Watches one run for a keeper. What it has seen goes into versions, and comes back with them.

    A failure is a loss of shards, or a process that ended without closing its keeper. Safe to use
    from the thread that trains and the one that writes.
    """

    def __init__(
        self, strategy: Strategy, saver: RunSaver, pace: Pace, recoverer: Recoverer | None,
        ledger: Ledger, *, total_steps: int | None, tell: Callable[[str, Json], None],
        clock: Clock,
    ) -> None:  # fmt: skip
        assert strategy.auto is not None
        self._strategy, self._target = strategy, strategy.auto
        self._saver, self._pace, self._recoverer = saver, pace, recoverer
        self._ledger, self._tell = ledger, tell
        self._shards = 1 if recoverer is None else recoverer.shard_count
        self._total = total_steps or None
        self._partial = self._shards > 1 and self._total is not None
        self._clock = clock
        self._lock = threading.Lock()
        self._history = FailureHistory.expected(self._target.mtbf, self._target.together)
        self._counted_at = clock.monotonic()
        self._writes: deque[float] = deque(maxlen=_RECENT)
        self._loads: deque[float] = deque(maxlen=_RECENT)
        self._increments: deque[float] = deque(maxlen=_RECENT)
        self._stalls: deque[float] = deque(maxlen=_RECENT)
        self._stalled = 0.0
        self._wholes = 0
        self._baseline_nbytes = 0
        self._first_look: tuple[int, float] | None = None
        self._stepped = False
        self._ending = False
        self._began = 0
        self.plan: RunPlan | None = None
        self.decisions: list[Json] = []
        self.news = False
        """Whether something has failed since the last review: the next step is one."""

    # -- what happens ----------------------------------------------------------------------------

    def hear(self, event: str, details: Json) -> None:
        """Events of a keeper."""
        with self._lock:
            if event == "saved" and details["whole"]:
                stall = self._take_stall()
                if not self._stepped:
                    # The version of the very beginning holds no row, and was waited for while
                    # everything was made ready: nothing is judged by it.
                    return
                if stall is not None:
                    self._stalls.append(stall)
                self._writes.append(details["commit_ms"] / 1e3)
                if details["kind"] == "full":
                    self._baseline_nbytes = details["nbytes"]
                elif self._baseline_nbytes:
                    self._increments.append(details["nbytes"] / self._baseline_nbytes)
            elif event == "recovered":
                lost = len(details["shards"])
                self._history = self._passed().failed(lost if lost < self._shards else None)
                self.news = True
                if details["scope"] != "parity":
                    self._loads.append(max(0.0, details["seconds"]))

    def _take_stall(self) -> float | None:
        """What the newest version added to the time that training stood still."""
        mean = self._ledger.stall_of_version
        if mean is None:
            return None
        self._wholes += 1
        total = mean * self._wholes
        before, self._stalled = self._stalled, total
        return max(0.0, total - before)

    def starts_at(self, step: int) -> None:
        """The run begins with another's version of that step: its own steps count from there."""
        self._began = step

    def resumed(self, counters: Json, seconds: float, *, another: bool) -> None:
        """A version was brought back. If `another` process wrote it, what was known then is known
        again, and every restore since was a failure, but for the first after a keeper that had been
        closed. This process knows better otherwise.

        A plan for another target is not followed: the run starts as its strategy says.
        """
        with self._lock:
            self._first_look = None  # steps are taken again: how long they take is measured again
            saved = counters.get("auto")
            if saved is None or not another:
                return
            if not isinstance(saved, dict):
                raise DamageError("the counters of a version are damaged: auto is no document")
            self._counted_at = self._clock.monotonic()
            self.decisions = list(saved.get("decisions", ()))
            self._began = int(saved.get("began", 0))
            for name, values in (("loads", self._loads), ("writes", self._writes),
                                 ("stalls", self._stalls)):  # fmt: skip
                values.extend(float(value) for value in saved.get(name, ()))
            self._loads.append(seconds)
            history = FailureHistory.from_dict(saved.get("failures", {}))
            failures = self._saver.restores - int(saved.get("restores", self._saver.restores - 1))
            failures -= bool(saved.get("ended"))
            if history.seen or failures > 0:  # else nothing was seen, and belief may be another now
                self._history = history
            for number in range(max(0, failures)):
                # The last one was the end of a process; of the others nobody knows.
                total = number == failures - 1
                self._history = self._history.failed(None if total else self._history.together)
            if saved.get("plan") and saved.get("target", self._target.text) == self._target.text:
                self.plan = RunPlan.from_dict(saved["plan"])
        if self.plan is not None:
            self._follow(self.plan)

    def end(self) -> None:
        """The next version is the last one: who brings it back has not lost anything."""
        self._ending = True

    def go_on(self) -> None:
        """It was not: the run trains on."""
        self._ending = False

    def counters(self) -> Json:
        """For the next version."""
        with self._lock:
            self._history = self._passed()
            return {
                "auto": {
                    "target": self._target.text,
                    "restores": self._saver.restores,
                    "failures": self._history.to_dict(),
                    "plan": None if self.plan is None else self.plan.to_dict(),
                    "decisions": self.decisions[-_CARRIED:],
                    "loads": list(self._loads),
                    "writes": list(self._writes),
                    "stalls": list(self._stalls),
                    "ended": self._ending,
                    "began": self._began,
                }
            }

    def _passed(self) -> FailureHistory:
        now = self._clock.monotonic()
        history = self._history.passed(timedelta(seconds=max(0.0, now - self._counted_at)))
        self._counted_at = now
        return history

    # -- what follows ----------------------------------------------------------------------------

    def review(self, step: int) -> None:
        """Plans what is left, if what was seen has moved, and tells of it as "planned"; not before
        a version was measured, or a recovery, and not at the end."""
        with self._lock:
            self._stepped, self.news = True, False
            made = self._plan(step)
            if made is None or made is self.plan:
                return
            self.plan = made
            self.decisions = [*self.decisions, made.to_dict()][-_CARRIED:]
        self._follow(made)
        self._tell("planned", made.to_dict())

    def _plan(self, step: int) -> RunPlan | None:
        now = self._clock.monotonic()
        if self._first_look is None or step < self._first_look[0]:
            self._first_look = (step, now)
        taken, own_steps = step - self._first_look[0], step - self._began
        if not (self._writes or self._loads) or own_steps == self._total:
            return None
        if not taken:
            self._pace.look_soon()  # how long a step takes is known then
            return None
        self._history = self._passed()
        left, done = _UNKNOWN_LENGTH, 0.0
        if self._total is not None and own_steps < self._total:  # else it is longer than was said
            per_step = (now - self._first_look[1]) / taken
            left = timedelta(seconds=per_step * (self._total - own_steps))
            done = max(0.0, own_steps / self._total)
        # What was not measured yet takes as long as what was.
        write = _median(self._writes or self._loads)
        seen = Measured(
            left=left,
            done=done,
            shards=self._shards,
            pls=0.0 if self._recoverer is None else self._recoverer.losses.pls,
            stall=timedelta(seconds=_median(self._stalls) if self._stalls else write),
            write=timedelta(seconds=write),
            load=timedelta(seconds=_median(self._loads) if self._loads else write),
            failures=self._history,
            increments=statistics.fmean(self._increments) if self._increments else None,
            restores=self._saver.lossy_restores,
        )
        return plan_run(self._target, seen, self.plan, partial=self._partial, step=step)

    def _follow(self, plan: RunPlan) -> None:
        """From here on; what the plan says nothing of stays as the strategy has it."""
        partial = plan.scope == "partial"
        self._saver.follow(VersionSpec(layout=plan.layout, bits=plan.bits))
        self._pace.follow(
            Every(time=plan.interval), Every(time=plan.least_interval) if partial else None
        )
        if self._recoverer is not None:
            bound = plan.most_pls if partial else 1.0
            self._recoverer.follow(
                Recovery(
                    scope=plan.scope, most_pls=bound, together=plan.together, reason=plan.reason
                )
            )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0

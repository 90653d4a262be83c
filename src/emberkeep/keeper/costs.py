"""What keeping costs: counted as it happens, reported as figures or in the format of Prometheus."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from emberkeep.erasure.status import ParityStatus
from emberkeep.errors import ConfigError
from emberkeep.keeper.mirror import MirrorStatus
from emberkeep.keeper.torch_tables import Hook
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.metrics import MetricsServer, Registry, Sample, families

# So many steps without a save beside them are needed to say how much one slowed steps down.
_LEAST_STEPS = 5
_MOST_STEPS = 200
# What a run remembers of single versions; sums are of all.
_MOST_VERSIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCost:
    """What one version has cost.

    Training stands still for `pause_ms` and then for `held_ms`. `slowdown_ms` is what steps show of
    both and of everything else that the save takes from them (cores, memory): never add it to them.
    """

    version: int | None
    """Its number; a tier has none."""
    step: int
    kind: str
    nbytes: int
    pause_ms: float
    """How long training stood still while it was cut."""
    held_ms: float
    """How long pushes were held up between the cut and the commit: they copied rows that they were
    about to change, or waited for room for that. Shards of this process one after another; of
    servers that of the slowest. A batch of a tier holds none up."""
    slowdown_ms: float | None
    """How much longer the steps took from the cut to the commit than as many without a save beside
    them, by their median: the stall, `pause_ms` and `held_ms` included. None if too few steps
    were seen to say; noise may make it negative."""
    core_seconds: float | None
    """Processor time of the threads that wrote it, those of servers included; without that of
    pushes and of later extraction. None where it is not counted."""
    commit_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one process has spent on versions so far."""

    versions: int
    """Versions that it committed."""
    failed: int
    pause_ms_median: float
    """How long training stood still when a version was cut."""
    pause_ms_max: float
    stall_seconds: float
    """How long training stood still for versions in all: cuts (`pause_seconds`), waits for an
    earlier version to be written, and rows copied before they were overwritten (`held_seconds`, of
    versions that were committed)."""
    commit_seconds_median: float
    """From the cut until the version was durable."""
    written_nbytes: int
    kept_nbytes: int
    """What the repository holds now, older versions included."""
    pause_seconds: float = 0.0
    """How long training stood still while versions were cut, in all."""
    held_seconds: float = 0.0
    """The sum of `held_ms` of all versions."""
    restoring_seconds: float = 0.0
    """How long training stood still while rows were brought back: resumes and recoveries, which
    are no part of `stall_seconds`."""
    core_seconds: float | None = None
    """Processor time for all versions; None where it is not counted."""
    slowdown_seconds: float | None = None
    """The sum of `slowdown_ms` of those versions of which it is known; None if of none. It is
    measured by steps, `stall_seconds` by what stands still: each holds most of the other."""
    each: tuple[VersionCost, ...] = ()
    """The last thousand versions, one by one."""
    mirror: MirrorStatus | None = None
    """What the mirror has; None without one."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Costs:
        """As another process has it, which sent it as JSON."""
        mirror = document.get("mirror")
        return cls(
            **{
                **document,
                "each": tuple(VersionCost(**cost) for cost in document.get("each", ())),
                "mirror": None if mirror is None else MirrorStatus(**mirror),
            }
        )


def metrics_server(
    page: Callable[[], str], port: int, not_ready: Callable[[], str | None]
) -> MetricsServer:
    try:
        return MetricsServer(page, port, not_ready=not_ready)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served on port {port}: {error.strerror}; choose another "
            "metrics_port, or 0 for any free one"
        ) from None


class _Beside:
    """A save under way, and how long steps take beside it."""

    def __init__(self) -> None:
        self.pause_ms: float | None = None
        self.steps: list[float] = []
        self.cost: VersionCost | None = None
        self.ended = False


class Ledger:
    """Counts. Safe to use from the thread that trains and the one that writes."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses_ms: list[float] = []
        self._commits_ms: list[float] = []
        self._each: deque[VersionCost] = deque(maxlen=_MOST_VERSIONS)
        self._core_seconds: float | None = None
        self._slowdown_seconds: float | None = None
        self._undisturbed: deque[float] = deque(maxlen=_MOST_STEPS)
        self._stepped_at: float | None = None
        self._beside: _Beside | None = None
        # Of versions that are whole, and of prioritised ones.
        self._saving_seconds = {True: 0.0, False: 0.0}
        self._saved = {True: 0, False: 0}
        self._stood_seconds = 0.0
        self.restoring_seconds = 0.0
        self._held_seconds = 0.0
        self.written_nbytes = 0
        self.failed = 0
        self.cancelled = 0
        self.resumed = 0
        self._step = 0
        self.version = 0

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        """A step has ended, or another one was resumed."""
        now = self._clock.monotonic()
        with self._lock:
            if self._stepped_at is not None and step == self._step + 1:
                seconds = now - self._stepped_at
                if self._beside is None:
                    self._undisturbed.append(seconds)
                else:
                    self._beside.steps.append(seconds)
                    if self._beside.ended:
                        self._note_slowdown()
            self._step, self._stepped_at = step, now

    def cutting(self) -> None:
        """A version is about to be cut: before anything of it can end."""
        with self._lock:
            self._note_slowdown()
            self._beside = _Beside()

    def paused(self, pause_ms: float, *, whole: bool = True, waited_ms: float = 0.0) -> None:
        """Training stood still to cut a version, after it had waited for the one before."""
        with self._lock:
            self._pauses_ms.append(pause_ms)
            self._saving_seconds[whole] += (pause_ms + waited_ms) / 1e3
            beside = self._beside
            if beside is None:
                return
            beside.pause_ms = pause_ms
            if beside.cost is not None:  # it is committed already
                beside.cost = self._replace(beside.cost, pause_ms=pause_ms)

    def _replace(self, cost: VersionCost, **changes: Any) -> VersionCost:
        """One that is remembered, with what is known by now."""
        at = next(i for i, each in enumerate(self._each) if each is cost)
        self._each[at] = replace(cost, **changes)
        return self._each[at]

    def _note_slowdown(self) -> None:
        """What the steps beside the last save say of it."""
        beside, self._beside = self._beside, None
        if beside is None or beside.cost is None:
            return
        if beside.steps and len(self._undisturbed) >= _LEAST_STEPS:
            usual = statistics.median(self._undisturbed) * len(beside.steps)
            slowdown = sum(beside.steps) - usual
            self._slowdown_seconds = (self._slowdown_seconds or 0.0) + slowdown
            self._replace(beside.cost, slowdown_ms=slowdown * 1e3)

    @property
    def stall_seconds(self) -> float:
        """Pushes run outside of `stalling`: nothing is counted twice."""
        return self._stood_seconds + self._held_seconds

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """A body in which training stands still; what is `restoring` in it does not count."""
        start, before = self._clock.monotonic(), self.restoring_seconds
        try:
            yield
        finally:
            restoring = self.restoring_seconds - before
            self._stood_seconds += self._clock.monotonic() - start - restoring

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A body that brings rows back: training stands still, but no version costs that."""
        start, before = self._clock.monotonic(), self.restoring_seconds
        try:
            yield
        finally:  # once, where one stands in another
            self.restoring_seconds = before + self._clock.monotonic() - start

    def timed(self, hook: Hook) -> Hook:
        def timed(*given: Any) -> None:
            start = self._clock.monotonic()
            with self.stalling():
                hook(*given)
            with self._lock:
                self._saving_seconds[True] += self._clock.monotonic() - start

        return timed

    def hear(self, event: str, details: dict[str, Any]) -> None:
        """What the thread that writes tells of a save."""
        if event == "saved":
            with self._lock:
                self._commits_ms.append(details["commit_ms"])
                self._saved[details["whole"]] += 1
                self._saving_seconds[details["whole"]] += details["held_seconds"]
                self._held_seconds += details["held_seconds"]
                self.written_nbytes += details["nbytes"]
                self.version = details["version"] or 0  # a tier has none
                beside = self._beside if self._beside and not self._beside.ended else None
                cost = VersionCost(
                    version=details["version"], step=details["step"], kind=details["kind"],
                    nbytes=details["nbytes"], slowdown_ms=None,
                    pause_ms=details["pause_ms"],
                    held_ms=details["held_seconds"] * 1e3,
                    core_seconds=details.get("core_seconds"),
                    commit_seconds=details["commit_ms"] / 1e3,
                )  # fmt: skip
                self._each.append(cost)
                if cost.core_seconds is not None:
                    self._core_seconds = (self._core_seconds or 0.0) + cost.core_seconds
                if beside is not None:
                    if beside.pause_ms is not None:
                        cost = self._replace(cost, pause_ms=beside.pause_ms)
                    beside.cost, beside.ended = cost, True
        elif event in ("save_failed", "save_cancelled"):
            self.failed += event == "save_failed"
            self.cancelled += event == "save_cancelled"
            with self._lock:
                if self._beside is not None:
                    self._beside.ended = True

    def costs(self, kept_nbytes: int, mirror: MirrorStatus | None = None) -> Costs:
        with self._lock:
            if self._beside is not None and self._beside.ended:
                self._note_slowdown()
            return Costs(
                versions=len(self._commits_ms),
                failed=self.failed,
                pause_ms_median=statistics.median(self._pauses_ms or [0.0]),
                pause_ms_max=max(self._pauses_ms, default=0.0),
                stall_seconds=self.stall_seconds,
                commit_seconds_median=statistics.median(self._commits_ms or [0.0]) / 1e3,
                written_nbytes=self.written_nbytes,
                kept_nbytes=kept_nbytes,
                pause_seconds=sum(self._pauses_ms) / 1e3,
                held_seconds=self._held_seconds,
                restoring_seconds=self.restoring_seconds,
                core_seconds=self._core_seconds,
                slowdown_seconds=self._slowdown_seconds,
                each=tuple(self._each),
                mirror=mirror,
            )

    def counters(self) -> dict[str, Any]:
        """What versions have cost so far, for the next one to tell: `emberkeep plan` reads it."""
        with self._lock:
            return {
                "versions": len(self._commits_ms),
                "whole_versions": self._saved[True],
                "saving_seconds": round(self._saving_seconds[True], 6),
                "prioritised_seconds": round(self._saving_seconds[False], 6),
                "stall_seconds": round(self.stall_seconds, 6),
                "written_nbytes": self.written_nbytes,
            }

    @property
    def stall_of_version(self) -> float | None:
        """Seconds for which training stood still for a whole version, on average; None before
        there was one."""
        with self._lock:
            if not self._saved[True]:
                return None
            return self._saving_seconds[True] / self._saved[True]

    def exposition(self, parities: Sequence[ParityStatus] = (), more: Sequence[Sample] = ()) -> str:
        """The page for Prometheus: these counts and `more`, how well clusters are protected, what
        failed in the background, and what the system knows of the process."""
        alone = len(parities) == 1
        protected = [
            ({} if alone else {"cluster": str(i)}, parity.samples())
            for i, parity in enumerate(parities)
        ]
        found = [*families(({}, self._samples()), ({}, more)), *families(*protected)]
        return Registry(lambda: found, background_failures.families).text()

    def _samples(self) -> list[Sample]:
        with self._lock:
            return [
                ("versions_total", "counter", "versions committed", len(self._commits_ms)),
                ("failed_saves_total", "counter", "saves that failed", self.failed),
                ("cancelled_saves_total", "counter", "saves given up for newer ones",
                 self.cancelled),
                ("resumes_total", "counter", "versions restored", self.resumed),
                ("core_seconds_total", "counter", "processor time spent on versions",
                 self._core_seconds or 0.0),
                ("written_bytes_total", "counter", "bytes written", self.written_nbytes),
                ("pause_seconds_total", "counter", "training stood still while versions were cut",
                 sum(self._pauses_ms) / 1e3),
                ("pause_seconds_max", "gauge", "the longest of these", max(
                    self._pauses_ms, default=0.0) / 1e3),
                ("held_seconds_total", "counter",
                 "pushes were held up by copies of rows that versions had yet to read",
                 self._held_seconds),
                ("stall_seconds_total", "counter", "training stood still for versions in all",
                 self.stall_seconds),
                ("restoring_seconds_total", "counter",
                 "training stood still while versions were brought back", self.restoring_seconds),
                ("commit_seconds_last", "gauge", "from cut to durable, of the newest version",
                 self._commits_ms[-1] / 1e3 if self._commits_ms else 0.0),
                ("step", "gauge", "steps taken", self.step),
                ("version", "gauge", "the newest version committed or restored", self.version),
            ]  # fmt: skip

"""What keeping costs: counted as it happens, reported as figures or in the format of Prometheus."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from emberkeep.erasure.status import ParityStatus
from emberkeep.keeper.torch_tables import Hook
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.metrics import Registry, Sample, families


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
    """How long training stood still for the keeper in all: cuts, waits for an earlier version to
    be written, and rows copied before they were overwritten."""
    commit_seconds_median: float
    """From the cut until the version was durable."""
    written_nbytes: int
    kept_nbytes: int
    """What the repository holds now, older versions included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """Counts. Safe to use from the thread that trains and the one that writes."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pauses_ms: list[float] = []
        self._commits_ms: list[float] = []
        # Of versions that are whole, and of prioritised ones.
        self._saving_seconds = {True: 0.0, False: 0.0}
        self._saved = {True: 0, False: 0}
        self.stall_seconds = 0.0
        self.written_nbytes = 0
        self.failed = 0
        self.cancelled = 0
        self.resumed = 0
        self.step = 0
        self.version = 0

    def paused(self, pause_ms: float, *, whole: bool = True, waited_ms: float = 0.0) -> None:
        """Training stood still to cut a version, after it had waited for the one before."""
        self._pauses_ms.append(pause_ms)
        with self._lock:
            self._saving_seconds[whole] += (pause_ms + waited_ms) / 1e3

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """A body in which training stands still."""
        start = self._clock.monotonic()
        try:
            yield
        finally:
            self.stall_seconds += self._clock.monotonic() - start

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
                self.written_nbytes += details["nbytes"]
                self.version = details["version"] or 0  # a tier has none
        elif event == "save_failed":
            self.failed += 1
        elif event == "save_cancelled":
            self.cancelled += 1

    def costs(self, kept_nbytes: int) -> Costs:
        with self._lock:
            return Costs(
                versions=len(self._commits_ms),
                failed=self.failed,
                pause_ms_median=statistics.median(self._pauses_ms or [0.0]),
                pause_ms_max=max(self._pauses_ms, default=0.0),
                stall_seconds=self.stall_seconds,
                commit_seconds_median=statistics.median(self._commits_ms or [0.0]) / 1e3,
                written_nbytes=self.written_nbytes,
                kept_nbytes=kept_nbytes,
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
                ("written_bytes_total", "counter", "bytes written", self.written_nbytes),
                ("pause_seconds_total", "counter", "training stood still while versions were cut",
                 sum(self._pauses_ms) / 1e3),
                ("pause_seconds_max", "gauge", "the longest of these", max(
                    self._pauses_ms, default=0.0) / 1e3),
                ("stall_seconds_total", "counter", "training stood still for the keeper in all",
                 self.stall_seconds),
                ("commit_seconds_last", "gauge", "from cut to durable, of the newest version",
                 self._commits_ms[-1] / 1e3 if self._commits_ms else 0.0),
                ("step", "gauge", "steps taken", self.step),
                ("version", "gauge", "the newest version committed or restored", self.version),
            ]  # fmt: skip

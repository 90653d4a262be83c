"""What went wrong in background threads, for Prometheus and for logs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ThreadFailures:
    """What the threads of one name have met so far."""

    errors: int
    last: str
    """The last error, in one line; empty where it was not kept."""
    stopped_since: float | None
    """The time (Unix) since when one of them is missing; None if none is."""


class BackgroundFailures:
    """What went wrong in the background threads of this process, by the name of the thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._errors: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._stopped: dict[int, tuple[str, float]] = {}

    def count(self, name: str, error: BaseException | None = None) -> None:
        with self._lock:
            self._errors[name] += 1
        if error is not None:
            with suppress(Exception):  # what an error says of itself may fail, too
                said = " ".join(f"{type(error).__name__}: {error}".split())
                self._last[name] = said[:_MOST_CHARACTERS]

    def stopped(self, thread: object, name: str, since: float) -> None:
        """A thread has ended with an error, and what it did is not done any more."""
        with self._lock:
            self._stopped[id(thread)] = (name, since)

    def forget(self, thread: object) -> None:
        """The owner of a thread has closed it."""
        with self._lock:
            self._stopped.pop(id(thread), None)

    def errors(self, name: str) -> int:
        return self._errors[name]

    def stopped_since(self, name: str) -> float | None:
        """The time (Unix) since when a thread of that name is missing."""
        with self._lock:
            stopped = [since for thread, since in self._stopped.values() if thread == name]
        return min(stopped, default=None)

    def by_thread(self) -> dict[str, ThreadFailures]:
        """Every thread that has met an error."""
        with self._lock:
            return {
                name: ThreadFailures(
                    self._errors[name], self._last.get(name, ""), self.stopped_since(name)
                )
                for name in sorted(self._errors)
            }

    def families(self, labels: Mapping[str, str] | None = None) -> list[Metric]:
        """Counts of every thread that has met an error; nothing where none has."""
        found = self.by_thread()
        if not found:
            return []
        from prometheus_client import Metric

        errors = Metric("emberkeep_background_errors", "errors in background threads", "counter")
        stopped = Metric(
            "emberkeep_background_stopped_since_seconds",
            "Unix time since when a background thread is missing; 0 if none is", "gauge",
        )  # fmt: skip
        for name, thread in found.items():
            labelled = {**(labels or {}), "thread": name}
            errors.add_sample(f"{errors.name}_total", labelled, float(thread.errors))
            stopped.add_sample(stopped.name, labelled, thread.stopped_since or 0.0)
        return [errors, stopped]


background_failures = BackgroundFailures()

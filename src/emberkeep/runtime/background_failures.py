"""What went wrong in background threads, for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter


class BackgroundFailures:
    """What went wrong in the background threads of this process, by the name of the thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._errors: Counter[str] = Counter()
        self._stopped: dict[int, tuple[str, float]] = {}

    def count(self, name: str) -> None:
        with self._lock:
            self._errors[name] += 1

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

    def exposition(self, labels: str = "") -> str:
        """Counts of every thread that has met an error; nothing where none has."""
        with self._lock:
            names = sorted(self._errors)
        if not names:
            return ""
        inner = labels.strip("{}") and labels.strip("{}") + ","
        lines = [
            "# HELP emberkeep_background_errors_total errors in background threads",
            "# TYPE emberkeep_background_errors_total counter",
            *(
                f'emberkeep_background_errors_total{{{inner}thread="{name}"}} {self.errors(name)}'
                for name in names
            ),
            "# HELP emberkeep_background_stopped_since_seconds Unix time; 0: it has not stopped",
            "# TYPE emberkeep_background_stopped_since_seconds gauge",
            *(
                f'emberkeep_background_stopped_since_seconds{{{inner}thread="{name}"}} '
                f"{self.stopped_since(name) or 0.0}"
                for name in names
            ),
        ]
        return "\n".join(lines) + "\n"


background_failures = BackgroundFailures()

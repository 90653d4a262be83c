"""What a shard server counts, for Prometheus and for `emberkeep cluster status`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from emberkeep._types import Json
from emberkeep.runtime.background_failures import background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.metrics import Histogram, Sample, exposition

_STATES = ("empty", "recovering", "serving", "lost")


class Metrics:
    """Counts of one server process. Increments may race: they are figures, not accounts."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.pulls = Histogram("pull_seconds", "from the request's arrival to the reply")
        self.pushes = Histogram("push_seconds", "from the request's arrival to the reply")
        self.rows_pulled = 0
        self.rows_pushed = 0
        self.waiting = 0
        self.refused = 0
        self.epoch = 0
        self._run: Json = {}

    @contextmanager
    def pulling(self, rows: int) -> Iterator[None]:
        with self._timed(self.pulls):
            yield
        self.rows_pulled += rows

    @contextmanager
    def pushing(self, rows: int) -> Iterator[None]:
        with self._timed(self.pushes):
            yield
        self.rows_pushed += rows

    @contextmanager
    def _timed(self, histogram: Histogram) -> Iterator[None]:
        start = self._clock.monotonic()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            histogram.add(self._clock.monotonic() - start)

    def admitted(self, epoch: int) -> None:
        self.epoch = epoch

    def follow(self, run: Json) -> None:
        """What the coordinator says of the run with its heartbeat: version, its age, PLS."""
        self._run = {key: float(run[key]) for key in ("version", "version_at", "pls") if key in run}

    def to_dict(self) -> Json:
        return {
            "pulls": self.pulls.count,
            "pushes": self.pushes.count,
            "rows_pulled": self.rows_pulled,
            "rows_pushed": self.rows_pushed,
            "waiting": self.waiting,
            "refused": self.refused,
            **self._run,
        }

    def exposition(
        self, *, shard: int | None, state: str, dirty_rows: int, more: Sequence[Sample] = ()
    ) -> str:
        labels = "" if shard is None else f'{{shard="{shard}"}}'
        samples: list[Sample] = [
            ("rows_pulled_total", "counter", "rows read by workers", self.rows_pulled),
            ("rows_pushed_total", "counter", "rows updated by workers", self.rows_pushed),
            ("queue_depth", "gauge", "requests that wait or are worked on", self.waiting),
            ("refused_total", "counter", "requests that were refused", self.refused),
            ("dirty_rows", "gauge", "rows changed since the last cut", dirty_rows),
            ("epoch", "gauge", "how often the shard was replaced, and once more", self.epoch),
            *(
                (f"state_{name}", "gauge", f"1 while the shard is {name}", float(state == name))
                for name in _STATES
            ),
            *more,
        ]
        if "version" in self._run:
            now = self._clock.now().timestamp()
            age = now - self._run.get("version_at", now)
            samples += [
                ("version", "gauge", "the newest version", self._run["version"]),
                ("version_age_seconds", "gauge", "since it was saved", age),
            ]
        if "pls" in self._run:
            samples.append(("pls", "gauge", "portion of lost samples", self._run["pls"]))
        return (
            exposition(samples, labels)
            + self.pulls.exposition(labels)
            + self.pushes.exposition(labels)
            + background_failures.exposition(labels)
        )

"""What a shard server counts, for Prometheus and for `emberkeep cluster status`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emberkeep._types import Json
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.metrics import Histogram, Sample

_FIGURES = ("version", "version_at", "pls", "step")


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
        self.admissions = 0
        self.trainer = ""
        """Node and process of the coordinator."""
        self.run_name = ""
        self._run: dict[str, float] = {}

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

    def admitted(self, epoch: int, trainer: str = "") -> None:
        self.epoch = epoch
        self.admissions += 1
        self.trainer = trainer
        self.run_name = ""
        self._run = {}

    def follow(self, run: Json) -> None:
        """What the coordinator says of the run with its heartbeat: its name, version and age,
        PLS and step."""
        self.run_name = str(run.get("name", self.run_name))
        self._run = {key: float(run[key]) for key in _FIGURES if run.get(key) is not None}

    @property
    def step(self) -> int | None:
        """As the coordinator says; None if it does not."""
        return int(self._run["step"]) if "step" in self._run else None

    def to_dict(self) -> Json:
        return {
            "pulls": self.pulls.count,
            "pushes": self.pushes.count,
            "rows_pulled": self.rows_pulled,
            "rows_pushed": self.rows_pushed,
            "waiting": self.waiting,
            "refused": self.refused,
            "admissions": self.admissions,
            **self._run,
        }

    def samples(self) -> list[Sample]:
        """The same for Prometheus, histograms excepted."""
        samples: list[Sample] = [
            ("rows_pulled_total", "counter", "rows read by workers", self.rows_pulled),
            ("rows_pushed_total", "counter", "rows updated by workers", self.rows_pushed),
            ("queue_depth", "gauge", "requests that wait or are worked on", self.waiting),
            ("refused_total", "counter", "requests that were refused", self.refused),
            ("epoch", "gauge", "how often the shard was replaced, and once more", self.epoch),
            ("admissions_total", "counter", "runs, and replacements, that this process was for",
             self.admissions),
        ]  # fmt: skip
        if "version" in self._run:
            now = self._clock.now().timestamp()
            age = now - self._run.get("version_at", now)
            samples += [
                ("version", "gauge", "the newest version", self._run["version"]),
                ("version_age_seconds", "gauge", "since it was saved", age),
            ]
        if "pls" in self._run:
            samples.append(("pls", "gauge", "portion of lost samples", self._run["pls"]))
        return samples

"""Simulated jobs: failures strike at random or recorded times, and what happens is counted.

Nothing here is an estimate. A job works, saves, is struck (also while it saves or recovers), goes
back or goes on, and ends. `checkpoint.overheads` predicts the mean of this; percentiles and the
proof that the prediction holds come from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import numpy as np

from emberkeep._types import F64, I64
from emberkeep.checkpoint.failure_gaps import Gaps
from emberkeep.checkpoint.overheads import Job
from emberkeep.errors import ConfigError

HOUR = timedelta(hours=1)
JOBS = 1000
_MOST_FAILURES = 20_000
"""Of one job: who needs more does not get anywhere."""
_AT_ONCE = 2_000_000
"""Failures that are drawn at once, for memory: more are drawn for some of the jobs at a time."""

Mode = Literal["full", "partial", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tactic:
    """How simulated jobs save and recover; times that are not given are the job's."""

    mode: Mode
    interval: timedelta
    """Work between whole versions."""
    save: timedelta | None = None
    load: timedelta | None = None
    rounds: int = 1
    """Saves for each whole version; the others are prioritised."""
    fraction: float = 0.0
    """Of a whole save's time, for a prioritised one."""
    most_pls: float = math.inf
    least_interval: timedelta = timedelta(0)
    slowdown: float = 0.0
    """Of every step, as a share of its time."""
    spare: int = 0
    """Shards that parity brings back when they are lost at once."""
    rebuild_drop: float = 0.0
    """Of throughput, while a shard is rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Many jobs under one tactic; arrays have one entry for each job."""

    overhead: F64
    """As a fraction of the job's length; infinite for a job that got nowhere."""
    saving: F64
    restarting: F64
    again: F64
    pls: F64
    full_recoveries: F64
    failures: F64
    versions: F64

    @property
    def mean(self) -> float:
        return float(self.overhead.mean())

    def percentiles(self, *shares: float) -> list[float]:
        return [float(v) for v in np.quantile(self.overhead, shares, method="higher")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strikes:
    """When failures strike each of many jobs, in hours, and what they take."""

    times_JF: F64
    counts_JF: I64
    firsts_JF: I64


def simulate(
    job: Job,
    tactic: Tactic,
    *,
    jobs: int = JOBS,
    seed: int = 0,
    together: Sequence[int] = (),
) -> Simulated:
    """So many jobs, each with failures of its own; the same seed strikes every tactic alike.

    `together` are recorded numbers of shards that failed at once, drawn from for each failure; if
    there are none, each takes as many as the job says.
    """
    from emberkeep.kernels import job_events

    columns = min(16 + math.ceil(3 * job.failures), _MOST_FAILURES)
    out, short = _run(job, tactic, jobs, columns, seed, together)
    while short and columns < _MOST_FAILURES:
        columns = min(4 * columns, _MOST_FAILURES)
        out, short = _run(job, tactic, jobs, columns, seed, together)
    hours = max(job.duration / HOUR, 1e-9)
    C = job_events
    stuck = out[:, C.WALL] == 0
    overhead = out[:, C.WALL] / hours - 1
    if short:
        ended = out[:, C.RECOVERIES] < columns
        overhead = np.where(ended & ~stuck, overhead, np.inf)
    return Simulated(
        overhead=overhead,
        saving=out[:, C.SAVING] / hours,
        restarting=out[:, C.RESTARTING] / hours,
        again=out[:, C.AGAIN] / hours,
        pls=out[:, C.PLS].copy(),
        full_recoveries=out[:, C.FULL_RECOVERIES].copy(),
        failures=out[:, C.RECOVERIES].copy(),
        versions=out[:, C.VERSIONS].copy(),
    )


def _run(
    job: Job, tactic: Tactic, jobs: int, columns: int, seed: int, together: Sequence[int]
) -> tuple[F64, int]:
    """What the jobs came to, and how many had not enough failures drawn."""
    from emberkeep.kernels import job_events

    out = np.zeros((jobs, job_events.COLUMNS))
    modes = {"full": job_events.FULL, "partial": job_events.PARTIAL, "parity": job_events.PARITY}
    save = (job.save if tactic.save is None else tactic.save) / HOUR
    load = (job.load if tactic.load is None else tactic.load) / HOUR
    reschedule = job.reschedule / HOUR
    short, each = 0, max(1, _AT_ONCE // columns)
    for number, first in enumerate(range(0, jobs, each)):
        part = out[first : first + each]
        strikes = drawn_strikes(job, len(part), columns, seed=seed, together=together, part=number)
        short += job_events.run_jobs(
            strikes.times_JF, strikes.counts_JF, strikes.firsts_JF, modes[tactic.mode],
            max(job.duration / HOUR, 1e-9), job.shards, tactic.interval / HOUR, save,
            tactic.rounds, save * tactic.fraction, load + reschedule, tactic.most_pls,
            tactic.least_interval / HOUR, job.failing_together, 1 / (1 + tactic.slowdown),
            tactic.spare, reschedule, load, 1 - tactic.rebuild_drop, part,
        )  # fmt: skip
    return out, short


def drawn_strikes(
    job: Job, jobs: int, columns: int, *, seed: int, together: Sequence[int] = (), part: int = 0
) -> Strikes:
    """Failures of each job from a stream of its own: more columns change no earlier failure. Other
    parts of the same seed are other jobs."""
    key = [part] if part else []
    streams = [np.random.default_rng([seed, purpose, *key]) for purpose in (1, 2, 3)]
    gaps = drawn_gaps(job.gaps, jobs, columns, streams[0]) * (job.mtbf / HOUR)
    if together:
        wrong = [count for count in together if count < 1]
        if wrong:
            raise ConfigError(f"1 shard or more fails at a time, not {wrong[0]}")
        counts = np.minimum(
            streams[1].choice(np.asarray(together, np.int64), (columns, jobs)).T, job.shards
        )
    else:
        counts = np.full((jobs, columns), job.failing_together, np.int64)
    firsts = streams[2].integers(0, job.shards, (columns, jobs)).T
    return Strikes(
        times_JF=np.ascontiguousarray(np.cumsum(gaps, axis=1)),
        counts_JF=np.ascontiguousarray(counts, np.int64),
        firsts_JF=np.ascontiguousarray(firsts, np.int64),
    )


def drawn_gaps(gaps: Gaps, jobs: int, columns: int, random: np.random.Generator) -> F64:
    """Gaps in means, failure by failure for all jobs. A job starts at any moment: the gap that it
    starts in is likely to be a long one, and part of it has passed."""
    shape = (columns, jobs)
    if gaps.kind == "recorded":
        # Runs of the record as it was: what follows a failure there follows it here.
        recorded = np.asarray(gaps.recorded) / np.mean(gaps.recorded)
        ends = np.cumsum(recorded)
        moment = random.random(jobs) * ends[-1]
        at = np.minimum(np.searchsorted(ends, moment, side="right"), ends.size - 1)
        order = (at[:, None] + np.arange(columns)) % recorded.size
        found: F64 = recorded[order]
        found[:, 0] = ends[at] - moment
        return found
    # The first gap before all others: how many are drawn must not change it.
    passed = random.random(jobs)
    if gaps.kind == "gamma":
        longer = random.gamma(gaps.shape + 1, 1 / gaps.shape, jobs)
        found = random.gamma(gaps.shape, 1 / gaps.shape, shape)
    elif gaps.kind == "weibull":
        scale = 1 / math.gamma(1 + 1 / gaps.shape)
        longer = scale * random.gamma(1 + 1 / gaps.shape, 1.0, jobs) ** (1 / gaps.shape)
        found = scale * random.weibull(gaps.shape, shape)
    elif gaps.kind == "log-normal":
        longer = random.lognormal(gaps.shape**2 / 2, gaps.shape, jobs)
        found = random.lognormal(-(gaps.shape**2) / 2, gaps.shape, shape)
    else:
        longer = random.gamma(2.0, 1.0, jobs)
        found = random.exponential(1.0, shape)
    found = found.T.copy()
    found[:, 0] = longer * passed
    return found

"""What failures cost a job, and what partial recovery loses: the equations, pure.

All overheads are fractions of the job's length, split into what they come from. The equations
assume what the CPR paper assumes: failures are equally likely at any time, samples are processed
at a constant rate, and every overhead is small against the job. Where it is not (a save that takes
longer than the interval), the fraction grows beyond 1 and is to be read as "this does not work".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from emberkeep.errors import ConfigError

_NONE = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job as the equations see it."""

    duration: timedelta
    """Without any overhead."""
    mtbf: timedelta
    """Mean time between failures of the whole job; one failure may take several shards."""
    shards: int
    failing_together: int = 1
    """How many shards one failure takes."""
    save: timedelta
    """How long training stands still for a version."""
    load: timedelta
    """From the decision to recover until training goes on."""
    reschedule: timedelta = _NONE
    """Until there is a machine for the replacement."""

    def __post_init__(self) -> None:
        for name in ("duration", "mtbf", "save"):
            if getattr(self, name) <= _NONE:
                raise ConfigError(f"{name} must be longer than no time, not {getattr(self, name)}")
        for name in ("load", "reschedule"):
            if getattr(self, name) < _NONE:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.shards < 1:
            raise ConfigError(f"shards must be 1 or more, not {self.shards}")
        if not 1 <= self.failing_together <= self.shards:
            raise ConfigError(
                f"of {self.shards} shards 1 to {self.shards} can fail together, "
                f"not {self.failing_together}"
            )

    @property
    def failures(self) -> float:
        """How many are expected."""
        return self.duration / self.mtbf

    @property
    def expected_restores(self) -> int:
        """How often the job will be restored, if every failure takes it back to a version."""
        return expected_restores(self.duration, self.mtbf)


def expected_restores(duration: timedelta, mtbf: timedelta) -> int:
    """The expected failures of a job of that length, rounded up: what a bit width is chosen for."""
    if duration <= _NONE or mtbf <= _NONE:
        raise ConfigError(
            f"a job and the time between its failures are longer than no time, not {duration} and "
            f"{mtbf}"
        )
    return math.ceil(duration / mtbf - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Fractions of the job's length."""

    save: float = 0.0
    load: float = 0.0
    lost: float = 0.0
    """Computation that has to be done again."""
    reschedule: float = 0.0
    slowdown: float = 0.0
    """Of every step, all the time: what redundancy costs."""

    @property
    def total(self) -> float:
        return self.save + self.load + self.lost + self.reschedule + self.slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether partial recovery pays, and why."""

    pays: bool
    reason: str
    full_interval: timedelta
    full: Overhead
    partial_interval: timedelta
    """The interval that the target PLS asks for; no time where the target is 0."""
    partial: Overhead
    """With that interval; infinite where the interval is no time."""


def overhead_full(job: Job, interval: timedelta) -> Overhead:
    """Everybody goes back to the last version: on average half an interval is done again."""
    return Overhead(
        save=_saving(job, interval),
        load=job.load / job.mtbf,
        lost=interval / 2 / job.mtbf,
        reschedule=job.reschedule / job.mtbf,
    )


def overhead_partial(job: Job, interval: timedelta) -> Overhead:
    """The failed shards alone go back: nothing is done again."""
    return Overhead(
        save=_saving(job, interval),
        load=job.load / job.mtbf,
        reschedule=job.reschedule / job.mtbf,
    )


def optimal_full_interval(job: Job) -> timedelta:
    """√(2 · save · MTBF), which makes `overhead_full` smallest; at most the job's length."""
    seconds = math.sqrt(2 * job.save.total_seconds() * job.mtbf.total_seconds())
    return min(timedelta(seconds=seconds), job.duration)


def interval_for_pls(job: Job, pls: float) -> timedelta:
    """The longest interval whose expected PLS stays within `pls`; at most the job's length."""
    if not 0 <= pls <= 1:
        raise ConfigError(f"a PLS lies between 0 and 1, not {pls:g}")
    hours = 2 * pls * job.shards / job.failing_together * (job.mtbf / timedelta(hours=1))
    return min(timedelta(hours=1) * min(hours, 1e9), job.duration)


def expected_pls(job: Job, interval: timedelta) -> float:
    """What partial recovery loses on average: half an interval of the failed shards' share of the
    samples for every expected failure."""
    return 0.5 * (interval / job.mtbf) * job.failing_together / job.shards


def pls_of_loss(*, lost_samples: int, total_samples: int, shards: int) -> float:
    """What one shard's recovery adds: the samples since its rows were saved, as its share."""
    if total_samples < 1 or shards < 1 or lost_samples < 0:
        raise ConfigError(
            f"{lost_samples} of {total_samples} samples lost on one of {shards} shards is no loss"
        )
    return lost_samples / (total_samples * shards)


def partial_pays(job: Job, pls: float) -> Verdict:
    """Partial recovery at the interval that `pls` allows, against full recovery at its best.

    Where it brings nothing it is refused: full recovery loses no update, so a tie is full's.
    """
    full_interval = optimal_full_interval(job)
    full = overhead_full(job, full_interval)
    interval = interval_for_pls(job, pls)
    if interval <= _NONE:
        return Verdict(
            pays=False,
            reason="a PLS of 0 lets no update be lost, and only full recovery loses none",
            full_interval=full_interval,
            full=full,
            partial_interval=interval,
            partial=Overhead(save=math.inf),
        )
    partial = overhead_partial(job, interval)
    pays = partial.total < full.total
    shares = (
        f"{_percent(partial.total)} of the job against {_percent(full.total)} with full recovery"
    )
    if pays:
        reason = f"partial recovery costs {shares}"
    else:
        reason = (
            f"PLS {pls:g} asks for a version every {_hours(interval)}, which costs {shares} "
            f"and a version every {_hours(full_interval)}"
        )
    return Verdict(
        pays=pays,
        reason=reason,
        full_interval=full_interval,
        full=full,
        partial_interval=interval,
        partial=partial,
    )


def _saving(job: Job, interval: timedelta) -> float:
    if interval <= _NONE:
        raise ConfigError(f"an interval must be longer than no time, not {interval}")
    return job.save / interval


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def _hours(time: timedelta) -> str:
    hours = time / timedelta(hours=1)
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"

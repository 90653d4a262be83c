"""What failures cost a job, and what partial recovery loses: estimates, pure.

All overheads are fractions of the job's length without any, split into what they come from. A
failure may strike at any time: in a save, which is then void, or in a recovery, which starts over.
A job starts at any moment between two failures, not right after one. Samples are processed at a
constant rate. Small overheads agree with the CPR paper's equations; large ones compound, because
time that is lost can be struck as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache

import numpy as np

from emberkeep import config
from emberkeep._types import F64
from emberkeep.checkpoint.failure_gaps import Gaps
from emberkeep.errors import ConfigError

_NONE = timedelta(0)
_HOUR = timedelta(hours=1)
_ROUNDS = 4  # of an estimate that depends on its own result; the third changes nothing visible
_CELLS = 100
_MANY = 100.0
"""An overhead beyond which a job does not end."""
_MOST_COUNTED = 5000
"""Failures that are counted one by one: long before, what may be lost is."""
RAREST = timedelta(days=365_000_000)
"""Between failures: what is rarer does not fit into a timedelta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job as the estimates see it."""

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
    gaps: Gaps = field(default_factory=Gaps)
    """How the times between failures are spread around their mean."""

    def __post_init__(self) -> None:
        config.check(self)
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


def check_job(job: object) -> None:
    """Refuses what was given as `job=` and is none."""
    if not isinstance(job, Job):
        raise ConfigError(f"job= takes an emberkeep.Job, not {job!r}")


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


NEVER_ENDS = Overhead(lost=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """What partial recovery is expected to come to."""

    overhead: Overhead
    pls: float


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


def versions_in(job: Job, interval: timedelta) -> int:
    """So many are taken in the job, without that of its beginning and that of its end."""
    if interval <= _NONE:
        raise ConfigError(f"an interval must be longer than no time, not {interval}")
    return max(0, math.ceil(job.duration / interval - 1e-9) - 1)


def overhead_full(job: Job, interval: timedelta) -> Overhead:
    """Everybody goes back to the last version, and what was done since is done again."""
    return _full(job, interval, versions_in(job, interval) * (job.save / job.duration))


def _full(job: Job, interval: timedelta, saving: float) -> Overhead:
    gaps, mtbf = job.gaps, job.mtbf
    restart = (job.load + job.reschedule) / mtbf
    cycle = (interval + job.save) / mtbf
    if interval >= job.duration:
        cycle = math.inf
    restarting = 1 - float(gaps.tail(np.array(restart)))
    # Since the last version, by failures that follow another; in mean gaps, as all of these.
    again = _remainder(gaps, cycle, restart)
    total = saving
    first = first_again = 0.0
    for _ in range(_ROUNDS):
        length = (1 + total) * job.failures
        if cycle == math.inf:
            again = _until(gaps, length, restart)
        first, first_again = _first(gaps, cycle, length)
        waste = restarting + again
        if waste >= 1:
            return NEVER_ENDS
        fixed = saving + (first_again - first * again) / job.failures
        found = (fixed + waste) / (1 - waste)
        if not 0 <= found < _MANY:
            return NEVER_ENDS
        total = found
    failures = (1 + total) * job.failures
    lost = ((failures - first) * again + first_again) / job.failures
    return _split(job, save=saving, lost=lost, restarting=(1 + total) * restarting)


def _remainder(gaps: Gaps, cycle: float, start: float) -> float:
    """The mean of what is left of a gap, less `start`, when whole cycles are taken away."""
    if cycle == math.inf:
        return float(gaps.tail(np.array(start)))
    if gaps.kind == "exponential" and cycle >= 1e-3:
        return math.exp(-start) * (1 - cycle / math.expm1(min(cycle, 100.0)))
    if cycle < 1e-3:
        return float(gaps.survival(np.array(start))) * cycle / 2
    ends: F64 = start + cycle * np.arange(1, 2 + math.ceil(60 / cycle), dtype=np.float64)
    return max(0.0, float(gaps.tail(np.array(start)) - cycle * gaps.survival(ends).sum()))


def _until(gaps: Gaps, length: float, start: float) -> float:
    """What a gap holds beyond `start`, at most as much as the job is long."""
    return float(gaps.tail(np.array(start)) - gaps.tail(np.array(start + length)))


def _first(gaps: Gaps, cycle: float, length: float) -> tuple[float, float]:
    """The chance of a failure in so long, and the mean of what the first one takes back."""
    points = np.linspace(0, length, 801)
    tail = gaps.tail(points)
    within = float(1 - tail[-1])
    drops = 0.0
    if cycle < length:
        ends = np.arange(cycle, length, cycle) if cycle * 4000 > length else np.empty(0)
        if not ends.size:
            return within, within * cycle / 2
        drops = cycle * float((gaps.tail(ends) - tail[-1]).sum())
    held = tail - tail[-1]
    rises = float(np.sum((held[1:] + held[:-1]) / 2 * np.diff(points)))
    return within, max(0.0, rises - drops)


def _split(job: Job, *, save: float, lost: float, restarting: float) -> Overhead:
    restart = job.load + job.reschedule
    share = job.load / restart if restart else 0.0
    return Overhead(
        save=save, load=share * restarting, lost=lost, reschedule=(1 - share) * restarting
    )


def overhead_partial(
    job: Job,
    interval: timedelta,
    *,
    most_pls: float = math.inf,
    least_interval: timedelta = _NONE,
    prioritised: float = 0.0,
    total_losses: float = 0.0,
) -> Partial:
    """The failed shards alone go back: nothing is done again, and their updates are lost.

    With `most_pls` a version is taken as soon as a failure would lose more than that, but no
    sooner after another than `least_interval`; what loses more all the same is recovered fully.
    `prioritised` versions in between write so many models for each whole version.
    `total_losses` is the share of the failures that take every shard, which nothing but a full
    recovery helps; all, where as many fail together as there are.
    """
    if job.failing_together >= job.shards:
        total_losses = 1.0
    versions = versions_in(job, interval)
    restart = (job.load + job.reschedule) / job.mtbf
    restarting = 1 - float(job.gaps.tail(np.array(restart)))
    if restarting >= 1:
        return Partial(overhead=NEVER_ENDS, pls=0.0)
    # A save that a failure ends is made again.
    save = math.expm1(min(job.save / job.mtbf, 100.0)) / job.failures
    # Also before the first whole version, and after the last.
    between = prioritised * (job.duration / interval) * save
    total = save * versions + between
    saving, again, pls = total, 0.0, 0.0
    total = (total + restarting) / (1 - restarting)
    if total >= _MANY:
        return Partial(overhead=NEVER_ENDS, pls=0.0)
    for _ in range(_ROUNDS):
        failures = (1 + total) * job.failures
        if math.isfinite(most_pls):
            taken, again, pls = _spending(
                job, interval, failures, most_pls, least_interval, save, total_losses
            )
            saving = taken * save + between
        else:
            lost = (1 - total_losses) * _loss_of_one(job, interval, failures, save)
            pls = min(1.0, failures * lost)
            again = failures * total_losses * _taken_back(job, interval, save, total_losses)
        found = (saving + again + restarting) / (1 - restarting)
        if not 0 <= found < _MANY:
            return Partial(overhead=NEVER_ENDS, pls=pls)
        total = found
    return Partial(
        overhead=_split(job, save=saving, lost=again, restarting=(1 + total) * restarting),
        pls=pls,
    )


def _share_left(job: Job, interval: float, failures: float) -> float:
    """Of what is lost since the last version: a shard that failed in between lost it already."""
    often = failures * job.failing_together / job.shards * interval
    if often < 1e-3:
        return 1 - often / 3
    return 2 * (1 / often - (1 - math.exp(-often)) / often**2)


def _loss_of_one(job: Job, interval: timedelta, failures: float, save: float) -> float:
    """The mean PLS of one failure. What strikes in a save takes a whole interval."""
    each = min(interval / job.duration, 1.0)
    whole, rest = divmod(1.0, each)
    since = (whole * each**2 + rest**2) / 2
    in_save = save / (save + each) if whole > 1 else 0.0
    since += in_save * (each - since)
    return since * _share_left(job, each, failures) * job.failing_together / job.shards


def _taken_back(job: Job, interval: timedelta, save: float, fully: float) -> float:
    """The mean work that a full recovery takes back, in jobs."""
    each = np.array([min(interval / job.duration, 1.0)])
    since, weight = _since_version(each, save)
    return float((since * weight).sum()) * _in_bursts(job, float(each[0]), save, fully)


def _in_bursts(job: Job, each: float, save: float, fully: float) -> float:
    """How much less a failure finds to take back than if it struck at any moment: after one full
    recovery the next failure of a burst finds little, and one that strikes while that recovery goes
    on finds nothing. `fully` is the share of the failures that are recovered fully."""
    cycle = (each + save) * (job.duration / job.mtbf)
    restart = (job.load + job.reschedule) / job.mtbf
    at_once, after = (_remainder(job.gaps, cycle, start) for start in (0.0, restart))
    return 2 * ((1 - fully) * at_once + fully * after) / cycle


def _spending(
    job: Job, interval: timedelta, failures: float, most_pls: float, least_interval: timedelta,
    save: float, total_losses: float,
) -> tuple[float, float, float]:  # fmt: skip
    """Versions, work done again in jobs, and PLS of a job that may lose `most_pls` and saves the
    sooner the less is left of it: a chain over what is lost so far, failure by failure."""
    share = job.failing_together / job.shards
    widest = min(interval / job.duration, 1.0)
    least = min(least_interval / job.duration, widest)
    used: F64 = np.linspace(0.0, most_pls, _CELLS)
    left = most_pls - used
    each = np.maximum(np.maximum(least, np.minimum(widest, left / share)), 1e-6)
    since, weight = _since_version(each, save)
    over = since * share > left[:, None] + 1e-12
    fully = total_losses + (1 - total_losses) * over
    again = (since * weight * fully).sum(axis=1)
    # Most lines have the same interval.
    different, place_of = np.unique(each, return_inverse=True)
    often = (weight * fully).sum(axis=1)
    again *= [_in_bursts(job, float(each[i]), save, float(often[i])) for i in range(_CELLS)]
    counted = np.array([_share_left(job, float(t), failures) for t in different])[place_of]
    after = np.where(over, used[:, None], used[:, None] + since * share * counted[:, None])
    place = after / most_pls * (_CELLS - 1) if most_pls else np.zeros_like(after)
    low = np.minimum(place.astype(np.int64), _CELLS - 2)
    part = np.clip(place - low, 0.0, 1.0)
    weight = (1 - total_losses) * weight
    cells = (np.arange(_CELLS)[:, None] * _CELLS + low).ravel()
    moved: F64 = np.bincount(cells, (weight * (1 - part)).ravel(), _CELLS**2).astype(np.float64)
    moved += np.bincount(cells + 1, (weight * part).ravel(), _CELLS**2)
    moves = moved.reshape(_CELLS, _CELLS) + total_losses * np.eye(_CELLS)
    rate = np.maximum(np.ceil(1 / each - 1e-9) - 1, 0.0)
    rate[each < widest] = 1 / each[each < widest]
    state = np.zeros(_CELLS)
    state[0] = 1.0
    versions = done_again = pls = 0.0
    most = min(failures, _MOST_COUNTED)
    again *= failures / most
    chances, times = _counts(job.gaps, most)
    more = 1.0
    for chance, time in zip(chances.tolist(), times.tolist(), strict=True):
        more = max(0.0, more - chance)
        versions += time * float(state @ rate)
        done_again += more * float(state @ again)
        pls += chance * float(state @ used)
        state = state @ moves
    return versions, done_again, pls + more * float(state @ used)


def _since_version(each: F64, save: float) -> tuple[F64, F64]:
    """How much work a failure may find since the last version, and how likely; one line for each
    interval. The last column is a failure in a save."""
    since = (np.arange(_CELLS) + 0.5) / _CELLS * each[:, None]
    whole = np.floor(1.0 / each)
    weight = whole[:, None] + (since < (1.0 - whole * each)[:, None])
    weight /= weight.sum(axis=1, keepdims=True)
    in_save = np.where(whole > 1, save / (save + each), 0.0)[:, None]
    return np.hstack([since, each[:, None]]), np.hstack([weight * (1 - in_save), in_save])


def _counts(gaps: Gaps, length: float) -> tuple[F64, F64]:
    """The chance of exactly 0, 1, 2, … failures in so many mean gaps, and the share of the time
    in which there have been so many."""
    most = math.ceil(length + 8 * math.sqrt(length) + 8)
    if gaps.kind == "exponential":
        counts = np.arange(most)
        logs = counts * math.log(length) - length - np.cumsum(np.log(np.maximum(counts, 1)))
        chances: F64 = np.exp(logs)
        return chances, np.maximum(1 - np.cumsum(chances), 0.0) / length
    most = math.ceil(1.5 * most)
    points = 1024
    at = np.linspace(0.0, length, points + 1)
    first, next_one = -np.diff(gaps.tail(at)), -np.diff(gaps.survival(at))
    size = 2 * points
    factor = np.fft.rfft(next_one, size)
    density, within = first, [np.ones(points)]
    for _ in range(most):
        within.append(np.cumsum(density))
        density = np.maximum(np.fft.irfft(np.fft.rfft(density, size) * factor, size)[:points], 0.0)
    found = np.array(within)
    exactly = np.maximum(found[:-1] - found[1:], 0.0)
    return exactly[:, -1], exactly.mean(axis=1)


@lru_cache(maxsize=1024)
def optimal_full_interval(job: Job) -> timedelta:
    """The interval that makes `overhead_full` smallest; at most the job's length.

    About √(2 · save · MTBF), and shorter where failures are bursts or a save takes long.
    """
    guess = math.sqrt(2 * (job.save / _HOUR) * (job.mtbf / _HOUR))
    guess = min(guess, job.duration / _HOUR)

    def cost(logarithm: float) -> float:
        interval = math.exp(logarithm) * _HOUR
        return _full(job, interval, job.save / interval).total

    found = math.exp(_lowest(cost, math.log(guess) - 2.5, math.log(guess) + 2.5)) * _HOUR
    if found >= job.duration:
        return job.duration
    alone = overhead_full(job, job.duration).total
    return job.duration if alone < overhead_full(job, found).total else found


def _lowest(cost: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is lowest."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = cost(left), cost(right)
    while high - low > 1e-3:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = cost(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = cost(right)
    return (low + high) / 2


def interval_for_pls(job: Job, pls: float) -> timedelta:
    """The longest interval whose expected PLS stays within `pls`; at most the job's length."""
    if not 0 <= pls <= 1:
        raise ConfigError(f"a PLS lies between 0 and 1, not {pls:g}")
    hours = 2 * pls * job.shards / job.failing_together * (job.mtbf / _HOUR)
    return min(_HOUR * min(hours, 1e9), job.duration)


def struck_by(job: Job, share: float) -> Job:
    """The job as that share of its failures strikes it, which come one by one then."""
    hours = min(job.mtbf / _HOUR / share, RAREST / _HOUR)
    return replace(job, mtbf=hours * _HOUR, gaps=job.gaps if share == 1 else Gaps())


def partial_interval(
    job: Job, pls: float, *, total_losses: float = 0.0, max_interval: timedelta | None = None
) -> timedelta:
    """What `pls` allows for partial recovery, if versions are not wanted sooner: for the failures
    that take every shard, or at all."""
    found = interval_for_pls(job, pls)
    if job.failing_together >= job.shards:
        total_losses = 1.0
    if total_losses > 0:
        found = min(found, optimal_full_interval(struck_by(job, total_losses)))
    return found if max_interval is None else min(found, max_interval)


def pls_of_loss(*, lost_samples: int, total_samples: int, shards: int) -> float:
    """What one shard's recovery adds: the samples since its rows were saved, as its share."""
    if total_samples < 1 or shards < 1 or lost_samples < 0:
        raise ConfigError(
            f"{lost_samples} of {total_samples} samples lost on one of {shards} shards is no loss"
        )
    return lost_samples / (total_samples * shards)


def partial_pays(
    job: Job,
    pls: float,
    *,
    most_pls: float | None = None,
    prioritised: float = 0.0,
    total_losses: float = 0.0,
    max_interval: timedelta | None = None,
) -> Verdict:
    """Partial recovery at the interval that `pls` allows, against full recovery at its best.

    `most_pls` is what the job may lose at most, `pls` if it is not given. `prioritised` versions
    cost so many models for each whole version, `total_losses` of the failures take every shard, and
    no interval is longer than `max_interval`. Where partial recovery brings nothing that can be
    seen it is refused: full recovery loses no update, so a tie is full's.
    """
    longest = job.duration if max_interval is None else max_interval
    full_interval = min(optimal_full_interval(job), longest)
    full = overhead_full(job, full_interval)
    interval = partial_interval(job, pls, total_losses=total_losses, max_interval=max_interval)
    if interval <= _NONE:
        return Verdict(
            pays=False,
            reason="a PLS of 0 lets no update be lost, and only full recovery loses none",
            full_interval=full_interval,
            full=full,
            partial_interval=interval,
            partial=Overhead(save=math.inf),
        )
    partial = overhead_partial(
        job, interval, most_pls=pls if most_pls is None else most_pls,
        least_interval=min(interval, full_interval), prioritised=prioritised,
        total_losses=total_losses,
    ).overhead  # fmt: skip
    alone = job.failing_together < job.shards  # else none goes on without the others
    pays = alone and same_cost(partial.total) < same_cost(full.total)
    shares = f"{percent(partial.total)} of the job against {percent(full.total)} with full recovery"
    if pays:
        reason = f"partial recovery costs {shares}"
    elif not alone:
        reason = (
            f"a failure takes {'the only shard' if job.shards == 1 else 'every shard'}, and none "
            "goes on: only full recovery helps"
        )
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


def same_cost(overhead: float) -> float:
    """What is equal for overheads whose difference nobody sees: a hundredth of a point."""
    return round(overhead, 4)


def percent(fraction: float) -> str:
    """An overhead for people, also one that no job gets to the end of."""
    return f"{100 * fraction:.2f}%" if math.isfinite(fraction) else f"over {100 * _MANY:.0f}%"


def _hours(time: timedelta) -> str:
    hours = time / _HOUR
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.2g} s"

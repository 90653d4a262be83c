"""What a job could do about failures: each way with what it is expected to cost and to lose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import numpy as np

from emberkeep.checkpoint.overheads import (
    Job,
    Overhead,
    optimal_full_interval,
    overhead_full,
    overhead_partial,
    partial_interval,
    struck_by,
)
from emberkeep.checkpoint.run_plan import rounding_loss
from emberkeep.errors import ConfigError
from emberkeep.planning.job_simulator import Tactic

PRIORITY_SHARE = 1 / 8
"""Prioritised versions hold this share of the rows; one of so many versions is a whole one."""
PRIORITY_ROUNDS = round(1 / PRIORITY_SHARE)
PRIORITY_MODELS = (PRIORITY_ROUNDS - 1) * PRIORITY_SHARE
"""What prioritised versions write for each whole version."""
PARITY_SLOWDOWN = 0.026
"""Of a step, as the ECRM paper measured it on 20 machines with 25 Gbit/s."""
PARITY_DROP = 0.12
"""Of throughput while a lost shard is rebuilt: the most that the ECRM paper saw."""
PARITY_K = 4

NAMES = ("full", "partial", "cpr", "cpr_mfu", "cpr_ssu", "cpr_scar", "parity", "quantized", "tier")

_ROW_NBYTES = {"cpr_mfu": 4.0, "cpr_ssu": 4.0 * PRIORITY_SHARE}
_PRIORITISED = {
    "cpr_mfu": "most used first; 4 bytes a row more",
    "cpr_ssu": "by sub-sampled use; half a byte a row more",
    "cpr_scar": "most changed first; every row twice",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Saving and loading done in another way, as it was measured; times are those of the job."""

    save: timedelta
    load: timedelta
    slowdown: float = 0.0
    """Of every step."""
    bits: int | None = None
    memory_share: float = 0.0
    """Of the tables' bytes, more than without it; below 0 where rows leave memory."""

    def __post_init__(self) -> None:
        if self.save <= timedelta(0) or self.load < timedelta(0):
            raise ConfigError("measured times must not be negative, and a save takes some time")
        if not (math.isfinite(self.slowdown) and self.slowdown >= 0):
            raise ConfigError(f"a slowdown is 0 or more, not {self.slowdown:g}")
        if self.bits is not None and self.bits not in (2, 3, 4, 8):
            raise ConfigError(f"bits must be 2, 3, 4 or 8, not {self.bits}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the candidates are made for."""

    job: Job
    pls: float
    slopes: Mapping[str, float]
    """Accuracy lost per PLS of 1, by strategy; that of "cpr" stands for those without one."""
    accuracy_loss: float | None = None
    most_pls: float | None = None
    max_interval: timedelta | None = None
    together: tuple[int, ...] = ()
    """Recorded numbers of shards that failed at once."""
    parity_slowdown: float | None = None
    parity_r: int | None = None
    quantized: Measurement | None = None
    tier: Measurement | None = None

    def target(self, name: str) -> float:
        """The PLS that strategy `name` may lose."""
        slope = self.slope(name)
        if self.accuracy_loss is not None and slope:
            return min(1.0, self.accuracy_loss / slope)
        return self.pls

    def slope(self, name: str) -> float | None:
        return self.slopes.get(name, self.slopes.get("cpr"))

    @property
    def total_losses(self) -> float:
        """The share of the recorded failures that take every shard."""
        counts = self.together or (self.job.failing_together,)
        return sum(count >= self.job.shards for count in counts) / len(counts)

    def partial_job(self) -> Job:
        """The job with as many shards failing together as do where some are left."""
        counts = [count for count in self.together if count < self.job.shards]
        if not counts:
            return self.job
        return replace(self.job, failing_together=max(1, round(sum(counts) / len(counts))))

    def capped(self, interval: timedelta) -> timedelta:
        return interval if self.max_interval is None else min(interval, self.max_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way, as it is expected to go."""

    name: str
    interval: timedelta | None
    """Between whole versions; None where it cannot be done."""
    overhead: Overhead
    pls: float
    tactic: Tactic | None
    """The same for the simulator."""
    note: str
    memory_share: float = 0.0
    """Of the tables' bytes, in addition; `row_nbytes` for each row beside."""
    row_nbytes: float = 0.0
    rounding: float = 0.0
    """Accuracy that rounding is expected to lose."""
    measured: bool = True
    """Whether its inputs were measured or given; it is not recommended otherwise."""
    loses_nothing: bool = False


def candidates(wish: Wish, only: Collection[str] = NAMES) -> Iterator[Candidate]:
    """Every way, or those that are asked for, in the order in which tables show them."""
    job = wish.job
    best = wish.capped(optimal_full_interval(job))
    for name in NAMES:
        if name not in only:
            continue
        if name == "full":
            yield Candidate(
                name=name, interval=best, overhead=overhead_full(job, best), pls=0.0,
                tactic=Tactic(mode="full", interval=best), loses_nothing=True,
                note="every shard goes back; no update is lost, only time",
            )  # fmt: skip
        elif name == "partial":
            naive = overhead_partial(wish.partial_job(), best, total_losses=wish.total_losses)
            yield Candidate(
                name=name, interval=best, overhead=naive.overhead, pls=naive.pls,
                tactic=Tactic(mode="partial", interval=best),
                note="failed shards alone go back; saved as often as for full recovery",
            )  # fmt: skip
        elif name == "parity":
            yield _parity(wish)
        elif name == "quantized" and wish.quantized is not None:
            yield _with_measured(wish, name, wish.quantized)
        elif name == "tier" and wish.tier is not None:
            yield _with_measured(wish, name, wish.tier)
        elif name.startswith("cpr"):
            yield from _cpr(wish, name, best)


def _cpr(wish: Wish, name: str, best: timedelta) -> Iterator[Candidate]:
    wide = partial_interval(
        wish.partial_job(), wish.target(name), total_losses=wish.total_losses,
        max_interval=wish.max_interval,
    )  # fmt: skip
    if wide > timedelta(0):
        yield cpr_candidate(wish, name, wide, min(best, wide))
    elif name == "cpr":
        yield Candidate(
            name=name, interval=None, overhead=Overhead(save=math.inf), pls=0.0, tactic=None,
            note="no interval keeps to PLS 0",
        )  # fmt: skip


def cpr_candidate(wish: Wish, name: str, wide: timedelta, least: timedelta) -> Candidate:
    """Partial recovery at that interval, with prioritised versions unless it is plain."""
    target = wish.target(name)
    most_pls = target if wish.most_pls is None else wish.most_pls
    most_pls = most_pls if most_pls < 1 else math.inf
    ranked = name in _PRIORITISED
    found = overhead_partial(
        wish.partial_job(), wide, most_pls=most_pls, least_interval=least,
        prioritised=PRIORITY_MODELS if ranked else 0.0, total_losses=wish.total_losses,
    )  # fmt: skip
    note = "as partial, saved as rarely as the target allows"
    if math.isfinite(most_pls):
        note += ", sooner when little of it is left"
    if ranked:
        note = f"and 1/{PRIORITY_ROUNDS} of the rows so often in between, {_PRIORITISED[name]}"
    return Candidate(
        name=name, interval=wide, overhead=found.overhead, pls=found.pls, note=note,
        memory_share=1.0 if name == "cpr_scar" else 0.0, row_nbytes=_ROW_NBYTES.get(name, 0.0),
        tactic=Tactic(
            mode="partial", interval=wide, most_pls=most_pls, least_interval=least,
            rounds=PRIORITY_ROUNDS if ranked else 1, fraction=PRIORITY_SHARE if ranked else 0.0,
        ),
    )  # fmt: skip


def _parity(wish: Wish) -> Candidate:
    """Surviving shards rebuild up to r lost ones while training goes on. For what takes more, or
    strikes again before they are back, there are versions."""
    job = wish.job
    counts = np.asarray(wish.together or (job.failing_together,))
    r = wish.parity_r or min(job.failing_together, max(1, job.shards - 1))
    k = min(PARITY_K, job.shards - r)
    assumed = wish.parity_slowdown is None
    slowdown = PARITY_SLOWDOWN if wish.parity_slowdown is None else wish.parity_slowdown
    if k < 1:
        return Candidate(
            name="parity", interval=None, overhead=Overhead(save=math.inf), pls=0.0, tactic=None,
            note=f"r={r} takes more shards than the {job.shards} that there are",
        )  # fmt: skip
    over = float((counts > r).mean())
    window = (job.reschedule + job.load) / job.mtbf
    again = 1 - float(job.gaps.survival(np.array(window)))
    second = float((counts[:, None] + counts[None, :] > r).mean())
    fatal = min(1.0, over + (1 - over) * again * second)
    rare, back = wish.capped(job.duration), Overhead()
    if fatal > 0:
        fatal_job = struck_by(job, fatal)
        rare = wish.capped(optimal_full_interval(fatal_job))
        back = overhead_full(fatal_job, rare)
    elif rare < job.duration:
        back = Overhead(save=job.save / rare)
    stretched = 1 + slowdown
    mild = 0.0
    if fatal < 1 and math.isfinite(back.total):  # what never ends is not made longer
        mild = (1 - fatal) * stretched * (1 + back.total) * job.failures
    overhead = Overhead(
        save=back.save * stretched,
        load=back.load * stretched + mild * PARITY_DROP * (job.load / job.duration),
        lost=back.lost * stretched,
        reschedule=back.reschedule * stretched + mild * (job.reschedule / job.duration),
        slowdown=slowdown,
    )
    note = (
        f"k={k}, r={r}: up to {r} shard{'s' if r > 1 else ''} lost at once come back as they were"
    )
    if fatal > 0:
        note += f"; {fatal:.2g} of the failures go beyond that and back to a version"
    if assumed:
        note += f"; assumes steps {PARITY_SLOWDOWN:.1%} slower"
    return Candidate(
        name="parity", interval=rare, overhead=overhead, pls=0.0, note=note,
        memory_share=r / k, measured=not assumed, loses_nothing=True,
        tactic=Tactic(
            mode="parity", interval=rare, slowdown=slowdown, spare=r, rebuild_drop=PARITY_DROP
        ),
    )  # fmt: skip


def _with_measured(wish: Wish, name: str, given: Measurement) -> Candidate:
    """Full recovery with other saves and loads."""
    job = replace(wish.job, save=given.save, load=given.load)
    interval = wish.capped(optimal_full_interval(job))
    found = overhead_full(job, interval)
    stretched = 1 + given.slowdown
    parts = {part: value * stretched for part, value in asdict(found).items()}
    rounding = 0.0
    if given.bits is not None:
        rounding = rounding_loss(given.bits, (1 + found.total) * job.failures)
        note = f"as full, in {given.bits} bits: a restore brings rounded rows back"
    else:
        note = "as full, from files of the nodes; for nodes that come back with their disks"
    return Candidate(
        name=name, interval=interval, pls=0.0, note=note, rounding=rounding,
        overhead=Overhead(**{**parts, "slowdown": given.slowdown}),
        memory_share=given.memory_share, loses_nothing=given.bits is None,
        tactic=Tactic(
            mode="full", interval=interval, save=given.save, load=given.load,
            slowdown=given.slowdown,
        ),
    )  # fmt: skip

"""Which strategy, which interval, and why: a pure function of what is known about a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from emberkeep.checkpoint.overheads import Job, Overhead, percent, same_cost
from emberkeep.checkpoint.run_plan import DEFAULT_PLS
from emberkeep.errors import ConfigError
from emberkeep.planning.candidates import Candidate, Measurement, Wish, candidates
from emberkeep.planning.job_simulator import HOUR, simulate

_SHORT_OF_SAVES = 0.5
_NOT_SMALL = 0.2
_MEASURED_PLS = 0.2  # the paper shows accuracy up to a target of this
_MOST_JOBS = 1_000_000
_MOST_SAVES = 2e8  # of all simulated jobs together: seconds of work
_LITTLE_ROUNDING = 1e-4  # accuracy that Check-N-Run takes for none

TITLES = {
    "full": "full",
    "partial": "partial",
    "cpr": "CPR",
    "cpr_mfu": "CPR-MFU",
    "cpr_ssu": "CPR-SSU",
    "cpr_scar": "CPR-SCAR",
    "parity": "parity",
    "quantized": "quantized",
    "tier": "tier",
}
"""Strategies as people call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is known about a job and what is wanted of it."""

    job: Job
    pls: float | None = None
    """The PLS that may be lost; `DEFAULT_PLS` unless it follows from an accuracy."""
    accuracy_loss: float | None = None
    """The loss of accuracy (AUC) that may be expected; needs `slopes`."""
    slopes: Mapping[str, float] = field(default_factory=dict)
    """Accuracy lost per PLS of 1, as a sweep of the emulator fits it: of "cpr", and of others."""
    slope_error: float = 0.0
    """The standard error of the first of these, as a share of it."""
    most_pls: float | None = None
    """What the job may lose at most, if that is not the target; 1: the target is an average."""
    max_interval: timedelta | None = None
    """Versions are wanted at least this often, whatever the estimates say."""
    price: float | None = None
    """Per machine and hour."""
    machines: int | None = None
    """That stand still together; as many as there are shards, if not given."""
    memory_price: float | None = None
    """Per GB and hour."""
    table_nbytes: int | None = None
    """Of all rows with their optimizer state, for memory in bytes."""
    rows: int | None = None
    parity_slowdown: float | None = None
    """Of every step, measured; if not given the paper's figure is shown and not recommended by."""
    parity_r: int | None = None
    """Shards that parity is to bring back at once; as many as fail together, if not given."""
    together: tuple[int, ...] = ()
    """Recorded numbers of shards that failed at once."""
    quantized: Measurement | None = None
    tier: Measurement | None = None
    jobs: int = 0
    """So many are simulated for percentiles; 0: none."""

    def __post_init__(self) -> None:
        if self.accuracy_loss is not None and self.pls is not None:
            raise ConfigError("give a target PLS or a target accuracy loss, not both")
        if self.accuracy_loss is not None and "cpr" not in self.slopes:
            raise ConfigError(
                "a target accuracy loss needs the slope between PLS and accuracy: "
                "emberkeep emulate --sweep fraction fits one"
            )
        for name in ("accuracy_loss", "price", "memory_price", "parity_slowdown", "slope_error"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be 0 or more, not {value:g}")
        for name, slope in self.slopes.items():
            if name not in TITLES:
                raise ConfigError(f"slopes are those of {', '.join(TITLES)}, not of {name!r}")
            if not (math.isfinite(slope) and slope > 0):
                raise ConfigError(f"slope must be above 0, not {slope:g}")
        for name in ("pls", "most_pls"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"a PLS lies between 0 and 1, not {value:g}")
        for name in ("machines", "parity_r", "table_nbytes", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be 1 or more, not {value}")
        if self.max_interval is not None and self.max_interval <= timedelta(0):
            raise ConfigError(f"max_interval must be longer than no time, not {self.max_interval}")
        if not 0 <= self.jobs <= _MOST_JOBS:
            raise ConfigError(f"0 jobs or more are simulated, up to {_MOST_JOBS}, not {self.jobs}")

    @property
    def target_pls(self) -> float:
        if self.accuracy_loss is not None:
            return min(1.0, self.accuracy_loss / self.slopes["cpr"])
        return DEFAULT_PLS if self.pls is None else self.pls

    def wish(self) -> Wish:
        return Wish(
            job=self.job, pls=self.target_pls, slopes=self.slopes,
            accuracy_loss=self.accuracy_loss, most_pls=self.most_pls,
            max_interval=self.max_interval, together=self.together,
            parity_slowdown=self.parity_slowdown, parity_r=self.parity_r,
            quantized=self.quantized, tier=self.tier,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What simulated jobs came to: the overhead that so many of them stay below."""

    mean: float
    p50: float
    p90: float
    p99: float
    pls_p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One strategy as it would go."""

    interval: timedelta | None
    """Between versions; None where no interval keeps to the target."""
    overhead: Overhead
    pls: float
    """Expected."""
    accuracy_loss: float | None
    """Expected, where the slope is known."""
    accuracy_error: float | None
    """Its standard error: that of the slope, and of what one job loses."""
    lost_hours: float
    memory_share: float
    """Of the tables' bytes, in addition."""
    memory_nbytes: float | None
    """The same in bytes, where the size of the tables is known."""
    cost: float | None
    """Of the machines that stand still and of the memory, where prices are known."""
    spread: Spread | None
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "overhead": self.overhead.total,
            "interval_hours": None if self.interval is None else self.interval / HOUR,
            "pls": self.pls,
            "accuracy_loss": self.accuracy_loss,
            "accuracy_error": self.accuracy_error,
            "lost_hours": self.lost_hours,
            "memory_share": self.memory_share,
            "memory_nbytes": self.memory_nbytes,
            "cost": self.cost,
            "breakdown": asdict(self.overhead),
            "simulated": None if self.spread is None else asdict(self.spread),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All strategies, the one to take, and what to know before taking it."""

    question: Question
    strategies: Mapping[str, Option]
    recommended: str
    runner_up: str | None
    reason: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        job = self.question.job
        return {
            "job": {
                "duration_hours": job.duration / HOUR,
                "mtbf_hours": job.mtbf / HOUR,
                "failures": job.failures,
                "gaps": job.gaps.kind,
                "shards": job.shards,
                "failing_together": job.failing_together,
                "save_hours": job.save / HOUR,
                "load_hours": job.load / HOUR,
                "reschedule_hours": job.reschedule / HOUR,
            },
            "target_pls": self.question.target_pls,
            "strategies": {name: option.to_dict() for name, option in self.strategies.items()},
            "recommended": self.recommended,
            "runner_up": self.runner_up,
            "reason": self.reason,
            "warnings": list(self.warnings),
        }


def advise(question: Question) -> Plan:
    """Compares every candidate. What keeps to the target and costs least is recommended; of
    equals, what loses no update."""
    found = {candidate.name: candidate for candidate in candidates(question.wish())}
    strategies = {name: _option(question, candidate) for name, candidate in found.items()}
    ranking = ranked(question, found)
    recommended = ranking[0]
    # Of another kind: the same with other rows in between is hardly an alternative.
    others = [
        name
        for name in ranking
        if name[:3] != recommended[:3] and math.isfinite(found[name].overhead.total)
    ]
    runner_up = next(iter(others), None)
    return Plan(
        question=question,
        strategies=strategies,
        recommended=recommended,
        runner_up=runner_up,
        reason=_reason(question, strategies, recommended, runner_up),
        warnings=tuple(_warnings(question, strategies, recommended)),
    )


def ranked(question: Question, found: Mapping[str, Candidate]) -> list[str]:
    """What may be recommended, the cheapest first."""
    allowed = [c for c in found.values() if _allowed(question, c)]
    return [
        c.name
        for c in sorted(
            allowed,
            key=lambda c: (same_cost(c.overhead.total), not c.loses_nothing, c.overhead.total),
        )
    ]


def _allowed(question: Question, candidate: Candidate) -> bool:
    """Whether it keeps to the target, and stands on more than assumptions."""
    if candidate.interval is None or not candidate.measured or candidate.name == "partial":
        return False
    if candidate.name.startswith("cpr") and question.wish().total_losses == 1:
        return False  # no shard ever goes on
    most = question.accuracy_loss
    return candidate.rounding <= (_LITTLE_ROUNDING if most is None else most)


def _can_be_simulated(question: Question, candidate: Candidate) -> bool:
    """Not what never ends, nor what saves too often to count: neither is worth minutes."""
    if not question.jobs or candidate.tactic is None or math.isinf(candidate.overhead.total):
        return False
    tactic = candidate.tactic
    saves = question.job.duration / tactic.interval * tactic.rounds
    return question.jobs * saves <= _MOST_SAVES


def _option(question: Question, candidate: Candidate) -> Option:
    job, pls = question.job, candidate.pls
    spread = deviation = None
    if candidate.tactic is not None and _can_be_simulated(question, candidate):
        runs = simulate(job, candidate.tactic, jobs=question.jobs, together=question.together)
        p50, p90, p99 = runs.percentiles(0.5, 0.9, 0.99)
        pls95 = float(np.quantile(runs.pls, 0.95))
        spread = Spread(mean=runs.mean, p50=p50, p90=p90, p99=p99, pls_p95=pls95)
        deviation = float(runs.pls.std())
    hours = candidate.overhead.total * (job.duration / HOUR)
    slope = question.wish().slope(candidate.name)
    loss = error = None
    if slope is not None or candidate.pls == 0:
        loss = (slope or 0.0) * pls + candidate.rounding
        # Rounding is known from one paper's models: as uncertain as it is large.
        parts = (question.slope_error * (slope or 0.0) * pls, candidate.rounding,
                 (slope or 0.0) * (deviation or 0.0))  # fmt: skip
        error = math.hypot(*parts)
    memory = None
    if question.table_nbytes is not None:
        memory = candidate.memory_share * question.table_nbytes
        memory += candidate.row_nbytes * (question.rows or 0)
    machines = question.machines or job.shards
    costs = []
    if question.price is not None:
        costs.append(hours * machines * question.price)
    if question.memory_price is not None and memory is not None:
        length = (1 + candidate.overhead.total) * (job.duration / HOUR)
        costs.append(memory / 1e9 * length * question.memory_price)
    return Option(
        interval=candidate.interval,
        overhead=candidate.overhead,
        pls=pls,
        accuracy_loss=loss,
        accuracy_error=error,
        lost_hours=hours,
        memory_share=candidate.memory_share,
        memory_nbytes=memory,
        cost=sum(costs) if costs else None,
        spread=spread,
        note=candidate.note,
    )


def _reason(
    question: Question, strategies: Mapping[str, Option], best: str, runner_up: str | None
) -> str:
    full = strategies["full"]
    option, cpr = strategies[best], strategies["cpr"]
    # A strategy with a slope of its own may lose another PLS for the same accuracy.
    target = f"PLS {question.wish().target(best):.3g}"
    if question.accuracy_loss is not None:
        target = f"an accuracy loss of {question.accuracy_loss:.3g} ({target})"
    job = question.job
    if math.isinf(option.overhead.total):
        return (
            f"none of them gets a job of {time_text(job.duration)} to its end, and full recovery "
            "loses no update"
        )
    if best == "full" and cpr.interval is None:
        reason = f"{target} lets no update be lost, and full recovery loses none"
    elif best == "full" and question.wish().total_losses == 1:
        reason = (
            f"a failure takes {'the only shard' if job.shards == 1 else 'every shard'}, and none "
            "goes on: only full recovery helps"
        )
    elif best == "full":
        assert cpr.interval is not None
        reason = (
            f"partial recovery does not pay: {target} asks for a version every "
            f"{time_text(cpr.interval)}, which costs {_percent(cpr)} of the job; full recovery "
            f"costs {_percent(full)} and loses no update"
        )
    elif best.startswith("cpr"):
        assert option.interval is not None
        reason = (
            f"within {target} a version every {time_text(option.interval)} is enough: partial "
            f"recovery costs {_percent(option)} of the job where full recovery costs "
            f"{_percent(full)}"
        )
    elif best == "parity":
        reason = (
            f"steps that are {question.parity_slowdown:.2%} slower cost {_percent(option)} of the "
            f"job in all, less than any other; {option.note}"
        )
    else:
        reason = (
            f"it costs {_percent(option)} of the job where full recovery costs {_percent(full)}"
        )
        if option.accuracy_loss:
            reason += f", and about {option.accuracy_loss:.2g} of accuracy"
    if runner_up is not None:
        second = strategies[runner_up]
        reason += f"; next best is {TITLES[runner_up]} at {_percent(second)}"
        if second.pls == 0 and option.pls > 0:
            reason += ", which loses no update"
            if second.accuracy_loss:
                reason += ", and restores rounded rows"
    return reason


def _warnings(
    question: Question, strategies: Mapping[str, Option], recommended: str
) -> Iterator[str]:
    job, pls = question.job, question.wish().target(recommended)
    interval = strategies[recommended].interval
    if interval is not None and interval > _SHORT_OF_SAVES * job.duration:
        yield from _rare_versions(recommended, interval, job)
    if job.mtbf > job.duration:
        yield (
            f"fewer than one failure is expected ({job.failures:.2f}): most runs see none, some "
            "lose more than the average"
        )
    chosen = strategies[recommended].overhead.total
    if math.isinf(chosen):
        yield (
            "no strategy lets this job end: what saves, failures and recoveries take is more than "
            "a hundred times its length"
        )
    elif chosen > _NOT_SMALL:
        yield (
            f"{chosen:.0%} of the job is a large overhead: faster saves, fewer failures or parity "
            "would be worth more than a better interval"
        )
    if pls > _MEASURED_PLS and recommended.startswith("cpr"):
        yield (
            f"PLS {pls:.3g} is beyond {_MEASURED_PLS:g}, up to which the paper measured little "
            "loss: find out what it costs with emberkeep emulate --sweep fraction"
        )
    naive = strategies["partial"]
    if naive.pls > question.target_pls:
        yield (
            f"partial recovery at full recovery's interval would be expected to lose PLS "
            f"{naive.pls:.3g}, more than the target"
        )
    parity = strategies["parity"]
    r = question.parity_r
    if r is not None and r < job.failing_together and parity.interval is not None:
        yield (
            f"parity with r={r} does not bring back the {job.failing_together} shards that fail "
            f"together: r={job.failing_together} would"
        )


def _rare_versions(recommended: str, interval: timedelta, job: Job) -> Iterator[str]:
    """Where what fails early finds no version yet."""
    if recommended == "parity":
        return  # a shard comes back from the others
    none = interval >= job.duration
    what = "no version is taken before the end of the job"
    if not none:
        what = f"one version in the whole job, after {time_text(interval)}"
    if recommended == "cpr":
        after = (
            "a shard that fails starts over" if none else "a shard that fails before starts over"
        )
    elif recommended.startswith("cpr"):
        what = what.replace("version", "whole version")
        after = "a shard that fails before one has its prioritised rows alone"
    else:
        after = "a job that fails starts over" if none else "a job that fails before starts over"
    yield f"{what}: {after}; --max-interval sets a bound"


def time_text(time: timedelta) -> str:
    """A duration in the unit that people would choose."""
    hours = time / HOUR
    if hours >= 100:
        return f"{hours / 24:.1f} days"
    if hours >= 1:
        return f"{hours:.1f} h"
    if hours >= 1 / 60:
        return f"{60 * hours:.1f} min"
    seconds = 3600 * hours
    return f"{1e3 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.1f} s"


def _percent(option: Option) -> str:
    return percent(option.overhead.total)

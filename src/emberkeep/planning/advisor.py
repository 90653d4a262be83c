"""Which strategy, which interval, and why: a pure function of what is known about a job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from emberkeep.checkpoint.overheads import (
    Job,
    Overhead,
    expected_pls,
    interval_for_pls,
    optimal_full_interval,
    overhead_full,
    overhead_partial,
)
from emberkeep.errors import ConfigError

HOUR = timedelta(hours=1)

PRIORITY_SHARE = 1 / 8
"""Prioritised versions hold this share of the rows; one of so many versions is a whole one."""
DEFAULT_PLS = 0.1
PARITY_SLOWDOWN = 0.026
"""Of a step, as the ECRM paper measured it on 20 machines with 25 Gbit/s."""
PARITY_DROP = 0.12
"""Of throughput while a lost shard is rebuilt: the most that the ECRM paper saw."""

_SHORT_OF_SAVES = 0.5
_NOT_SMALL = 0.2
_MEASURED_PLS = 0.2  # the paper shows accuracy up to a target of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is known about a job and what is wanted of it."""

    job: Job
    pls: float | None = None
    """The PLS that may be expected; `DEFAULT_PLS` unless it follows from an accuracy."""
    accuracy_loss: float | None = None
    """The loss of accuracy (AUC) that may be expected; needs `slope`."""
    slope: float | None = None
    """Accuracy lost per PLS of 1, as a sweep of the emulator fits it."""
    max_interval: timedelta | None = None
    """Versions are wanted at least this often, whatever the equations say."""
    price: float | None = None
    """Per machine and hour."""
    machines: int | None = None
    """That stand still together; as many as there are shards, if not given."""
    parity_slowdown: float | None = None
    """Of every step, measured; if not given the paper's figure is shown and not recommended by."""

    def __post_init__(self) -> None:
        if self.accuracy_loss is not None and self.pls is not None:
            raise ConfigError("give a target PLS or a target accuracy loss, not both")
        if self.accuracy_loss is not None and self.slope is None:
            raise ConfigError(
                "a target accuracy loss needs the slope between PLS and accuracy: "
                "emberkeep emulate --sweep pls fits one"
            )
        for name in ("accuracy_loss", "price", "parity_slowdown"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be 0 or more, not {value:g}")
        if self.slope is not None and not (math.isfinite(self.slope) and self.slope > 0):
            raise ConfigError(f"slope must be above 0, not {self.slope:g}")
        if self.pls is not None and not 0 <= self.pls <= 1:
            raise ConfigError(f"a PLS lies between 0 and 1, not {self.pls:g}")
        if self.machines is not None and self.machines < 1:
            raise ConfigError(f"machines must be 1 or more, not {self.machines}")
        if self.max_interval is not None and self.max_interval <= timedelta(0):
            raise ConfigError(f"max_interval must be longer than no time, not {self.max_interval}")

    @property
    def target_pls(self) -> float:
        if self.accuracy_loss is not None and self.slope is not None:
            return min(1.0, self.accuracy_loss / self.slope)
        return DEFAULT_PLS if self.pls is None else self.pls


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
    lost_hours: float
    cost: float | None
    """Of the machines that stand still meanwhile, where their price is known."""
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "overhead": self.overhead.total,
            "interval_hours": None if self.interval is None else self.interval / HOUR,
            "pls": self.pls,
            "accuracy_loss": self.accuracy_loss,
            "lost_hours": self.lost_hours,
            "cost": self.cost,
            "breakdown": asdict(self.overhead),
            "note": self.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All strategies, the one to take, and what to know before taking it."""

    question: Question
    strategies: Mapping[str, Option]
    recommended: str
    reason: str
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        job = self.question.job
        return {
            "job": {
                "duration_hours": job.duration / HOUR,
                "mtbf_hours": job.mtbf / HOUR,
                "failures": job.failures,
                "shards": job.shards,
                "failing_together": job.failing_together,
                "save_hours": job.save / HOUR,
                "load_hours": job.load / HOUR,
                "reschedule_hours": job.reschedule / HOUR,
            },
            "target_pls": self.question.target_pls,
            "strategies": {name: option.to_dict() for name, option in self.strategies.items()},
            "recommended": self.recommended,
            "reason": self.reason,
            "warnings": list(self.warnings),
        }


def advise(question: Question) -> Plan:
    """Compares full recovery at its best interval with partial recovery at the interval that the
    target allows. What keeps to the target and costs least is recommended; of equals, what loses
    no update."""
    strategies = _strategies(question)
    recommended, reason = _choice(question, strategies)
    return Plan(
        question=question,
        strategies=strategies,
        recommended=recommended,
        reason=reason,
        warnings=tuple(_warnings(question, strategies, recommended)),
    )


def _strategies(question: Question) -> dict[str, Option]:
    job = question.job
    full = _capped(optimal_full_interval(job), question)
    wide = _capped(interval_for_pls(job, question.target_pls), question)
    options = {
        "full": _option(
            question, full, overhead_full(job, full), pls=0.0,
            note="every shard goes back; nothing is lost but time",
        ),
        "partial": _option(
            question, full, overhead_partial(job, full), pls=expected_pls(job, full),
            note="failed shards alone go back; saved as often as for full recovery",
        ),
    }  # fmt: skip
    if wide > timedelta(0):
        overhead, pls = overhead_partial(job, wide), expected_pls(job, wide)
        options["cpr"] = _option(
            question, wide, overhead, pls=pls,
            note="as partial, saved as rarely as the target allows",
        )  # fmt: skip
        # In between, all prioritised versions together write another model less one share.
        more = replace(overhead, save=overhead.save * (2 - PRIORITY_SHARE))
        often = f"and 1/{round(1 / PRIORITY_SHARE)} of the rows so often in between,"
        notes = {
            "cpr_mfu": f"{often} most used first; 4 bytes a row more",
            "cpr_ssu": f"{often} by sub-sampled use; half a byte a row more",
            "cpr_scar": f"{often} most changed first; every row twice",
        }
        for name, note in notes.items():
            options[name] = _option(question, wide * PRIORITY_SHARE, more, pls=pls, note=note)
    else:
        options["cpr"] = _option(
            question, None, Overhead(save=math.inf), pls=0.0, note="no interval keeps to PLS 0"
        )
    options["parity"] = _parity(question)
    return options


def _parity(question: Question) -> Option:
    """Surviving shards rebuild the lost ones while training goes on; versions are for the worst."""
    job = question.job
    given = question.parity_slowdown
    rare = _capped(job.duration, question)
    overhead = Overhead(
        save=job.save / rare,
        load=PARITY_DROP * (job.load / job.mtbf),
        reschedule=job.reschedule / job.mtbf,
        slowdown=PARITY_SLOWDOWN if given is None else given,
    )
    assumed = "" if given is not None else f"; assumes steps {PARITY_SLOWDOWN:.1%} slower"
    return _option(question, rare, overhead, pls=0.0, note=f"loses nothing, takes memory{assumed}")


def _capped(interval: timedelta, question: Question) -> timedelta:
    return interval if question.max_interval is None else min(interval, question.max_interval)


def _option(
    question: Question, interval: timedelta | None, overhead: Overhead, *, pls: float, note: str
) -> Option:
    job = question.job
    hours = overhead.total * (job.duration / HOUR)
    machines = question.machines or job.shards
    return Option(
        interval=interval,
        overhead=overhead,
        pls=pls,
        accuracy_loss=None if question.slope is None else question.slope * pls,
        lost_hours=hours,
        cost=None if question.price is None else hours * machines * question.price,
        note=note,
    )


def _choice(question: Question, strategies: Mapping[str, Option]) -> tuple[str, str]:
    full, cpr = strategies["full"], strategies["cpr"]
    target = f"PLS {question.target_pls:.3g}"
    if cpr.interval is None:
        best, reason = "full", f"{target} lets no update be lost, and full recovery loses none"
    elif cpr.overhead.total < full.overhead.total:
        best = "cpr"
        reason = (
            f"within {target} a version every {time_text(cpr.interval)} is enough: partial "
            f"recovery costs {_percent(cpr)} of the job where full recovery costs {_percent(full)}"
        )
    else:
        best = "full"
        reason = (
            f"partial recovery does not pay: {target} asks for a version every "
            f"{time_text(cpr.interval)}, which costs {_percent(cpr)} of the job; full recovery "
            f"costs {_percent(full)} and loses no update"
        )
    parity = strategies["parity"]
    measured = question.parity_slowdown is not None
    if measured and parity.overhead.total < strategies[best].overhead.total:
        best = "parity"
        reason = (
            f"steps that are {question.parity_slowdown:.2%} slower cost {_percent(parity)} of the "
            f"job in all, less than any other, and lose nothing; {reason}"
        )
    return best, reason


def _warnings(
    question: Question, strategies: Mapping[str, Option], recommended: str
) -> Iterator[str]:
    job, pls = question.job, question.target_pls
    wanted = 2 * pls * job.shards / job.failing_together * job.mtbf
    interval = strategies[recommended].interval
    if question.max_interval is None and wanted > job.duration:
        yield (
            f"PLS {pls:.3g} would allow {time_text(wanted)} between versions, longer than the job "
            f"({time_text(job.duration)}): no version is taken before its end, and a failed shard "
            "starts over; --max-interval sets a bound"
        )
    elif interval is not None and interval > _SHORT_OF_SAVES * job.duration:
        yield (
            f"one version in the whole job: a shard that fails before it, after "
            f"{time_text(interval)}, starts over; --max-interval sets a bound"
        )
    if job.mtbf > job.duration:
        yield (
            f"fewer than one failure is expected ({job.failures:.2f}): most runs see none, some "
            "lose more than the average"
        )
    chosen = strategies[recommended].overhead.total
    if chosen > _NOT_SMALL:
        yield (f"{chosen:.0%} is not a small overhead, which the equations assume: it will be more")
    if pls > _MEASURED_PLS and recommended == "cpr":
        yield (
            f"PLS {pls:.3g} is beyond {_MEASURED_PLS:g}, up to which the paper measured little "
            "loss: find out what it costs with emberkeep emulate --sweep pls"
        )
    naive = strategies["partial"]
    if naive.pls > pls:
        yield (
            f"partial recovery at full recovery's interval would be expected to lose PLS "
            f"{naive.pls:.3g}, more than the target"
        )


def time_text(time: timedelta) -> str:
    """A duration in the unit that people would choose."""
    hours = time / HOUR
    if hours >= 100:
        return f"{hours / 24:.1f} days"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"


def _percent(option: Option) -> str:
    return f"{100 * option.overhead.total:.2f}%"

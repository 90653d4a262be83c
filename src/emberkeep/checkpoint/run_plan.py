"""How a run plans itself: what it was asked for, what it has seen, and what follows. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

from emberkeep._types import Json
from emberkeep.checkpoint.failure_history import FailureHistory
from emberkeep.checkpoint.overheads import Job, Verdict, partial_pays
from emberkeep.errors import ConfigError, DamageError
from emberkeep.repository.policies import RESTORES_OF_BITS, Layout

DEFAULT_PLS = 0.1
ASSUMED_SLOPE = 0.02
"""Accuracy (AUC) lost per PLS of 1 where it was not measured: more than the emulator's own task
loses (0.0185), whose short run is more sensitive than a job."""

# Accuracy that Check-N-Run lost by restores within the number that a width is for.
_ROUNDING_LOSS = 1e-4
_RESTORES_OF_8_BITS = 100
# Of what may be lost, for rounding where versions are quantized.
_ROUNDING_SHARE = 0.2
# A plan is left as it is unless the new one differs by more, or saves more.
_MOVED = 0.2
_GAIN = 0.1
# Of the interval: writing that takes longer delays the next version.
_BUSY = 0.5
# Of a baseline: increments that are larger save nothing worth a chain.
_NEARLY_ALL = 0.6

_TARGET = re.compile(r"(accuracy loss|pls)\s+(?:of\s+)?([0-9.]+(?:e-?\d+)?)\s*(%?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a run may lose, and what is believed of its failures before it has seen any."""

    pls: float | None = None
    accuracy_loss: float | None = None
    slope: float | None = None
    """Accuracy lost per PLS of 1; `ASSUMED_SLOPE` if it was not measured."""
    mtbf: timedelta | None = None
    together: int = 1
    reschedule: timedelta = timedelta(0)
    max_interval: timedelta | None = None

    def __post_init__(self) -> None:
        if self.pls is not None and self.accuracy_loss is not None:
            raise ConfigError("give a target PLS or a target accuracy loss, not both")
        if self.pls is not None and not 0 <= self.pls <= 1:
            raise ConfigError(f"target PLS must lie between 0 and 1, not {self.pls:g}")
        given = self.accuracy_loss
        if given is not None and not 0 <= given <= 1:
            raise ConfigError(f"target accuracy loss must lie between 0 and 1, not {given:g}")
        if self.slope is not None and not (math.isfinite(self.slope) and self.slope > 0):
            raise ConfigError(f"slope must be above 0, not {self.slope:g}")
        if self.slope is not None and given is None:
            raise ConfigError(
                "slope turns a loss of accuracy into a PLS: give accuracy_loss too, or for a run "
                "that plans itself a target such as 'accuracy loss 0.01%'"
            )
        if self.mtbf is not None and self.mtbf <= timedelta(0):
            raise ConfigError(f"mtbf must be longer than no time, not {self.mtbf}")
        if isinstance(self.together, bool) or not isinstance(self.together, int):
            raise ConfigError(f"shards that fail together are a number, not {self.together!r}")
        if self.together < 1:
            raise ConfigError(f"1 shard or more fails at a time, not {self.together}")
        if self.reschedule < timedelta(0):
            raise ConfigError(f"reschedule must not be negative, not {self.reschedule}")
        if self.max_interval is not None and self.max_interval <= timedelta(0):
            raise ConfigError(f"max_interval must be longer than no time, not {self.max_interval}")

    @property
    def most_pls(self) -> float | None:
        """What may be lost; None where nothing was said."""
        if self.accuracy_loss is not None:
            return min(1.0, self.accuracy_loss / (self.slope or ASSUMED_SLOPE))
        return self.pls

    @property
    def text(self) -> str:
        if self.accuracy_loss is not None:
            assumed = "" if self.slope else f", at an assumed slope of {ASSUMED_SLOPE:g}"
            return f"accuracy loss {self.accuracy_loss:g} (PLS {self.most_pls:.3g}{assumed})"
        return f"PLS {DEFAULT_PLS if self.pls is None else self.pls:.3g}"


def target_from(text: str) -> dict[str, float]:
    """What a user writes: `"accuracy loss 0.01%"`, `"PLS 0.1"`."""
    found = _TARGET.fullmatch(text.strip()) if isinstance(text, str) else None
    try:
        value = math.nan if found is None else float(found[2])
    except ValueError:
        value = math.nan
    if found is None or math.isnan(value):
        raise ConfigError(
            f"target={text!r} is no target: write 'accuracy loss 0.01%', 'accuracy loss 0.0001' or "
            "'PLS 0.1'"
        )
    value = value / 100 if found[3] else value
    return {"pls" if found[1].lower() == "pls" else "accuracy_loss": value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run knows of itself by now."""

    left: timedelta
    """Until the end, without overheads."""
    done: float
    """The share of the job that is behind it."""
    shards: int
    pls: float
    """Lost so far."""
    stall: timedelta
    """Training stands still so long for a whole version."""
    write: timedelta
    """From a version's cut until it is durable."""
    load: timedelta
    failures: FailureHistory
    increments: float | None = None
    """Of a baseline, the mean size of the increments; None before there were any."""
    restores: int = 0
    """Of versions that were not exact, since the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How a run goes on, and why."""

    scope: Literal["full", "partial"]
    interval: timedelta
    least_interval: timedelta
    most_pls: float
    together: int
    layout: Layout
    bits: int | None
    overhead: float
    """Expected of the rest of the job; infinite where it would not end."""
    reason: str
    step: int = 0
    """At which it was made."""

    def to_dict(self) -> Json:
        document = asdict(self)
        if math.isinf(self.overhead):  # JSON has no word for it
            document["overhead"] = None
        document["interval_seconds"] = document.pop("interval").total_seconds()
        document["least_interval_seconds"] = document.pop("least_interval").total_seconds()
        return document

    @classmethod
    def from_dict(cls, document: Json) -> RunPlan:
        try:
            given = dict(document)
            for name in ("interval", "least_interval"):
                given[name] = timedelta(seconds=float(given.pop(f"{name}_seconds")))
            if given["overhead"] is None:
                given["overhead"] = math.inf
            return cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"the plan of a version is damaged: {error!r}") from error


def plan_run(
    target: Target, seen: Measured, current: RunPlan | None, *, partial: bool = True, step: int = 0
) -> RunPlan:
    """The plan for what is left of a run; `current` itself where nothing has moved enough.

    `partial` says whether shards can come back alone at all.
    """
    bits, why_bits = _bits(target, seen, current)
    most_pls = DEFAULT_PLS if target.most_pls is None else target.most_pls
    if bits is not None:
        most_pls *= 1 - _ROUNDING_SHARE
    # A share of what is left is a smaller share of the job.
    rest = max(1.0 - seen.done, 1e-6)
    left = min(1.0, max(0.0, most_pls - seen.pls) / rest) if partial else 0.0
    common: dict[str, Any] = {
        "left": _rounded(max(seen.left, timedelta(seconds=1)), 8),
        "shards": seen.shards,
        "together": min(seen.failures.together, seen.shards),
        "save": _rounded(max(seen.stall, timedelta(milliseconds=1))),
        "restart": _rounded(seen.load + target.reschedule),
        "pls": _floored(left),
        "total_losses": round(20 * seen.failures.total_losses) / 20,
        "max_interval": target.max_interval,
    }
    planned_for = seen.failures.cautious_mtbf
    verdict = _verdict(mtbf=_rounded(planned_for), **common)
    pays = verdict.pays
    if current is not None and (current.scope == "partial") != pays and left > 0:
        # Of two that cost about the same the present one stays.
        costs = verdict.partial.total, verdict.full.total
        if abs(costs[0] - costs[1]) < _GAIN * max(min(costs), 1e-9):
            pays = current.scope == "partial"
    scope: Literal["full", "partial"] = "partial" if pays else "full"
    stays = "" if pays == verdict.pays else f"; {scope} recovery stays, for so small a difference"
    if not pays:
        # What full recovery costs is proportional to the rate: the mean is best, and no caution.
        planned_for = seen.failures.mtbf
        verdict = _verdict(mtbf=_rounded(planned_for), **common)
        if verdict.pays:
            stays = "; full recovery all the same, for failures may be more frequent than that"
    interval = verdict.partial_interval if pays else verdict.full_interval
    layout, why_layout = _layout(seen, interval, current)
    chosen = verdict.partial if pays else verdict.full
    made = RunPlan(
        scope=scope,
        interval=interval,
        least_interval=min(interval, verdict.full_interval),
        most_pls=most_pls,
        together=seen.failures.together,
        layout=layout,
        bits=bits,
        overhead=chosen.total,
        reason=(
            f"{target.text}, {seen.pls:.3g} lost so far; a failure every "
            f"{_time(seen.failures.mtbf)} ({seen.failures.seen} seen), planned for one every "
            f"{_time(planned_for)}; {_time(seen.stall)} of stall a version, "
            f"{_time(seen.load)} to load: {verdict.reason}{stays}"
            + "".join(f"; {why}" for why in (why_layout, why_bits) if why)
        ),
        step=step,
    )
    longest = target.max_interval
    late = current is not None and longest is not None and current.interval > longest
    if current is not None and not late and not _moved(current, made, seen.left):
        return current
    return made


def _moved(current: RunPlan, made: RunPlan, left: timedelta) -> bool:
    """Whether the plans differ in what is `left`: an interval that reaches beyond it is as good as
    any other that does."""
    ratio = min(made.interval, left) / min(current.interval, left) if left else 1.0
    return (
        abs(math.log(ratio)) > _MOVED
        or (current.scope, current.layout, current.bits) != (made.scope, made.layout, made.bits)
        or (current.together, current.most_pls) != (made.together, made.most_pls)
    )


@lru_cache(maxsize=4096)
def _verdict(
    *, left: timedelta, mtbf: timedelta, shards: int, together: int, save: timedelta,
    restart: timedelta, pls: float, total_losses: float, max_interval: timedelta | None,
) -> Verdict:  # fmt: skip
    job = Job(
        duration=left, mtbf=mtbf, shards=shards, failing_together=together, save=save, load=restart
    )
    return partial_pays(job, pls, total_losses=total_losses, max_interval=max_interval)


def _bits(target: Target, seen: Measured, current: RunPlan | None) -> tuple[int | None, str]:
    """Quantized only where accuracy may be lost and writing is what delays versions."""
    if target.accuracy_loss is None or current is None:
        return (None if current is None else current.bits), ""
    if current.bits is None and seen.write <= _BUSY * current.interval:
        return None, ""
    expected = seen.restores + math.ceil(seen.left / seen.failures.mtbf)
    bits = bits_within(_ROUNDING_SHARE * target.accuracy_loss, expected)
    if bits is None:
        return None, "too little accuracy may be lost for versions to be quantized"
    return bits, (
        f"versions in {bits} bits, because writing one takes {_time(seen.write)} and "
        f"{expected} restores are expected"
    )


def rounding_loss(bits: int, restores: float) -> float:
    """Accuracy that restores from quantized versions lose, as the Check-N-Run paper measured it."""
    for most, width in RESTORES_OF_BITS:
        if width == bits:
            return _ROUNDING_LOSS * restores / most
    return _ROUNDING_LOSS * restores / _RESTORES_OF_8_BITS


def bits_within(accuracy_loss: float, restores: float) -> int | None:
    """The fewest bits that so many restores may take; None where 8 are too few."""
    for bits in (2, 3, 4, 8):
        if rounding_loss(bits, restores) <= accuracy_loss:
            return bits
    return None


def _layout(seen: Measured, interval: timedelta, current: RunPlan | None) -> tuple[Layout, str]:
    before: Layout = "intermittent" if current is None else current.layout
    if seen.increments is None:
        return before, ""
    if seen.increments > _NEARLY_ALL and before != "full":
        return "full", f"increments are {seen.increments:.0%} of a baseline: every version is whole"
    if seen.write > _BUSY * interval and before == "intermittent":
        return "consecutive", (
            f"writing takes {_time(seen.write)} of {_time(interval)}: versions hold what changed "
            "since the last one"
        )
    return before, ""


def _rounded(time: timedelta, parts: int = 20) -> timedelta:
    """To a twentieth, so that what hardly moves changes nothing."""
    seconds = time.total_seconds()
    if seconds <= 0:
        return time
    return timedelta(seconds=math.exp(round(math.log(seconds) * parts) / parts))


def _floored(share: float) -> float:
    """To two digits, never more."""
    if share <= 0:
        return 0.0
    digits = 10.0 ** (1 - math.floor(math.log10(share)))
    return math.floor(share * digits + 1e-9) / digits


def _time(time: timedelta) -> str:
    seconds = time.total_seconds()
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.3g} s"

"""How often a run fails, from what it has seen: since when as often as now, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from emberkeep._types import Json
from emberkeep.checkpoint.overheads import RAREST
from emberkeep.errors import DamageError

DEFAULT_MTBF = timedelta(hours=24)
"""Of a job nobody knows anything of: the middle of what the CPR paper saw in production."""

_HOUR = timedelta(hours=1)
# The chance that a failure is the first of another rate.
_CHANGE = 0.02
# Stretches that are kept, the likeliest.
_MOST = 12
# Caution is so many standard deviations: more saves jobs whose failures become more frequent, and
# costs those whose failures become rare; this keeps both close to an oracle, in simulated jobs.
_CAUTION = 0.5
# How many shards a failure takes is of about the last 1 / (1 - this) failures.
_MEMORY = 0.85


@dataclass(frozen=True, slots=True)
class Stretch:
    """One answer to "since when do failures come as often as now?"."""

    weight: float
    """How likely it is; all of them together are certain."""
    hours: float
    count: float
    """Failures in so many hours; what was believed before counts as one."""

    def survives(self, hours: float) -> float:
        """The chance that the next failure takes longer, for a rate that is a gamma variable."""
        return math.exp(-self.count * math.log1p(hours / self.hours))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureHistory:
    """Failures as they were seen; part of every version.

    Every failure may be the first of another rate, so each begins a stretch, which is as likely as
    it explains the gaps since (Adams and MacKay, "Bayesian Online Changepoint Detection", 2007).
    While nothing changes all gaps count, and the estimate becomes sure; a handful that the old rate
    does not explain makes another stretch the likeliest. The time since the last failure counts
    as it passes: a long quiet is news, too.
    """

    stretches: tuple[Stretch, ...]
    believed: float
    """The MTBF in hours that a new rate is guessed around."""
    since: float = 0.0
    """Hours, since the last failure."""
    shards: float
    """That recent failures took where some were left, each fading as others come."""
    count: float = 1.0
    """Those failures, fading alike."""
    total: float = 0.0
    """Failures that left no shard, such as the end of a process, fading alike."""
    seen: int = 0
    """Failures in all."""

    @classmethod
    def expected(cls, mtbf: timedelta | None, together: int = 1) -> FailureHistory:
        """Before anything was seen: as if one failure had been."""
        hours = (mtbf or DEFAULT_MTBF) / _HOUR
        return cls(stretches=(Stretch(1.0, hours, 1.0),), believed=hours, shards=float(together))

    @classmethod
    def known(cls, mtbf: timedelta) -> FailureHistory:
        """Of somebody who is sure."""
        hours = mtbf / _HOUR
        return cls(stretches=(Stretch(1.0, 1e9 * hours, 1e9),), believed=hours, shards=1.0)

    def passed(self, time: timedelta) -> FailureHistory:
        return replace(self, since=self.since + time / _HOUR)

    def failed(self, shards: int | None) -> FailureHistory:
        """After a failure that took so many shards; None: all, and nothing goes on."""
        found = []
        for old in self._possible():
            hours = old.hours + self.since
            density = old.survives(self.since) * old.count / hours
            found.append(Stretch(old.weight * density, hours, old.count + 1))
        found = sorted(found, key=lambda stretch: stretch.weight, reverse=True)[:_MOST]
        sure = math.fsum(stretch.weight for stretch in found)
        return FailureHistory(
            stretches=tuple(replace(stretch, weight=stretch.weight / sure) for stretch in found),
            believed=self.believed,
            shards=_MEMORY * self.shards + (shards or 0),
            count=_MEMORY * self.count + 1,
            total=_MEMORY * self.total + (shards is None),
            seen=self.seen + 1,
        )

    def _possible(self) -> tuple[Stretch, ...]:
        """With one that began after the last failure."""
        if not self.seen:
            return self.stretches
        kept = (replace(old, weight=(1 - _CHANGE) * old.weight) for old in self.stretches)
        return (*kept, Stretch(_CHANGE, self.believed, 1.0))

    def _rate(self) -> tuple[float, float]:
        """Failures in an hour: the mean, and the standard deviation."""
        weights = [old.weight * old.survives(self.since) for old in self._possible()]
        sure = math.fsum(weights)
        if not sure:  # a quiet that nothing explains
            weights[-1] = sure = 1.0
        mean = square = 0.0
        for weight, old in zip(weights, self._possible(), strict=True):
            hours, share = old.hours + self.since, weight / sure
            mean += share * old.count / hours
            square += share * old.count * (old.count + 1) / hours**2
        return mean, math.sqrt(max(0.0, square - mean**2))

    @property
    def mtbf(self) -> timedelta:
        return _time_between(self._rate()[0])

    @property
    def cautious_mtbf(self) -> timedelta:
        """On the bad side of the mean: what to plan for where something may be lost. Who plans for
        too few failures has spent that before knowing better, and all later failures are full
        recoveries; who plans for too many takes some versions more."""
        mean, deviation = self._rate()
        return _time_between(mean + _CAUTION * deviation)

    @property
    def together(self) -> int:
        """Shards that a failure takes where some are left."""
        return max(1, round(self.shards / max(self.count - self.total, 1e-6)))

    @property
    def total_losses(self) -> float:
        """The share of the failures that leave no shard."""
        return min(1.0, self.total / self.count)

    def to_dict(self) -> Json:
        document = asdict(self)
        document["stretches"] = [[s.weight, s.hours, s.count] for s in self.stretches]
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> FailureHistory:
        try:
            given = dict(document)
            made = tuple(Stretch(*map(float, stretch)) for stretch in given.pop("stretches"))
            if not made or not all(0 < v < math.inf for s in made for v in (s.hours, s.count)):
                raise ValueError(made)
            if not 0 < math.fsum(stretch.weight for stretch in made) < math.inf:
                raise ValueError(made)
            found = cls(stretches=made, **given)
            numbers = (found.since, found.shards, found.count, found.total, found.seen)
            if not (0 < found.believed < math.inf and all(0 <= n < math.inf for n in numbers)):
                raise ValueError(given)
            return found
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"the counters of a version are damaged: {error!r}") from error


def _time_between(rate: float) -> timedelta:
    """Failures that come so often in an hour, as a time that can be said."""
    return min(max(1 / rate, 1e-6), RAREST / _HOUR) * _HOUR

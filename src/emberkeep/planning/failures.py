"""When machines fail: distributions of the time between failures, and failures drawn from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np

from emberkeep._types import F64
from emberkeep.checkpoint.failure_gaps import Gaps, Kind
from emberkeep.checkpoint.overheads import RAREST
from emberkeep.errors import ConfigError, DataError
from emberkeep.planning.failure_log import FEWEST

HOUR = timedelta(hours=1)

Scaling = Literal["linear", "independent"]

# Of their mean: gaps that differ by less are not those of failures.
_REGULAR = 0.01
# Streams of one seed: when failures strike says nothing of what they take.
_TIMES, _SHARDS = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A distribution of the time between failures, fitted by maximum likelihood, from 0 on."""

    name: str
    parameters: tuple[float, ...]
    aic: float
    """Akaike's criterion, by which the best fit is chosen: lower is better."""
    rmse: float
    """Of the survival curve against the observed one."""

    @property
    def mean(self) -> timedelta:
        return float(self._frozen().mean()) * HOUR

    def survival(self, hours: F64) -> F64:
        """The chance that a job runs so long without a failure."""
        found: F64 = np.asarray(self._frozen().sf(hours), np.float64)
        return found

    def hazard(self, hours: F64) -> F64:
        """Failures per hour, given that none has happened so far."""
        frozen = self._frozen()
        with np.errstate(divide="ignore", invalid="ignore"):
            found: F64 = np.asarray(frozen.pdf(hours) / frozen.sf(hours), np.float64)
        return found

    def gaps(self) -> Gaps:
        """The same for estimates and simulated jobs, around any mean."""
        if self.name == "exponential":
            return Gaps()
        return Gaps(kind=_kind(self.name), shape=self.parameters[0])

    def draw(
        self, duration: timedelta, *, seed: int, mtbf: timedelta | None = None
    ) -> tuple[timedelta, ...]:
        """When a job of that length fails: gap after gap, until its end; with another mean, `mtbf`,
        all gaps are as much longer or shorter."""
        random = np.random.default_rng([seed, _TIMES])
        frozen, now = self._frozen(), 0.0
        scale = 1.0 if mtbf is None else mtbf / self.mean
        times: list[timedelta] = []
        while True:
            # One by one: how many are needed is not known, and the stream must not depend on it.
            now += scale * float(frozen.rvs(random_state=random))
            if now * HOUR >= duration:
                return tuple(times)
            times.append(now * HOUR)

    def _frozen(self) -> Any:
        return _distributions()[self.name](*self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Shards that go down together."""

    at: timedelta
    shards: tuple[int, ...]


def fits(gaps_hours: F64, censored_hours: F64 | None = None) -> tuple[Fit, ...]:
    """Gamma, Weibull, exponential and log-normal, the best first.

    `censored_hours` are times without a failure whose end nobody saw: left out, the others would
    look shorter than gaps are. A distribution whose mean is no time that can be planned with is
    left out; the exponential one always has such a mean.
    """
    gaps = np.sort(np.asarray(gaps_hours, np.float64))
    censored = np.empty(0) if censored_hours is None else np.asarray(censored_hours, np.float64)
    censored = censored[censored > 0]
    distributions = _distributions()
    from scipy import stats

    if len(gaps) < FEWEST or gaps[0] <= 0 or not np.all(np.isfinite(gaps)):
        raise DataError(f"a fit needs {FEWEST} gaps or more, finite and longer than no time")
    if gaps.std() < _REGULAR * gaps.mean():
        raise DataError(
            f"all gaps are about {gaps.mean():.3g} h: what comes as regularly is planned, or its "
            "times are rounded, and no distribution fits it; give --mtbf"
        )
    observed = observed_survival(gaps, censored)
    data = stats.CensoredData(uncensored=gaps, right=censored) if censored.size else gaps
    found = []
    for name, distribution in distributions.items():
        parameters = tuple(float(p) for p in distribution.fit(data, floc=0))
        frozen = distribution(*parameters)
        if not 0 < float(frozen.mean()) <= RAREST / HOUR:
            continue
        free = len(parameters) - 1  # where it begins is given
        error = frozen.sf(gaps) - observed
        found.append(
            Fit(
                name=name,
                parameters=parameters,
                aic=2 * free - 2 * float(frozen.logpdf(gaps).sum() + frozen.logsf(censored).sum()),
                rmse=float(np.sqrt(np.mean(error**2))),
            )
        )
    return tuple(sorted(found, key=lambda fit: fit.aic))


def observed_survival(gaps: F64, censored: F64) -> F64:
    """The share of gaps that are longer, at each of the ascending `gaps`, in the middle of its
    step: after Kaplan and Meier, for whom a censored time counts until it ends."""
    shorter = np.searchsorted(gaps, gaps)
    at_risk = gaps.size - shorter + censored.size - np.searchsorted(np.sort(censored), gaps)
    # Equal gaps are one after another, each with one fewer at risk.
    order = np.arange(gaps.size) - shorter
    steps = 1 - 1 / np.maximum(at_risk - order, 1)
    after = np.cumprod(steps)
    before = np.concatenate([[1.0], after[:-1]])
    found: F64 = (before + after) / 2
    return found


def scaled_mtbf(
    mtbf: timedelta, *, nodes: int, to: int, scaling: Scaling = "linear", unit: timedelta = HOUR
) -> timedelta:
    """The MTBF of `to` nodes, where that of `nodes` nodes is known.

    *linear*: twice the nodes, half the time, which is what production clusters show. *independent*:
    in every `unit` each node fails with the same chance p, so the job does with 1 − (1 − p)^n; the
    MTBF never falls below one unit. Far above it the two agree.
    """
    if nodes < 1 or to < 1:
        raise ConfigError(f"nodes must be 1 or more, not {min(nodes, to)}")
    if scaling == "linear":
        return mtbf * nodes / to
    if mtbf <= unit:
        raise ConfigError(
            f"independent failures per {unit} need an MTBF above that, not {mtbf}: "
            "use the linear model"
        )
    survives = math.log1p(-unit / mtbf) / nodes
    return unit / -math.expm1(survives * to)


def drawn_failures(
    times: Sequence[timedelta], *, shards: int, together: int, seed: int
) -> tuple[Failure, ...]:
    """At each time `together` different shards go down, each choice as likely as any other."""
    if not 1 <= together <= shards:
        raise ConfigError(f"1 to {shards} of {shards} shards can fail together, not {together}")
    random = np.random.default_rng([seed, _SHARDS])
    return tuple(
        Failure(
            at=at,
            shards=tuple(sorted(int(s) for s in random.choice(shards, together, replace=False))),
        )
        for at in sorted(times)
    )


def uniform_times(count: int, duration: timedelta, *, seed: int) -> tuple[timedelta, ...]:
    """So many moments, each equally likely anywhere in the job."""
    drawn = np.random.default_rng([seed, _TIMES]).random(count)
    return tuple(duration * float(share) for share in np.sort(drawn))


def _distributions() -> dict[str, Any]:
    try:
        from scipy import stats
    except ImportError:
        raise ConfigError(
            "fitting observed failures needs scipy, which is not installed: run pip install "
            "'emberkeep[plan]'"
        ) from None

    return {
        "gamma": stats.gamma,
        "weibull": stats.weibull_min,
        "exponential": stats.expon,
        "log-normal": stats.lognorm,
    }


def _kind(name: str) -> Kind:
    kinds: dict[str, Kind] = {"gamma": "gamma", "weibull": "weibull", "log-normal": "log-normal"}
    return kinds[name]

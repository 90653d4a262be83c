"""Sweeps of the emulator: over targets, over failures, and over random runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from emberkeep._types import F64
from emberkeep.checkpoint.overheads import interval_for_pls, partial_pays
from emberkeep.errors import ConfigError
from emberkeep.planning.emulator import Emulation, Name, Outcome, Progress, Task, run_all

TARGETS = (0.02, 0.1, 0.2)
COUNTS = (2, 20, 40)
FRACTIONS = (1 / 8, 1 / 4, 1 / 2)
SMALL_TARGET = 0.02

RANDOM_SHARDS = 16
RANDOM_FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
MOST_FAILURES = 32
# Of the job. Intervals are multiples of it, so that each of them can be divided into the turns of
# prioritised versions and every strategy has the same.
_INTERVALS = 6

SHORT = ("data.samples=165000",)
"""Of the small task, for random runs: there are many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    target_pls: float
    failures: int
    fraction: float
    """Of the shards, lost at each failure."""
    seed: int
    outcome: Outcome
    auc_loss: float
    """Against the run of the same seed without failures."""
    full_overhead: float = math.nan
    """What full recovery costs under the same failures, where that was asked."""
    refused: bool = False
    """The equations say that partial recovery does not pay here."""

    def to_dict(self) -> dict[str, Any]:
        document = {**asdict(self), **self.outcome.to_dict()}
        del document["outcome"]
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """How accuracy falls with PLS, over the runs of one strategy."""

    runs: int
    slope: float
    """AUC lost per PLS of 1: the least-squares line through no loss at PLS 0."""
    slope_error: float
    """Its standard error."""
    slope_saved: float
    """The same without runs in which a shard started over."""
    correlation: float
    """Pearson's, between PLS and AUC lost, over all runs."""
    correlation_saved: float
    """The same without runs in which a shard started over."""
    rank_correlation: float
    """Spearman's, over all runs."""


def over_targets(
    spec: Emulation,
    strategies: Sequence[Name] = ("cpr", "cpr_ssu"),
    *,
    progress: Progress = lambda *_: None,
) -> tuple[list[Point], Outcome]:
    """Figure 9: what a target PLS trades; and the run without failures."""
    cases = [
        Task(spec=replace(spec, pls=target), strategy=name)
        for name in strategies
        for target in TARGETS
    ]
    alone, *outcomes = run_all([Task(spec=spec, strategy=None), *cases], progress=progress)
    return [_point(c.spec, o, alone) for c, o in zip(cases, outcomes, strict=True)], alone


def over_failures(
    spec: Emulation, strategy: Name = "cpr", *, progress: Progress = lambda *_: None
) -> tuple[list[Point], Outcome]:
    """Figure 10: more failures, more shards each time, at a small target. Partial recovery is
    tried also where it is refused; what full recovery costs stands beside it."""
    specs = []
    for count in COUNTS:
        for fraction in FRACTIONS:
            together = max(1, round(fraction * spec.job.shards))
            mtbf = spec.job.duration / count
            job = replace(spec.job, mtbf=mtbf, failing_together=together)
            # From a log, as many as its gaps make of this MTBF.
            number = count if spec.fit is None else None
            specs.append(replace(spec, job=job, pls=SMALL_TARGET, count=number, force=True))
    cases = [Task(spec=case, strategy=name) for case in specs for name in ("full", strategy)]
    alone, *outcomes = run_all([Task(spec=spec, strategy=None), *cases], progress=progress)
    points = [
        replace(
            _point(case, partial, alone),
            full_overhead=full.overhead.total,
            refused=not partial_pays(case.job, case.pls).pays,
        )
        for case, full, partial in zip(specs, outcomes[::2], outcomes[1::2], strict=True)
    ]
    return points, alone


def over_random_runs(
    spec: Emulation,
    strategies: Sequence[Name] = ("cpr", "cpr_mfu", "cpr_ssu"),
    *,
    runs: int,
    seeds: int = 3,
    progress: Progress = lambda *_: None,
) -> list[Point]:
    """Figures 11 and 12: PLS against accuracy, over runs with 1 to 32 failures that take 6.25% to
    50% of the shards, and an interval for an expected PLS of 0 to 1. Every strategy goes through
    the same failures with the same interval."""
    if runs < 1 or seeds < 1:
        raise ConfigError(f"there must be 1 random run or more, not {min(runs, seeds)}")
    strategies = list(dict.fromkeys(strategies))  # a run that counts twice proves nothing more
    specs = [_random_run(spec, run, seeds) for run in range(runs)]
    alone_specs = {case.settings.run.seed: case for case in specs}
    cases = [Task(spec=case, strategy=name) for name in strategies for case in specs]
    alone_cases = [Task(spec=case, strategy=None) for case in alone_specs.values()]
    found = run_all([*alone_cases, *cases], progress=progress)
    alone = dict(zip(alone_specs, found, strict=False))
    return [
        _point(case.spec, outcome, alone[case.spec.settings.run.seed])
        for case, outcome in zip(cases, found[len(alone_cases) :], strict=True)
    ]


def _random_run(spec: Emulation, run: int, seeds: int) -> Emulation:
    random = np.random.default_rng([spec.seed, run])
    count = int(random.integers(1, MOST_FAILURES + 1))
    together = round(float(random.choice(RANDOM_FRACTIONS)) * RANDOM_SHARDS)
    job = replace(
        spec.job,
        shards=RANDOM_SHARDS,
        failing_together=together,
        mtbf=spec.job.duration / count,
    )
    target = float(random.uniform(0.0, 1.0))
    parts = max(1, round(interval_for_pls(job, target) / job.duration * _INTERVALS))
    interval = job.duration * (parts / _INTERVALS)
    settings = replace(spec.settings, run=replace(spec.settings.run, seed=run % seeds))
    return replace(
        spec, job=job, pls=target, count=count if spec.fit is None else None, interval=interval,
        settings=settings, seed=spec.seed + run,
    )  # fmt: skip


def _point(spec: Emulation, outcome: Outcome, alone: Outcome) -> Point:
    return Point(
        target_pls=spec.pls,
        failures=len(spec.failures()),
        fraction=spec.job.failing_together / spec.job.shards,
        seed=spec.settings.run.seed,
        outcome=outcome,
        auc_loss=alone.auc - outcome.auc,
    )


def lines(points: Iterable[Point]) -> dict[str, Line]:
    """By strategy, in the order in which they appear."""
    by_strategy: dict[str, list[Point]] = {}
    for point in points:
        by_strategy.setdefault(point.outcome.strategy, []).append(point)
    return {name: _line(chosen) for name, chosen in by_strategy.items()}


def _line(points: Sequence[Point]) -> Line:
    pls = np.array([p.outcome.pls for p in points])
    loss = np.array([p.auc_loss for p in points])
    saved = np.array([not p.outcome.started_over for p in points])
    return Line(
        runs=len(points),
        slope=_slope(pls, loss),
        slope_error=_slope_error(pls, loss),
        slope_saved=_slope(pls[saved], loss[saved]),
        correlation=_correlation(pls, loss),
        correlation_saved=_correlation(pls[saved], loss[saved]),
        rank_correlation=_correlation(_ranks(pls), _ranks(loss)),
    )


def _slope(pls: F64, loss: F64) -> float:
    return float(pls @ loss / (pls @ pls)) if pls.any() else math.nan


def _slope_error(pls: F64, loss: F64) -> float:
    if len(pls) < 2 or not pls.any():
        return math.nan
    rest = loss - _slope(pls, loss) * pls
    return math.sqrt(float(rest @ rest) / (len(pls) - 1) / float(pls @ pls))


def _correlation(x: F64, y: F64) -> float:
    if len(x) < 2 or not x.std() or not y.std():
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: F64) -> F64:
    """Equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared: F64 = (ends - counts + ends - 1) / 2.0
    return shared[place]

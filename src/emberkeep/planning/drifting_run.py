"""Runs whose failures or saves change half-way: one that plans itself, a fixed plan, an oracle.

Each run is simulated event by event. What plans is the code that a keeper uses; what it is shown is
what a keeper would have measured. All three meet the same failures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import numpy as np

from emberkeep.checkpoint.failure_history import FailureHistory
from emberkeep.checkpoint.run_plan import Measured, RunPlan, Target, plan_run

HOUR = timedelta(hours=1)
Policy = Literal["closed", "fixed", "oracle"]

_RECENT = 5
_MOST_EVENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A job whose MTBF and save time are multiplied by something once half of it has passed."""

    target: Target
    hours: float = 400.0
    mtbf: float = 10.0
    save: float = 2 / 60
    load: float = 3 / 60
    shards: int = 8
    mtbf_factor: float = 1.0
    save_factor: float = 1.0
    believed: float | None = None
    """The MTBF that the run is given; the true one, if not."""

    def mtbf_at(self, now: float) -> float:
        return self.mtbf * (self.mtbf_factor if now >= self.hours / 2 else 1.0)

    def save_at(self, now: float) -> float:
        return self.save * (self.save_factor if now >= self.hours / 2 else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """What a run came to."""

    overhead: float
    pls: float
    plans: int


def run(drift: Drift, policy: Policy, *, seed: int) -> Drifted:
    """One job under one policy; the seed decides the failures alone."""
    return _Run(drift, policy, np.random.default_rng([seed, 11])).to_the_end()


def compare(
    drift: Drift, *, jobs: int, first: int = 0, progress: Callable[[], object] = lambda: None
) -> dict[Policy, list[Drifted]]:
    """So many jobs under each policy, by the seeds from `first` on."""
    policies: tuple[Policy, ...] = ("closed", "fixed", "oracle")
    found: dict[Policy, list[Drifted]] = {policy: [] for policy in policies}
    for seed in range(first, first + jobs):
        for policy in policies:
            found[policy].append(run(drift, policy, seed=seed))
        progress()
    return found


class _Run:
    def __init__(self, drift: Drift, policy: Policy, random: np.random.Generator) -> None:
        self.drift, self.policy, self.random = drift, policy, random
        self.now = self.work = self.saved = self.pls = self.pls_saved = 0.0
        self.recovered = np.zeros(drift.shards)
        self.recovered_saved = self.recovered.copy()
        self.history = FailureHistory.expected((drift.believed or drift.mtbf) * HOUR)
        self.counted_at = 0.0
        self.stalls: list[float] = []
        self.plans = 0
        self.plan: RunPlan | None = None
        self.next_failure = self._draw(0.0)
        self._review(force=True)

    def _draw(self, now: float) -> float:
        """Failures come at any moment, at the rate of that moment."""
        left, change = float(self.random.exponential()), self.drift.hours / 2
        if now < change:
            until = (change - now) / self.drift.mtbf_at(now)
            if left < until:
                return now + left * self.drift.mtbf_at(now)
            return change + (left - until) * self.drift.mtbf_at(change)
        return now + left * self.drift.mtbf_at(now)

    def to_the_end(self) -> Drifted:
        drift = self.drift
        for _ in range(_MOST_EVENTS):
            plan = self.plan
            assert plan is not None
            interval = plan.interval / HOUR
            due = self.saved + interval
            if plan.scope == "partial":
                left = max(0.0, plan.most_pls - self.pls) * drift.hours * drift.shards
                risky = self.saved + left / plan.together
                due = min(due, max(risky, self.saved + plan.least_interval / HOUR))
            until = max(self.work, min(due, drift.hours))
            # The oracle hears of a change at once.
            change = drift.hours / 2
            end = self.now + until - self.work
            first = min(end, self.next_failure)
            if self.policy == "oracle" and self.now < change < first:
                self.work += change - self.now
                self.now = change
                self._review()
                continue
            if self.next_failure < end:
                self.work += self.next_failure - self.now
                self._strike()
                continue
            self.now, self.work = end, until
            if self.work >= drift.hours:
                return Drifted(overhead=self.now / drift.hours - 1, pls=self.pls, plans=self.plans)
            save = drift.save_at(self.now)
            if self.next_failure < self.now + save:
                self._strike()  # void, and due again
                continue
            self.now += save
            self.stalls.append(save)
            self.saved, self.pls_saved = self.work, self.pls
            self.recovered_saved = self.recovered.copy()
            self._review()
        raise AssertionError("a run that does not end")

    def _strike(self) -> None:
        """One failure after another, until a recovery ends before the next."""
        drift, plan = self.drift, self.plan
        assert plan is not None
        while True:
            self.now = self.next_failure
            self.next_failure = self._draw(self.now)
            shard = int(self.random.integers(drift.shards))
            since = max(self.saved, float(self.recovered[shard]))
            loss = max(0.0, self.work - since) / (drift.hours * drift.shards)
            if plan.scope == "partial" and self.pls + loss <= plan.most_pls:
                self.pls += loss
                self.recovered[shard] = self.work
            else:
                self.work, self.pls = self.saved, self.pls_saved
                self.recovered = self.recovered_saved.copy()
            self._pass(self.now)
            self.history = self.history.failed(1)
            if self.next_failure >= self.now + drift.load:
                break
        self.now += drift.load
        self._review()

    def _pass(self, now: float) -> None:
        self.history = self.history.passed((now - self.counted_at) * HOUR)
        self.counted_at = now

    def _review(self, *, force: bool = False) -> None:
        if self.policy == "fixed" and not force:
            return
        drift = self.drift
        self._pass(self.now)
        save = float(np.median(self.stalls[-_RECENT:])) if self.stalls else drift.save
        history = self.history
        if self.policy == "fixed":  # what is believed is taken for certain
            history = FailureHistory.known((drift.believed or drift.mtbf) * HOUR)
        elif self.policy == "oracle":
            save = drift.save_at(self.now)
            history = FailureHistory.known(drift.mtbf_at(self.now) * HOUR)
        seen = Measured(
            left=max(drift.hours - self.work, 1e-3) * HOUR,
            done=self.work / drift.hours,
            shards=drift.shards,
            pls=self.pls,
            stall=save * HOUR,
            write=save * HOUR,
            load=drift.load * HOUR,
            failures=history,
        )
        current = None if self.policy == "oracle" else self.plan
        made = plan_run(drift.target, seen, current)
        if made is not self.plan:
            self.plans += 1
        self.plan = made

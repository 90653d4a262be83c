"""A run that plans itself on real servers, against the plan of its start and an oracle.

Real servers are killed (SIGKILL) at seeded moments of a training, and half-way failures become four
times as frequent. One run plans itself (`ek.auto`), one keeps the plan that it made at the start,
and one knows how often servers fail from then on. Versions, recoveries and repeated steps are real;
time is that of a job, which counts two minutes for each step, whatever else the machine is doing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import emberkeep as ek
from _common import options, report
from emberkeep.checkpoint.failure_history import FailureHistory
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.runtime.pool import Pool
from emberkeep.tables import Optimizer, Table
from emberkeep.testing.virtual_clock import VirtualClock
from tests.servers import Farm, FarmLauncher

POLICIES = ("closed", "fixed", "oracle")
SHARDS, ROWS, DIM, BATCH = 4, 20_000, 8, 64
STEP_SECONDS, SAVE_STEPS, RECOVERY_STEPS = 120.0, 1, 2.5
STEP = timedelta(seconds=STEP_SECONDS)
MTBF_STEPS, FACTOR = 100, 0.25
TARGET = 0.05
# Steps and seeds: jobs of a hundred failures, and of twenty.
JOBS = {"long": (4000, (31, 32)), "short": (800, (31, 32, 33))}
QUICK_JOBS = {"long": (100, (31,))}
LONGEST = 4  # jobs, of the longest that failures are drawn for
COLUMNS = [
    "job", "seed", "policy", "overhead", "versions", "failures", "steps again", "full", "partial",
    "PLS", "plans",
]  # fmt: skip

NOTE = f"""\
Overheads are shares of the job: steps that were taken again, {SAVE_STEPS} step for each version
(training stands still while a state is gathered) and {RECOVERY_STEPS} for each recovery. All
policies know the MTBF of the first half ({MTBF_STEPS} steps), and servers are killed at the same
moments of the job's clock; who loses more time meets more of them. The target is PLS {TARGET:g}.
Ratios are of the sums over all seeds; their intervals (90%) are of seeds drawn again and again."""


class SlowState:
    """What a version has to wait for."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def state_dict(self) -> dict[str, Any]:
        self._clock.sleep(SAVE_STEPS * STEP_SECONDS)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Failures:
    """When which server is killed, in steps of the job's clock: drawn before the job, so that all
    policies meet the same failures at the same moments, for as long as each needs."""

    def __init__(self, steps: int, seed: int) -> None:
        random = np.random.default_rng([seed, 3])
        self._change = steps / 2
        before = _arrivals(random, MTBF_STEPS, self._change)
        after = self._change + _arrivals(random, MTBF_STEPS * FACTOR, LONGEST * steps)
        self._times = [*before.tolist(), *after.tolist()]
        self._shards = random.integers(SHARDS, size=len(self._times)).tolist()

    def mtbf(self, now: float) -> float:
        return MTBF_STEPS * (FACTOR if now >= self._change else 1.0)

    def strike(self, now: float) -> int | None:
        """The server that dies now, if one does."""
        if now < self._times[0]:
            return None
        del self._times[0]
        return int(self._shards.pop(0))


def _arrivals(random: np.random.Generator, mean: float, until: float) -> Any:
    """Moments at random, with gaps of `mean` on average."""
    gaps = random.exponential(mean, size=int(2 * until / mean) + 50)
    times = np.cumsum(gaps)
    assert times[-1] > until, "too few were drawn"
    return times[times < until]


class Servers:
    """`cluster=` on servers that are forked from one process: a hundred are killed in each run."""

    def __init__(self, farm: Farm) -> None:
        self.launcher = FarmLauncher(farm, SHARDS)

    def open(self, tables: Sequence[Table], optimizer: Optimizer, *, seed: int) -> FlightCluster:
        return FlightCluster(tables, optimizer, self.launcher, seed=seed, pool=Pool(1))


class Run:
    """One training under one policy."""

    def __init__(self, policy: str, target: float, steps: int, seed: int, farm: Farm) -> None:
        self.policy, self.steps = policy, steps
        self.clock, self.began = VirtualClock(), 0.0
        self.failures = Failures(steps, seed)
        self.versions = self.plans = self.killed = self.executed = 0
        self.servers = Servers(farm)
        self.bags = ek.EmbeddingBags(
            [ek.Table("item", rows=ROWS, dim=DIM)], optimizer=ek.SGD(lr=0.1),
            cluster=self.servers, seed=seed,
        )  # fmt: skip
        random = np.random.default_rng([seed, 4])
        self.batches = torch.from_numpy(random.integers(0, ROWS, (64, BATCH)))
        self.strategy = ek.auto(
            target=f"PLS {target:g}", mtbf=MTBF_STEPS * STEP,
            first=20 * STEP,
        )  # fmt: skip

    def now(self) -> float:
        """In steps since the run began."""
        return (self.clock.monotonic() - self.began) / STEP_SECONDS

    def hear(self, event: str, details: dict[str, Any]) -> None:
        self.versions += event == "saved" and 0 < details["step"] < self.steps
        self.plans += event == "planned"

    def follow_policy(self, planner: Any) -> None:
        """What a policy knows of failures, and when it plans."""
        hear, review = planner.hear, planner.review

        def hear_of(event: str, details: dict[str, Any]) -> None:
            if event == "recovered":  # as long as it takes on the job's clock
                self.clock.sleep(RECOVERY_STEPS * STEP_SECONDS)
                details = {**details, "seconds": RECOVERY_STEPS * STEP_SECONDS}
            hear(event, details)

        planner.hear = hear_of
        if self.policy == "fixed":
            planner.review = lambda step: review(step) if planner.plan is None else None
        if self.policy != "closed":
            planner._passed = lambda: FailureHistory.known(
                self.failures.mtbf(self.now() if self.policy == "oracle" else 0.0) * STEP
            )

    def to_the_end(self) -> dict[str, Any]:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            keeper = ek.Keeper(
                place, self.bags, self.bags.optimizer, total_steps=self.steps, clock=self.clock,
                strategy=self.strategy, state={"slow": SlowState(self.clock)}, on_event=self.hear,
            )  # fmt: skip
            self.follow_policy(keeper._planner)
            keeper.resume()
            self.began, changed = self.clock.monotonic(), False
            while keeper.steps < self.steps:
                with keeper.surviving():
                    self.step(keeper)
                if not changed and self.now() >= self.steps / 2:
                    changed = True
                    keeper._planner.news = True  # type: ignore[union-attr]
            overhead, made = self.now() / self.steps - 1, keeper.recoveries()
            assert made is not None
            plan = keeper._planner.plan  # type: ignore[union-attr]
            keeper.close()
        self.bags.cluster.close()
        self.servers.launcher.end()
        return {
            "overhead": overhead, "versions": self.versions, "failures": self.killed,
            "again": self.executed - self.steps, "full": made.full, "partial": made.partial,
            "pls": made.pls, "plans": self.plans, "seconds": time.monotonic() - started,
            "last_plan": plan.reason if plan else "none",
        }  # fmt: skip

    def step(self, keeper: ek.Keeper) -> None:
        struck = self.failures.strike(self.now())
        if struck is not None:
            self.killed += 1
            self.servers.launcher.kill(struck)
        ids = self.batches[keeper.steps % len(self.batches)]
        self.bags({"item": ids}).sum().backward()
        self.bags.optimizer.step()
        self.bags.optimizer.zero_grad()
        self.executed += 1
        self.clock.sleep(STEP_SECONDS)
        keeper.step()
        if keeper.cut_step == keeper.steps:
            keeper.wait()  # seconds of writing here are less than a step of the job


def runs(
    chosen: list[tuple[int, str]], steps: int
) -> Iterator[tuple[tuple[int, str], dict[str, Any]]]:
    """Side by side, each in a process of its own: their clocks are their own, too."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(chosen), os.cpu_count() or 1), context) as pool:
        made = [pool.submit(run_one, policy, steps, seed) for seed, policy in chosen]
        for which, future in zip(chosen, made, strict=True):
            yield which, future.result()


def run_one(policy: str, steps: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    farm = Farm()
    try:
        return Run(policy, TARGET, steps, seed, farm).to_the_end()
    finally:
        farm.close()


def ratio(ones: list[float], others: list[float]) -> tuple[float, float, float]:
    """Of the sums, and the interval that nine in ten draws of the seeds lie in."""
    random = np.random.default_rng(0)
    drawn = random.integers(len(ones), size=(10_000, len(ones)))
    sums = np.array(ones)[drawn].sum(axis=1) / np.array(others)[drawn].sum(axis=1)
    low, high = np.quantile(sums, (0.05, 0.95))
    return sum(ones) / sum(others), float(low), float(high)


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    jobs = QUICK_JOBS if given.quick else JOBS
    rows, figures = [], {}
    for length, (steps, seeds) in jobs.items():
        overheads: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        pls = []
        for (seed, policy), run in runs(list(itertools.product(seeds, POLICIES)), steps):
            overheads[policy].append(run["overhead"])
            rows.append([
                length, str(seed), policy, f"{run['overhead']:.1%}",
                *(str(run[key]) for key in ("versions", "failures", "again", "full", "partial")),
                f"{run['pls']:.3g}", str(run["plans"]),
            ])  # fmt: skip
            print(
                f"{length} {seed} {policy}: {run['overhead']:.1%}, PLS {run['pls']:.3g}, "
                f"{run['failures']} failures, {run['seconds']:.0f} s; {run['last_plan']}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if policy == "closed":
                pls.append(run["pls"] / TARGET)
        first = "" if length == "long" else f"{length}_"
        for other in ("oracle", "fixed"):
            found, low, high = ratio(overheads["closed"], overheads[other])
            figures[f"{first}closed_loop_vs_{other}"] = found
            figures[f"{first}closed_loop_vs_{other}_low"] = low
            figures[f"{first}closed_loop_vs_{other}_high"] = high
        figures[f"{first}closed_loop_pls_of_target"] = max(pls)
    report(
        given,
        config={
            "steps_and_seeds": jobs, "step_seconds": STEP_SECONDS, "save_steps": SAVE_STEPS,
            "recovery_steps": RECOVERY_STEPS, "mtbf_steps": [MTBF_STEPS, MTBF_STEPS * FACTOR],
            "servers": SHARDS, "target": TARGET,
        },
        figures=figures,
        columns=COLUMNS,
        rows=rows,
        notes=[NOTE],
    )  # fmt: skip


if __name__ == "__main__":
    main()

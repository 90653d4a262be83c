"""A run that plans itself on real servers, against the plan of its start and an oracle.

Three trainings go on side by side, each on servers of its own, which are killed (SIGKILL) at seeded
moments; half-way failures become four times as frequent. One plans itself (`ek.auto`), one keeps
the plan that it made at the start, and one knows how often servers fail from then on. Neighbours
on the machine make steps slower, so moments and overheads are counted, not timed: in steps, those
that were repeated included, and versions and recoveries as many steps as they take.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("EMBERKEEP_QUIET", "1")

from _common import options, report
from emberkeep.checkpoint.run_plan import FailureHistory

POLICIES = ("closed", "fixed", "oracle")
SHARDS, ROWS, DIM, BATCH = 4, 20_000, 8, 64
STEP_SECONDS, SAVE_SECONDS = 0.02, 0.2
SAVE_STEPS, RECOVERY_STEPS = SAVE_SECONDS / STEP_SECONDS, 10
STEPS, QUICK_STEPS = 3200, 500
MTBF_STEPS, FACTOR = 400, 0.25
TARGETS, QUICK_TARGETS = (0.0, 0.05), (0.05,)
SEED = 21
COLUMNS = [
    "target", "policy", "overhead", "versions", "failures", "steps again", "full", "partial",
    "PLS", "plans",
]  # fmt: skip

NOTE = f"""\
Overheads are shares of the job: steps that were taken again, {SAVE_STEPS:.0f} steps for each
version (training stands still for {SAVE_SECONDS:g} s, a state that takes so long to gather) and
{RECOVERY_STEPS} for each recovery, whatever the machine was doing. All policies know the MTBF
of the first half ({MTBF_STEPS} steps of {1000 * STEP_SECONDS:.0f} ms), and fail by the same seed;
one that loses more time meets more failures. One run each: ratios have errors of a tenth."""


class SlowState:
    """What a version has to wait for."""

    def state_dict(self) -> dict[str, object]:
        time.sleep(SAVE_SECONDS)
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


class Failures:
    """When servers are killed, on a clock that counts what a run does."""

    def __init__(self, steps: int, seed: int) -> None:
        self._random = np.random.default_rng([seed, 3])
        self._change = steps / 2
        self.next = self._draw(0.0)

    def mtbf(self, now: float) -> float:
        return MTBF_STEPS * (FACTOR if now >= self._change else 1.0)

    def _draw(self, now: float) -> float:
        left = float(self._random.exponential())
        until = max(0.0, self._change - now) / self.mtbf(now)
        if left < until or now >= self._change:
            return now + left * self.mtbf(now)
        return self._change + (left - until) * self.mtbf(self._change)

    def strike(self, now: float) -> int | None:
        """The server that dies now, if one does."""
        if now < self.next:
            return None
        self.next = self._draw(now)
        return int(self._random.integers(SHARDS))


def train(policy: str, target: float, steps: int, seed: int) -> dict[str, object]:
    """One run, to its end; the figures of it."""
    import torch

    import emberkeep as ek

    torch.set_num_threads(1)
    failures = Failures(steps, seed)
    events: dict[str, int] = {"saved": 0, "planned": 0}
    seconds: list[float] = []

    def hear(event: str, details: dict[str, object]) -> None:
        if event == "saved" and 0 < details["step"] < steps:  # type: ignore[operator]
            events["saved"] += 1
        elif event == "planned":
            events["planned"] += 1
        elif event == "recovered":
            seconds.append(float(details["seconds"]))  # type: ignore[arg-type]

    bags = ek.EmbeddingBags(
        [ek.Table("item", rows=ROWS, dim=DIM)], optimizer=ek.SGD(lr=0.1),
        cluster=ek.servers(shards=SHARDS, spares=2, threads=1), seed=seed,
    )  # fmt: skip
    random = np.random.default_rng([seed, 4])
    batches = torch.from_numpy(random.integers(0, ROWS, (64, BATCH)))
    executed = killed = 0
    with tempfile.TemporaryDirectory() as place:
        keeper = ek.Keeper(
            place, bags, bags.optimizer, total_steps=steps, state={"slow": SlowState()},
            strategy=ek.auto(
                target=f"PLS {target:g}", mtbf=timedelta(seconds=MTBF_STEPS * STEP_SECONDS),
                first=timedelta(seconds=50 * STEP_SECONDS),
            ),
            on_event=hear,
        )  # fmt: skip
        planner = keeper._planner
        assert planner is not None
        count = lambda: executed + SAVE_STEPS * events["saved"] + RECOVERY_STEPS * killed  # noqa: E731
        if policy != "closed":
            known = (lambda: 0.0) if policy == "fixed" else count
            planner._passed = lambda: FailureHistory(  # type: ignore[method-assign]
                hours=failures.mtbf(known()) * STEP_SECONDS / 3600, count=1.0, shards=1.0, seen=9
            )
        review = planner.review
        if policy == "fixed":
            planner.review = lambda step: (  # type: ignore[method-assign]
                review(step) if planner.plan is None else None
            )
        keeper.resume()
        changed, started = False, time.monotonic()
        while keeper.steps < steps:
            with keeper.surviving():
                struck = failures.strike(count())
                if struck is not None:
                    killed += 1
                    os.kill(bags.cluster.launcher.pid(struck), signal.SIGKILL)
                began = time.monotonic()
                executed += 1
                ids = batches[keeper.steps % len(batches)]
                bags({"item": ids}).sum().backward()
                bags.optimizer.step()
                bags.optimizer.zero_grad()
                time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - began)))
                keeper.step()
            if not changed and count() >= steps / 2:
                changed = True
                if policy == "oracle":
                    planner.review(keeper.steps)
        taken = time.monotonic() - started
        made = keeper.recoveries()
        assert made is not None
        result = {
            "policy": policy, "target": target, "overhead": count() / steps - 1,
            "versions": events["saved"], "failures": killed, "again": executed - steps,
            "full": made.full, "partial": made.partial, "pls": made.pls,
            "plans": events["planned"], "seconds": taken,
            "recovery_seconds": float(np.median(seconds)) if seconds else 0.0,
            "last_plan": planner.plan.reason if planner.plan else "",
        }  # fmt: skip
        keeper.close()
        bags.cluster.close()
    return result


def side_by_side(target: float, steps: int, seed: int) -> list[dict[str, object]]:
    """All policies at the same time, each in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--run"]
    running = [
        subprocess.Popen(
            [*command, policy, str(target), str(steps), str(seed)], stdout=subprocess.PIPE
        )
        for policy in POLICIES
    ]
    found = []
    for child in running:
        out, _ = child.communicate()
        if child.returncode:
            sys.exit(f"a run ended with code {child.returncode}")
        found.append(json.loads(out.splitlines()[-1]))
    return found


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        policy, target, steps, seed = sys.argv[2:6]
        print(json.dumps(train(policy, float(target), int(steps), int(seed))), flush=True)
        return
    given = options(__file__, __doc__.splitlines()[0])
    steps = QUICK_STEPS if given.quick else STEPS
    targets = QUICK_TARGETS if given.quick else TARGETS
    rows, closed, fixed, pls = [], [], [], 0.0
    recoveries: list[float] = []
    for target in targets:
        runs = {str(run["policy"]): run for run in side_by_side(target, steps, SEED)}
        for name, run in runs.items():
            rows.append([
                f"PLS {target:g}", name, f"{run['overhead']:.1%}", str(run["versions"]),
                str(run["failures"]), str(run["again"]), str(run["full"]), str(run["partial"]),
                f"{run['pls']:.3g}", str(run["plans"]),
            ])  # fmt: skip
            recoveries.append(float(run["recovery_seconds"]))  # type: ignore[arg-type]
            print(f"{name}: {run['seconds']:.0f} s; {run['last_plan']}", file=sys.stderr)
        overheads = {name: float(run["overhead"]) for name, run in runs.items()}  # type: ignore[arg-type]
        closed.append(overheads["closed"] / overheads["oracle"])
        fixed.append(overheads["fixed"] / overheads["oracle"])
        if target:
            pls = max(pls, float(runs["closed"]["pls"]) / target)  # type: ignore[arg-type]
    report(
        given,
        config={
            "steps": steps, "step_seconds": STEP_SECONDS, "save_seconds": SAVE_SECONDS,
            "mtbf_steps": [MTBF_STEPS, MTBF_STEPS * FACTOR], "recovery_steps": RECOVERY_STEPS,
            "servers": SHARDS, "targets": targets, "seed": SEED,
        },
        figures={
            "closed_loop_vs_oracle": max(closed),
            "fixed_plan_vs_oracle": max(fixed),
            "closed_loop_pls_of_target": pls,
            "recovery_seconds": float(np.median(recoveries)),
        },
        columns=COLUMNS,
        rows=rows,
        notes=[NOTE],
    )  # fmt: skip


if __name__ == "__main__":
    main()

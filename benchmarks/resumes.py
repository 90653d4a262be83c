"""What training loses when it is resumed from quantized versions: paired runs over many seeds.

Per seed one uninterrupted run, and for each case a run with the same initial values and the same
samples in the same order, in which at evenly spaced steps a full version with quantized weights is
saved and its rows replace those of the live model. Everything else is stored in float32 and comes
back bit for bit, so a pair differs in what quantization did and in nothing else. This is checked,
not assumed: each run repeats the losses of its partner up to its first restore, and a run resumed
from float32 versions ends with the very bits of the uninterrupted one.

Training is chaotic: any difference at all grows into another run of the same quality. The *floor*
is how far two runs differ in the end when one row of one of them is changed by a millionth, once.
"""

from __future__ import annotations

import os

# Every process has one thread of each kind: the cores are shared out by seed, and a digest of the
# network repeats for a given number of torch's threads only.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["EMBERKEEP_THREADS"] = "1"

import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import timedelta

import torch

from _common import options, report
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import Synthetic, split
from emberkeep.models import DLRM, DLRMShape
from emberkeep.nn import EmbeddingBags
from emberkeep.repository import KeepLast, Repository
from emberkeep.repository.policies import bits_for
from emberkeep.tables import RowWiseAdagrad, Table
from emberkeep.train.hooks import Hook, Step
from emberkeep.train.loop import digest, evaluate, fit

ROWS, BATCH, DIM = 100_000, 1024, 16
SHAPE = DLRMShape(bottom=(128, 64, DIM), top=(128, 64, 1))  # that of `emberkeep train --demo`
ROW_LR, DENSE_LR = 0.02, 0.001
LIMIT_PCT = 0.01
NUDGE, NUDGE_STEP = 1e-6, 1  # no case is restored earlier
# Two-sided 95% quantiles of Student's t, by degrees of freedom: one less than the seeds of a run.
STUDENT_T = {1: 12.706, 9: 2.262, 15: 2.131}
COLUMNS = (
    "restored from",
    "times",
    "steps",
    "seeds",
    "test AUC %",
    "test log-loss %",
    "lifetime loss %",
    "samples lost per restore",
    f"within {LIMIT_PCT}%: AUC, log-loss, lifetime",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How long runs are, and how many."""

    seeds: int
    steps: int
    test_steps: int

    @property
    def samples(self) -> int:
        return self.steps * BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Restores that are spread evenly over a run; `bits=None` restores float32."""

    bits: int | None
    restores: int

    @property
    def name(self) -> str:
        return f"{self.bits}bit_{self.restores}"

    def steps(self, of: int) -> set[int]:
        return {round(k * of / (self.restores + 1)) for k in range(1, self.restores + 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is compared. `losses` are of each batch before it was trained on."""

    auc: float
    log_loss: float
    losses: list[float]
    digest: str

    @property
    def lifetime_loss(self) -> float:
        return statistics.fmean(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Of one pair, in percent of the uninterrupted run."""

    auc: float
    log_loss: float
    lifetime_loss: float


FULL, QUICK = (
    Extent(seeds=16, steps=400, test_steps=200),
    Extent(seeds=2, steps=104, test_steps=20),
)
SHORTER = Extent(seeds=10, steps=FULL.steps // 4, test_steps=FULL.test_steps)
EXACT = Case(bits=None, restores=20)
RULE = tuple(Case(bits=bits_for(n, 0), restores=n) for n in (1, 3, 20, 100))
BEYOND = (Case(bits=2, restores=20), Case(bits=2, restores=100), Case(bits=4, restores=100))

Changes = dict[tuple[int, Case | None], Change]
"""By the steps of the run and its case; None is the nudge."""


class Recorded(Hook):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, step: Step) -> None:
        self.losses.append(step.loss)


class Resumed(Hook):
    """Saves a version at the given steps and puts its rows in the place of the trained ones."""

    def __init__(self, cluster: LocalCluster, *, bits: int | None, steps: set[int]) -> None:
        store = MemoryStore()
        Repository.create(store, schema=cluster.schema())
        self._keeper = Checkpointer(
            Repository.open(store),
            cluster,
            spec=VersionSpec(layout="full", bits=bits),
            settings=SaveSettings(threads=1, retention=KeepLast(n=1), grace=timedelta(0)),
        )
        self._steps = steps

    def on_step(self, step: Step) -> None:
        if step.number in self._steps:
            self._keeper.save(step.number)
            self._keeper.wait()
            self._keeper.restore()


class Nudged(Hook):
    """Changes one row, once, by a millionth of itself."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def on_step(self, step: Step) -> None:
        if step.number == NUDGE_STEP:
            table = self._cluster.tables[0].name
            ids = self._cluster.touched_ids(table)[:1]
            planes = self._cluster.read(table, ids)
            planes["weight"] *= 1 + NUDGE
            self._cluster.install(table, ids, planes)


def trained(seed: int, extent: Extent, hook: Callable[[LocalCluster], Hook]) -> Outcome:
    """One run: a pass over the samples, then the held-out ones."""
    test_samples = extent.test_steps * BATCH
    source = Synthetic(
        samples=extent.samples + test_samples, rows_total=ROWS, skew="criteo", seed=seed
    )
    train, test = split(source, test=test_samples / (extent.samples + test_samples))
    bags = EmbeddingBags(
        [Table(name, rows=rows, dim=DIM) for name, rows in source.rows.items()],
        optimizer=RowWiseAdagrad(lr=ROW_LR),
        seed=seed,
    )
    network = DLRM(bags, SHAPE, seed=seed)
    optimizers = [bags.optimizer, torch.optim.Adam(network.parameters(), lr=DENSE_LR)]
    recorded = Recorded()
    hooks = [recorded, hook(bags.cluster)]
    fit(network, optimizers, train, BATCH, hooks=hooks, phase="embeddings")
    auc, log_loss = evaluate(network, test, BATCH)
    return Outcome(auc=auc, log_loss=log_loss, losses=recorded.losses, digest=digest(bags, network))


def paired(seed: int, extent: Extent, cases: Sequence[Case], *, nudged: bool = True) -> Changes:
    """The changes of all cases of one seed. An exact case must not change anything."""
    torch.set_num_threads(1)
    alone = trained(seed, extent, lambda _cluster: Hook())

    def resumed(case: Case) -> Outcome:
        steps = case.steps(extent.steps)
        run = trained(seed, extent, lambda cluster: Resumed(cluster, bits=case.bits, steps=steps))
        if len(steps) != case.restores or run.losses[: min(steps)] != alone.losses[: min(steps)]:
            raise AssertionError(f"seed {seed}, {case}: not a pair up to step {min(steps)}")
        return run

    changes: Changes = {}
    for case in cases:
        run = resumed(case)
        if case.bits is not None:
            changes[extent.steps, case] = change(run, alone)
        elif run != alone:
            raise AssertionError(f"seed {seed}: a float32 version brought back other bits")
    if nudged:
        changes[extent.steps, None] = change(trained(seed, extent, Nudged), alone)
    return changes


def change(run: Outcome, alone: Outcome) -> Change:
    def percent(name: str) -> float:
        ratio: float = getattr(run, name) / getattr(alone, name)
        return 100 * (ratio - 1)

    return Change(
        auc=percent("auc"), log_loss=percent("log_loss"), lifetime_loss=percent("lifetime_loss")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds and half the width of its 95% confidence interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean=statistics.fmean(values), half=STUDENT_T[len(values) - 1] * spread)

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    def within(self, sign: int) -> str:
        """Whether the worsening, which has this sign, stays under the limit: all of the interval,
        none of it, or a part."""
        worse = sign * self.mean
        if worse + self.half < LIMIT_PCT:
            return "yes"
        return "no" if worse - self.half > LIMIT_PCT else "open"


def rows_and_figures(
    seeds: Sequence[Changes],
) -> tuple[list[list[str]], dict[str, float]]:
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for steps, case in seeds[0]:
        pairs = [changes[steps, case] for changes in seeds if (steps, case) in changes]
        auc = Estimate.of([pair.auc for pair in pairs])
        loss = Estimate.of([pair.log_loss for pair in pairs])
        lifetime = Estimate.of([pair.lifetime_loss for pair in pairs])
        size, estimates = [str(steps), str(len(pairs))], [str(auc), str(loss), str(lifetime)]
        if case is None:
            figures["noise_floor_auc_pct"] = statistics.fmean(abs(pair.auc) for pair in pairs)
            figures["noise_floor_loss_pct"] = statistics.fmean(abs(pair.log_loss) for pair in pairs)
            rows.append(["none: one row nudged", "1", *size, *estimates, "", ""])
            continue
        cost = lifetime.mean / 100 * steps * BATCH / case.restores
        verdict = ", ".join((auc.within(-1), loss.within(1), lifetime.within(1)))
        rows.append(
            [f"{case.bits} bits", str(case.restores), *size, *estimates, f"{cost:.1f}", verdict]
        )
        name = case.name if steps != SHORTER.steps else f"{case.name}_shorter"
        for kind, found in (("auc", auc), ("loss", loss), ("lifetime_loss", lifetime)):
            figures[f"{kind}_change_pct_{name}"] = found.mean
            figures[f"{kind}_change_pct_{name}_half_interval"] = found.half
    return rows, figures


def notes(extent: Extent, figures: Mapping[str, float]) -> list[str]:
    meaning = (
        "Change against the uninterrupted run of the same seed: mean of all seeds ± half of "
        "the 95% confidence interval (Student's t over pairs). Lifetime loss: mean over "
        "all batches, each before it is trained on. Samples lost per restore: the excess of the "
        "lifetime loss, counted in samples of average loss."
    )
    verdicts = (
        f"Within {LIMIT_PCT}%: *yes* if the whole interval is, *no* if none of it, else *open*."
    )
    floor = (
        f"Floor: two runs that differ by a millionth of one row at step {NUDGE_STEP} end "
        f"{figures['noise_floor_auc_pct']:.4f}% different in AUC and "
        f"{figures['noise_floor_loss_pct']:.4f}% in log-loss (mean of absolute changes). Restored "
        f"{EXACT.restores} times from float32 versions, every run that was checked "
        f"({min(extent.seeds, SHORTER.seeds)} seeds) ended bit-identical."
    )
    return [meaning, verdicts, floor]


def seed_study(seed: int, quick: bool) -> Changes:
    """All pairs of one seed. What lies beyond the rule is run for the first seeds only."""
    if quick:
        return paired(seed, QUICK, (*RULE, EXACT))
    if seed >= SHORTER.seeds:
        return paired(seed, FULL, RULE)
    changes = paired(seed, FULL, (*RULE, *BEYOND, EXACT))
    fitting = [case for case in RULE if case.restores < SHORTER.steps]
    return changes | paired(seed, SHORTER, fitting, nudged=False)


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0])
    extent = QUICK if given.quick else FULL
    # A fork of a process that has used torch may hang: every process starts afresh.
    with ProcessPoolExecutor(
        max_workers=min(os.cpu_count() or 1, extent.seeds),
        mp_context=multiprocessing.get_context("spawn"),
    ) as processes:
        futures = [processes.submit(seed_study, seed, given.quick) for seed in range(extent.seeds)]
        for done, _ in enumerate(as_completed(futures), 1):
            print(f"{done} of {extent.seeds} seeds", file=sys.stderr, flush=True)
        seeds = [future.result() for future in futures]
    rows, figures = rows_and_figures(seeds)
    report(
        given,
        config={
            "model": "dlrm",
            "bottom": list(SHAPE.bottom),
            "top": list(SHAPE.top),
            "rows_total": ROWS,
            "dim": DIM,
            "skew": "criteo",
            "batch": BATCH,
            "row_optimizer": f"row_wise_adagrad, lr {ROW_LR}, its plane stored as float32",
            "dense_optimizer": f"adam, lr {DENSE_LR}",
            "seeds": extent.seeds,
            "steps": extent.steps,
            "train_samples": extent.samples,
            "test_samples": extent.test_steps * BATCH,
            "nudge": NUDGE,
            "threads_per_process": 1,
        },
        figures=figures,
        columns=COLUMNS,
        rows=rows,
        notes=notes(extent, figures),
    )


if __name__ == "__main__":
    main()

"""What quantized versions save in bytes and cost in accuracy, both of the very same versions.

Per seed one uninterrupted run, and for each case a run with the same initial values and the same
samples in the same order. All save a version every few steps, by Check-N-Run's layout: increments,
and a new baseline where that is cheaper. The versions of a case hold weights in so many bits and
the optimizer's row-wise accumulators in 16; some of them, evenly spaced, are restored into the
live model as they are saved. Their bytes are compared with those of full versions in float32 at the
same steps, which the uninterrupted run saves. Dense state and reader go on as they are, so a pair
differs in what quantization did and in nothing else. This is checked, not assumed: each run repeats
the losses of its partner up to its first restore, and a run resumed from exact versions of the same
layout ends with the very bits of the uninterrupted one (the first seeds are tried).

Training is chaotic: any difference at all grows into another run of the same quality. The *floor*
is how far two runs differ in the end when the rows of one table are changed by a millionth, once.

Two tasks: *synthetic* click logs with Criteo's skew, of which each seed has its own; and *criteo*,
the lines of Criteo's click logs in the file that EMBERKEEP_CRITEO_SAMPLE names, each trained once
(what a second epoch loses or gains is memory, not evidence). A seed shuffles the lines, so its
samples, their order and those held out are its own; intervals are about such draws from these
lines, not about other days.

Each run is appended to build/resumes.jsonl, from where a study goes on that was stopped; `--only
some` adds runs for seven minutes.
"""

from __future__ import annotations

import os

# Every process has one thread of each kind: the cores are shared out by seed, and a digest of the
# network repeats for a given number of torch's threads only.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["EMBERKEEP_THREADS"] = "1"

import functools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from _common import options, report
from emberkeep.blobs import MemoryStore
from emberkeep.checkpoint import Checkpointer, SaveSettings, VersionSpec
from emberkeep.cluster.local.local_cluster import LocalCluster
from emberkeep.data import Batch, Criteo, Synthetic, split
from emberkeep.data.sources import Mark, Source
from emberkeep.models import DLRM, DLRMShape
from emberkeep.nn import EmbeddingBags
from emberkeep.repository import KeepLast, Repository
from emberkeep.repository.pieces import KIND
from emberkeep.repository.policies import bits_for
from emberkeep.tables import RowWiseAdagrad, Table
from emberkeep.train.hooks import Hook, Step
from emberkeep.train.loop import digest, evaluate, fit

DIM = 64
SHAPE = DLRMShape(bottom=(128, 64, DIM), top=(128, 64, 1))
SYNTHETIC_ROWS, CRITEO_ROWS = 100_000, 20_000  # in all, and of each of the 26 tables
ROW_LR, DENSE_LR = 0.02, 0.001
LIMIT_PCT = 0.01
NUDGE, NUDGE_STEP = 1e-6, 1  # no case is restored earlier
CRITEO_SAMPLE = os.environ.get("EMBERKEEP_CRITEO_SAMPLE")
KEPT = Path(__file__).parent.parent / "build" / "resumes.jsonl"
# Two-sided 95% quantiles of Student's t, by degrees of freedom: one less than the seeds of a run.
STUDENT_T = {1: 12.706, 2: 4.303, 9: 2.262, 11: 2.201, 15: 2.131}
COLUMNS = (
    "task",
    "versions",
    "restored",
    "seeds",
    "bytes less",
    "storage less",
    "test AUC %",
    "test log-loss %",
    "lifetime loss %",
    f"within {LIMIT_PCT}%: AUC, log-loss, lifetime",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Samples, how they are trained on, and how often a version is saved."""

    name: str
    batch: int
    steps: int
    test_samples: int
    every: int

    @property
    def version_steps(self) -> list[int]:
        """Steps after which a version is saved; the last of a run has none, it would be restored
        for nothing."""
        return list(range(self.every, self.steps, self.every))

    def source(self, seed: int) -> tuple[Source, dict[str, int]]:
        """The samples of a seed, the held-out ones last, and the rows of each table."""
        samples = self.steps * self.batch + self.test_samples
        if self.name == "criteo":
            lines = criteo_lines()
            order = np.random.default_rng(seed).permutation(len(lines))[:samples]
            if order.size < samples:
                raise SystemExit(f"{CRITEO_SAMPLE} has {order.size} lines, not {samples}")
            shuffled = Batch(
                dense=lines.dense[order],
                ids={name: ids[order] for name, ids in lines.ids.items()},  # type: ignore[call-overload]
                labels=lines.labels[order],
            )
            return InMemory(shuffled), dict.fromkeys(lines.ids, CRITEO_ROWS)
        made = Synthetic(samples=samples, rows_total=SYNTHETIC_ROWS, skew="criteo", seed=seed)
        return made, made.rows


@functools.cache
def criteo_lines() -> Batch:
    assert CRITEO_SAMPLE is not None
    return Criteo(CRITEO_SAMPLE, sizes=CRITEO_ROWS).open(0).read(1 << 20)


@dataclass(frozen=True, slots=True)
class InMemory:
    """Samples that are there already, as a source."""

    samples: Batch

    def fingerprint(self) -> str:
        return f"memory:{id(self.samples)}"

    def count(self) -> int:
        return len(self.samples)

    def open(self, position: int, mark: Mark | None = None) -> Place:
        return Place(self.samples, position)


@dataclass(slots=True)
class Place:
    samples: Batch
    at: int

    def read(self, count: int) -> Batch:
        some = slice(self.at, self.at + self.skip(count))
        return Batch(
            dense=self.samples.dense[some].copy(),
            ids={n: ids[some].copy() for n, ids in self.samples.ids.items()},  # type: ignore[union-attr]
            labels=self.samples.labels[some].copy(),
        )

    def skip(self, count: int) -> int:
        count = min(count, len(self.samples) - self.at)
        self.at += count
        return count

    def mark(self) -> Mark:
        return {"at": self.at}

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Versions whose weights have so many bits, or all, and of which so many are restored;
    accumulators are in 16 bits but where a case is `exact`."""

    bits: int | None
    restores: int
    exact: bool = False

    @property
    def name(self) -> str:
        weights = "exact" if self.exact else "32bit" if self.bits is None else f"{self.bits}bit"
        return f"{weights}_{self.restores}"

    @property
    def spec(self) -> VersionSpec:
        return VersionSpec(bits=self.bits, quantize_optimizer=not self.exact)

    def steps(self, task: Task) -> list[int]:
        """Which versions are restored: one in the middle of each equal part of them."""
        saved = task.version_steps
        parts = 2 * self.restores
        return [saved[(2 * k + 1) * len(saved) // parts] for k in range(self.restores)]


SYNTHETIC = Task(name="synthetic", batch=1024, steps=204, test_samples=51_200, every=2)
CRITEO = Task(name="criteo", batch=64, steps=125, test_samples=2_000, every=1)
QUICK = Task(name="synthetic", batch=1024, steps=44, test_samples=20_480, every=2)
SEEDS, QUICK_SEEDS = 10, 2
SOME_SECONDS = 420
EXACT = Case(bits=None, restores=20, exact=True)
RULE = tuple(Case(bits=bits_for(n, 0), restores=n) for n in (1, 3, 20, 100))
OVER = (Case(bits=2, restores=2), Case(bits=3, restores=4), Case(bits=4, restores=21))
ACCUMULATORS = Case(bits=None, restores=100)
CASES = (RULE[0], OVER[0], RULE[1], OVER[1], RULE[2], OVER[2], RULE[3], ACCUMULATORS)
FIRST_SEEDS = 3


def cases_of(seed: int, task: Task) -> tuple[Case, ...]:
    """Cases that explain the others, or check them, are run for the first seeds alone; a quick task
    has no time for more than three and a check."""
    if task == QUICK:
        return (*RULE[:3], EXACT)
    return (*CASES, EXACT) if seed < FIRST_SEEDS else CASES[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Of the versions of a run: bytes of rows of each, and the most that was stored after one."""

    nbytes: list[int]
    stored: int


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
class Pair:
    """A run beside the uninterrupted one: changes in percent of that; bytes of its versions against
    full versions in float32, those of all together and the most that was stored."""

    auc: float
    log_loss: float
    lifetime_loss: float
    bytes_less: float = math.nan
    storage_less: float = math.nan


class Recorded(Hook):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, step: Step) -> None:
        self.losses.append(step.loss)


class Versions(Hook):
    """Saves versions at some steps, and puts the rows of some in the place of the trained ones."""

    def __init__(
        self,
        cluster: LocalCluster,
        spec: VersionSpec,
        steps: Sequence[int],
        restored: Sequence[int],
    ) -> None:
        self._store = MemoryStore()
        Repository.create(self._store, schema=cluster.schema())
        self._saver = Checkpointer(
            Repository.open(self._store),
            cluster,
            spec=spec,
            settings=SaveSettings(threads=1, retention=KeepLast(n=1), grace=timedelta(0)),
        )
        self._steps, self._restored = set(steps), set(restored)
        self._nbytes: list[int] = []
        self._stored = 0

    def on_step(self, step: Step) -> None:
        if step.number not in self._steps:
            return
        self._saver.save(step.number)
        manifest = self._saver.wait()
        assert manifest is not None
        self._saver.settle()
        files = (info for info in self._store.list() if info.name.endswith(".arrow"))
        self._nbytes.append(sum(file.size for file in manifest.of_kind(KIND)))
        self._stored = max(self._stored, sum(info.size for info in files))
        if step.number in self._restored:
            self._saver.restore()

    @property
    def written(self) -> Written:
        return Written(nbytes=self._nbytes, stored=self._stored)


class Nudged(Hook):
    """Changes the rows of one table, once, by a millionth of themselves: a single row may never be
    looked at again."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def on_step(self, step: Step) -> None:
        if step.number == NUDGE_STEP:
            table = self._cluster.tables[0].name
            ids = self._cluster.touched_ids(table)
            planes = self._cluster.read(table, ids)
            planes["weight"] *= 1 + NUDGE
            self._cluster.install(table, ids, planes)


def trained(seed: int, task: Task, hook: Callable[[LocalCluster], Hook]) -> Outcome:
    """One run: a pass over the samples, then the held-out ones."""
    source, tables = task.source(seed)
    train, test = split(source, test=task.test_samples)
    bags = EmbeddingBags(
        [Table(name, rows=rows, dim=DIM) for name, rows in tables.items()],
        optimizer=RowWiseAdagrad(lr=ROW_LR),
        seed=seed,
    )
    network = DLRM(bags, SHAPE, seed=seed)
    optimizers = [bags.optimizer, torch.optim.Adam(network.parameters(), lr=DENSE_LR)]
    recorded = Recorded()
    hooks = [recorded, hook(bags.cluster)]
    fit(network, optimizers, train, task.batch, hooks=hooks, phase="embeddings")
    auc, log_loss = evaluate(network, test, task.batch)
    digests = {table.name: bags.cluster.digest(table.name) for table in bags.tables}
    return Outcome(
        auc=auc, log_loss=log_loss, losses=recorded.losses, digest=digest(digests, network)
    )


def saved(
    seed: int, task: Task, spec: VersionSpec, restored: Sequence[int]
) -> tuple[Outcome, Written]:
    """A run that saves versions and restores some; what came of it, and their bytes."""
    hooks: list[Versions] = []

    def hook(cluster: LocalCluster) -> Versions:
        hooks.append(Versions(cluster, spec, task.version_steps, restored))
        return hooks[0]

    run = trained(seed, task, hook)
    return run, hooks[0].written


ALONE, NUDGED = "alone", "nudged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a study: its task and seed, and which it is: the uninterrupted one, that which is
    nudged, or that of a case."""

    task: Task
    seed: int
    run: str

    @property
    def key(self) -> dict[str, Any]:
        """By this its line is found again: another task, or another model, is another line."""
        return {"task": asdict(self.task), "dim": DIM, "seed": self.seed, "run": self.run}

    def done(self) -> dict[str, Any]:
        """Makes the run; its line."""
        torch.set_num_threads(1)
        start, written = time.process_time(), None
        if self.run == NUDGED:
            outcome = trained(self.seed, self.task, Nudged)
        elif self.run == ALONE:
            outcome, written = saved(self.seed, self.task, VersionSpec(layout="full"), ())
        else:
            case = next(case for case in cases_of(self.seed, self.task) if case.name == self.run)
            outcome, written = saved(self.seed, self.task, case.spec, case.steps(self.task))
        return {
            **self.key, "core_seconds": time.process_time() - start, "outcome": asdict(outcome),
            "written": None if written is None else asdict(written),
        }  # fmt: skip


def jobs(tasks: Sequence[Task], seeds: int) -> list[Job]:
    return [
        Job(task=task, seed=seed, run=run)
        for seed in range(seeds)
        for task in tasks
        for run in (ALONE, NUDGED, *(case.name for case in cases_of(seed, task)))
    ]


def pairs_of(seed: int, task: Task, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Pair]:
    """All pairs of one seed by the names of their cases, and that of the nudge."""

    def parsed(run: str) -> tuple[Outcome, Written | None]:
        written = runs[run]["written"]
        return Outcome(**runs[run]["outcome"]), None if written is None else Written(**written)

    alone, full = parsed(ALONE)
    found = {NUDGED: pair(parsed(NUDGED)[0], alone)}
    for case in cases_of(seed, task):
        run, written = parsed(case.name)
        first = min(case.steps(task))
        if (
            len(set(case.steps(task))) != case.restores
            or run.losses[:first] != alone.losses[:first]
        ):
            raise AssertionError(f"seed {seed}, {case}: not a pair up to step {first}")
        if case.exact and run != alone:
            raise AssertionError(f"seed {seed}: an exact version brought back other bits")
        found[case.name] = pair(run, alone, written, full)
    return found


def pair(
    run: Outcome, alone: Outcome, written: Written | None = None, full: Written | None = None
) -> Pair:
    def percent(name: str) -> float:
        ratio: float = getattr(run, name) / getattr(alone, name)
        return 100 * (ratio - 1)

    less = {}
    if written is not None and full is not None:
        less = {
            "bytes_less": sum(full.nbytes) / sum(written.nbytes),
            "storage_less": full.stored / written.stored,
        }
    return Pair(
        auc=percent("auc"), log_loss=percent("log_loss"), lifetime_loss=percent("lifetime_loss"),
        **less,
    )  # fmt: skip


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
    task: str, seeds: Sequence[Mapping[str, Pair]]
) -> tuple[list[list[str]], dict[str, float]]:
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    prefix = "" if task == "synthetic" else f"{task}_"
    for case in (*CASES, EXACT, None):
        name = NUDGED if case is None else case.name
        pairs = [found[name] for found in seeds if name in found]
        if not pairs:
            continue
        if case is not None and case.exact:  # the same bits, or the study had ended
            less = statistics.fmean(each.bytes_less for each in pairs)
            storage = statistics.fmean(each.storage_less for each in pairs)
            ratios = [str(len(pairs)), f"{less:.1f}", f"{storage:.1f}"]
            rows.append([task, "exact", str(case.restores), *ratios, "0", "0", "0", "same bits"])
            figures |= {f"{prefix}bytes_less_exact": less, f"{prefix}storage_less_exact": storage}
            continue
        auc = Estimate.of([each.auc for each in pairs])
        loss = Estimate.of([each.log_loss for each in pairs])
        lifetime = Estimate.of([each.lifetime_loss for each in pairs])
        estimates = [str(auc), str(loss), str(lifetime)]
        if case is None:
            figures[f"{prefix}noise_floor_auc_pct"] = statistics.fmean(abs(p.auc) for p in pairs)
            figures[f"{prefix}noise_floor_loss_pct"] = statistics.fmean(
                abs(p.log_loss) for p in pairs
            )
            rows.append([task, "none: rows nudged", "", str(len(pairs)), "", "", *estimates, ""])
            continue
        less = statistics.fmean(each.bytes_less for each in pairs)
        storage = statistics.fmean(each.storage_less for each in pairs)
        verdict = ", ".join((auc.within(-1), loss.within(1), lifetime.within(1)))
        bits = "32" if case.bits is None else str(case.bits)
        planes = f"{bits} bits, accumulators 16"
        if case in OVER:
            planes += ", over the rule"
        ratios = [str(len(pairs)), f"{less:.1f}", f"{storage:.1f}"]
        rows.append([task, planes, str(case.restores), *ratios, *estimates, verdict])
        figures[f"{prefix}bytes_less_{name}"] = less
        figures[f"{prefix}storage_less_{name}"] = storage
        for kind, found in (("auc", auc), ("loss", loss), ("lifetime_loss", lifetime)):
            figures[f"{prefix}{kind}_change_pct_{name}"] = found.mean
            figures[f"{prefix}{kind}_change_pct_{name}_half_interval"] = found.half
    return rows, figures


def notes(figures: Mapping[str, float], seeds: int) -> list[str]:
    meaning = (
        "Bytes less: what full versions in float32 hold at the same steps, over what these "
        "versions hold, all together; storage less: the same of the most that is kept after a "
        "version, one being kept and what it needs. Changes are against the uninterrupted run of "
        "the same seed: mean of all seeds ± half of the 95% confidence interval (Student's t over "
        "pairs). Lifetime loss: mean over all batches, each before it is trained on."
    )
    verdicts = (
        f"Within {LIMIT_PCT}%: *yes* if the whole interval is, *no* if none of it, else *open*."
    )
    floor = (
        f"Floor: two runs that differ by a millionth of the rows of one table at step {NUDGE_STEP} "
        f"end {figures['noise_floor_auc_pct']:.4f}% different in AUC and "
        f"{figures['noise_floor_loss_pct']:.4f}% in log-loss (mean of absolute changes). Restored "
        f"{EXACT.restores} times from exact versions, every run that was tried "
        f"({min(FIRST_SEEDS, seeds)} seeds of each task) ended bit-identical."
    )
    return [meaning, verdicts, floor]


def made(missing: Sequence[Job], seconds: float) -> Iterator[dict[str, Any]]:
    """The lines of jobs, on all cores; after so many seconds no other is started."""
    left, running = list(missing), set[Future[dict[str, Any]]]()
    cores = min(os.cpu_count() or 1, len(left))
    if not cores:
        return
    end = time.monotonic() + seconds
    # A fork of a process that has used torch may hang: every process starts afresh.
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as processes:
        while running or (left and time.monotonic() < end):
            while left and len(running) < cores and time.monotonic() < end:
                running.add(processes.submit(left.pop(0).done))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def kept_lines() -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in KEPT.read_text().splitlines()]
    except FileNotFoundError:
        return []


def keep(line: Mapping[str, Any]) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    given = options(__file__, __doc__.splitlines()[0], choices={"only": ("all", "some")})
    tasks = [QUICK] if given.quick else [SYNTHETIC, *([CRITEO] if CRITEO_SAMPLE else [])]
    seeds = QUICK_SEEDS if given.quick else SEEDS
    lines = [] if given.quick else kept_lines()

    def line_of(job: Job) -> dict[str, Any] | None:
        return next((line for line in lines if job.key.items() <= line.items()), None)

    missing = [job for job in jobs(tasks, seeds) if line_of(job) is None]

    def add(line: dict[str, Any]) -> None:
        lines.append(line)
        if not given.quick:
            keep(line)
        left = len(jobs(tasks, seeds)) - len(lines)
        about = f"{line['task']['name']}, seed {line['seed']}, {line['run']}"
        print(f"{about}: {line['core_seconds']:.0f} core-seconds; {left} left", file=sys.stderr)

    only_some = given.chosen["only"] == "some"
    for line in made(missing, SOME_SECONDS if only_some else math.inf):
        add(line)
    if only_some:
        return
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for task in tasks:
        pairs = []
        for seed in range(seeds):
            runs = {job.run: line_of(job) for job in jobs([task], seeds) if job.seed == seed}
            pairs.append(pairs_of(seed, task, {run: line for run, line in runs.items() if line}))
        more_rows, more = rows_and_figures(task.name, pairs)
        rows += more_rows
        figures |= more
    report(
        given,
        config={
            "model": "dlrm",
            "bottom": list(SHAPE.bottom),
            "top": list(SHAPE.top),
            "dim": DIM,
            "synthetic_rows": SYNTHETIC_ROWS,
            "criteo_rows_per_table": CRITEO_ROWS,
            "layout": "intermittent, one version kept",
            "row_optimizer": f"row_wise_adagrad, lr {ROW_LR}, its plane stored in 16 bits",
            "dense_optimizer": f"adam, lr {DENSE_LR}",
            "seeds": seeds,
            "tasks": [asdict(task) for task in tasks],
            "nudge": NUDGE,
            "threads_per_process": 1,
        },
        figures=figures,
        columns=COLUMNS,
        rows=rows,
        notes=notes(figures, seeds),
    )


if __name__ == "__main__":
    main()

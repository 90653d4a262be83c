"""Strategies under the same failures: the model is trained for real, time is that of the job.

A run of minutes stands for a job of days. Its steps are the job's length: failures, intervals and
what saving, loading and rescheduling take are scaled down to steps together, as the CPR paper does.
Shards are killed and recovered by the code that runs in production; what is projected is time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from queue import Queue
from typing import Any, Literal, get_args

from emberkeep import config
from emberkeep.blobs import open_store
from emberkeep.checkpoint.overheads import Job, Overhead, optimal_full_interval, partial_pays
from emberkeep.checkpoint.run_plan import DEFAULT_PLS
from emberkeep.errors import ConfigError
from emberkeep.planning.candidates import PRIORITY_MODELS, PRIORITY_SHARE
from emberkeep.planning.failures import HOUR, Failure, Fit, drawn_failures, uniform_times
from emberkeep.rows.priority import Kind
from emberkeep.rows.tracker import PRIORITISED
from emberkeep.train.checkpoint_settings import CheckpointSettings
from emberkeep.train.hooks import Start, Step
from emberkeep.train.run_config import (
    ClusterSettings,
    DataSettings,
    FailureSettings,
    JobSettings,
    ModelSettings,
    RowOptimizerSettings,
    RunConfig,
    RunSettings,
    TableSettings,
)
from emberkeep.train.run_trace import Recording

Name = Literal["full", "partial", "cpr", "cpr_mfu", "cpr_ssu", "cpr_scar"]
STRATEGIES: tuple[Name, ...] = get_args(Name)
SMALL = RunConfig(
    data=DataSettings(source="synthetic", samples=330_000, rows_total=50_000),
    tables=TableSettings(dim=16),
    model=ModelSettings(bottom=(32,), top=(32,)),
    optimizer=RowOptimizerSettings(lr=0.05),
    run=RunSettings(batch_size=1000),
)
"""What is trained unless something else is asked for: a few seconds on one core."""

_LONGEST_SAVE_SECONDS = 600.0
_PRIORITIES: dict[str, Kind] = {"cpr_mfu": "mfu", "cpr_ssu": "ssu", "cpr_scar": "scar"}

Progress = Callable[[int, int], object]
"""Hears how many runs are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tactics:
    """How one run saves and recovers."""

    partial: bool
    priority: Kind | None
    """Which rows are saved in between; None: none."""
    every: int
    """Steps between whole versions."""
    interval: timedelta
    """The same on the job's clock."""
    most_pls: float = 1.0
    """What may be lost at most; what exceeds it is recovered fully."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run under failures came to."""

    strategy: str
    auc: float
    log_loss: float
    steps: int
    pls: float = 0.0
    interval: timedelta = timedelta(0)
    overhead: Overhead = field(default_factory=Overhead)
    """Projected, as fractions of the job."""
    versions: int = 0
    written_nbytes: int = 0
    steps_again: int = 0
    started_over: bool = False
    """A shard failed in the second half of the job, and no version held its rows yet."""
    note: str = ""
    seconds: float = 0.0
    """What the run took here; this machine's, not the job's."""

    def to_dict(self) -> dict[str, Any]:
        document = asdict(self)
        document["overhead"] = self.overhead.total
        document["breakdown"] = asdict(self.overhead)
        document["interval_hours"] = self.interval / HOUR
        del document["interval"]
        return document


def small_task(overrides: Iterable[str] = ()) -> RunConfig:
    """A training of seconds whose AUC means something: synthetic samples with a planted model."""
    return config.parse(RunConfig, config.to_toml(SMALL), source="the task", overrides=overrides)


def named(text: str) -> Name:
    """The strategy that the user means."""
    for name in STRATEGIES:
        if name == text.replace("-", "_").lower():
            return name
    raise ConfigError(f"strategies are {', '.join(STRATEGIES)}, not {text!r}")


def tactics(
    name: Name,
    job: Job,
    *,
    steps: int,
    pls: float = DEFAULT_PLS,
    interval: timedelta | None = None,
    force: bool = False,
) -> Tactics:
    """Full recovery and naive partial recovery at full recovery's best interval, the others at the
    interval that `pls` allows, with `pls` as a bound, or at the one that is given, without any.
    Where partial recovery does not pay the CPR strategies recover fully, unless `force` or an
    interval asks for it all the same."""
    wanted, partial, note = optimal_full_interval(job), name != "full", ""
    priority: Kind | None = None
    most_pls = 1.0
    if name.startswith("cpr"):
        most_pls = pls if interval is None and not force else 1.0
        more = PRIORITY_MODELS if name in _PRIORITIES else 0.0
        verdict = partial_pays(job, pls, prioritised=more)
        allowed = verdict.partial_interval if interval is None else interval
        if verdict.pays or interval is not None or (force and allowed > timedelta(0)):
            wanted = allowed
            priority = _PRIORITIES.get(name)
        else:
            partial, note = False, f"recovered fully: {verdict.reason}"
            most_pls = 1.0
    # Prioritised versions divide the steps between whole ones evenly; an interval that is given is
    # the same for all.
    unit = 1 if priority is None and interval is None else round(1 / PRIORITY_SHARE)
    return Tactics(
        partial=partial,
        priority=priority,
        every=unit * max(1, round(wanted / job.duration * steps / unit)),
        interval=wanted,
        most_pls=most_pls,
        note=note,
    )


def projected(job: Job, *, steps: int, saves: float, failures: int, steps_again: int) -> Overhead:
    """What a run would have cost in production: `saves` in whole models, steps as time."""
    return Overhead(
        save=saves * (job.save / job.duration),
        load=failures * (job.load / job.duration),
        lost=steps_again / steps,
        reschedule=failures * (job.reschedule / job.duration),
    )


def failing_steps(failures: tuple[Failure, ...], job: Job, *, steps: int) -> list[int]:
    """The step after which each failure happens, from 1 to the last."""
    return [min(steps, max(1, round(f.at / job.duration * steps))) for f in failures]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A job, the training that stands for it, and the failures that strike it."""

    settings: RunConfig
    """With where the shards are: `cluster.kind` local, servers or ray."""
    job: Job
    pls: float = DEFAULT_PLS
    count: int | None = None
    """How many failures, each as likely at any time; if not given, as many as are expected."""
    times: tuple[timedelta, ...] | None = None
    """When they strike, if that is known."""
    fit: Fit | None = None
    """Of the gaps between them: they are drawn from it, around the MTBF of the job."""
    interval: timedelta | None = None
    """Between versions of every partial strategy, instead of what `pls` allows."""
    force: bool = False
    """Recover partially also where it does not pay."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.pls <= 1:
            raise ConfigError(f"a PLS lies between 0 and 1, not {self.pls:g}")
        if self.fit is not None and (self.count is not None or self.times is not None):
            raise ConfigError("failures are drawn from a fit, or counted, or given: choose one")
        if self.count is not None and self.count < 0:
            raise ConfigError(f"there are 0 failures or more, not {self.count}")
        if self.seed < 0:
            raise ConfigError(f"seed must be 0 or more, not {self.seed}")
        if self.settings.checkpoint.accuracy_budget is not None:
            raise ConfigError(
                "checkpoint.accuracy_budget is measured while a run goes on, and partial recovery "
                "has none: strategies are compared with the same widths; leave it out "
                "(--set checkpoint.accuracy_budget=), and set checkpoint.bits or "
                "checkpoint.table_bits"
            )

    def failures(self) -> tuple[Failure, ...]:
        """The same for every strategy."""
        count = round(self.job.failures) if self.count is None else self.count
        times = self.times
        if self.fit is not None:
            times = self.fit.draw(self.job.duration, seed=self.seed, mtbf=self.job.mtbf)
        elif times is None:
            times = uniform_times(count, self.job.duration, seed=self.seed)
        return drawn_failures(
            times, shards=self.job.shards, together=self.job.failing_together, seed=self.seed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run: a strategy, or None for the run without failures."""

    spec: Emulation
    strategy: Name | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The same failures under each strategy, and the run without any."""

    spec: Emulation
    alone: Outcome
    outcomes: dict[str, Outcome]

    def to_dict(self) -> dict[str, Any]:
        return {
            "failures": [
                {"hours": f.at / HOUR, "shards": list(f.shards)} for f in self.spec.failures()
            ],
            "alone": self.alone.to_dict(),
            "strategies": {name: o.to_dict() for name, o in self.outcomes.items()},
        }


def emulate(
    spec: Emulation,
    strategies: Sequence[Name] = STRATEGIES,
    *,
    progress: Progress = lambda *_: None,
) -> Emulated:
    """Trains once without failures, and once under them with each strategy."""
    tasks = [Task(spec=spec, strategy=name) for name in (None, *strategies)]
    alone, *outcomes = run_all(tasks, progress=progress)
    return Emulated(spec=spec, alone=alone, outcomes=dict(zip(strategies, outcomes, strict=True)))


def run_all(tasks: Sequence[Task], *, progress: Progress = lambda *_: None) -> list[Outcome]:
    """Runs tasks side by side, each in a process and on a thread of its own, so that outcomes
    depend neither on their order nor on how many cores there are."""
    workers = min(len(tasks), os.cpu_count() or 1)
    # A fork of a process that has used torch may hang: every process starts afresh.
    context = multiprocessing.get_context("spawn")
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_alone_on_a_core) as pool:
        try:
            futures = [pool.submit(run, task) for task in tasks]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done, len(tasks))
        except BaseException:
            # What is left would go on for as long as a training takes, for nobody.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
            raise
        return [future.result() for future in futures]


def run(task: Task) -> Outcome:
    """One run, here: trains, kills, recovers and judges; then projects what it took."""
    from emberkeep.train import build
    from emberkeep.train.loop import run as train

    spec, job, given = task.spec, task.spec.job, task.spec.settings
    samples = build.inputs(given).train.count() or 0
    steps = -(-samples // given.run.batch_size)
    settings = replace(
        given,
        cluster=replace(given.cluster, shards=job.shards),
        checkpoint=CheckpointSettings(),
        job=JobSettings(),
        failures=FailureSettings(),
        run=replace(given.run, compare=False),
    )
    if task.strategy is None:
        # The same bits wherever the rows are, and nobody to kill.
        result = train(replace(settings, cluster=ClusterSettings(shards=job.shards)))
        return Outcome(
            strategy="none", auc=result.auc, log_loss=result.log_loss, steps=steps,
            seconds=result.seconds,
        )  # fmt: skip
    chosen = tactics(
        task.strategy, job, steps=steps, pls=spec.pls, interval=spec.interval, force=spec.force
    )
    failures = spec.failures()
    at = failing_steps(failures, job, steps=steps)
    with _memory_of_its_own() as url:
        local = settings.cluster.kind == "local"
        settings = replace(
            settings,
            failures=FailureSettings(at=tuple(
                f"{', '.join(map(str, failure.shards))} at {step}"
                for step, failure in zip(at, failures, strict=True)
            ) if local else ()),
            checkpoint=_versions(given.checkpoint, chosen, url),
        )  # fmt: skip
        heard = _Heard(task.strategy, () if local else tuple(zip(at, failures, strict=True)))
        result = train(settings, hooks=[heard])
    assert result.recoveries is not None
    saves = [save for save in heard.saves if 0 < save["step"] < steps]
    return Outcome(
        strategy=task.strategy,
        auc=result.auc,
        log_loss=result.log_loss,
        steps=steps,
        pls=result.recoveries.pls,
        interval=chosen.interval,
        overhead=projected(
            job,
            steps=steps,
            saves=sum(PRIORITY_SHARE if s["kind"] == PRIORITISED else 1.0 for s in saves),
            failures=len(failures),
            steps_again=result.recoveries.repeated_steps,
        ),
        versions=len(saves),
        written_nbytes=sum(save["nbytes"] for save in saves),
        steps_again=result.recoveries.repeated_steps,
        started_over=any(
            made["scope"] == "partial"
            and made["step"] > steps / 2
            and all(save["step"] > made["step"] for save in saves)
            for made in heard.recoveries
        ),
        note="bits by restores do not go with partial recovery: weights were exact"
        if _is_exact(given.checkpoint, chosen)
        else chosen.note,
        seconds=result.seconds,
    )


def _versions(given: CheckpointSettings, chosen: Tactics, url: str) -> CheckpointSettings:
    """What versions hold is as given, as far as it goes with this recovery."""
    by_restores: dict[str, Any] = {}
    if not chosen.partial:
        by_restores["expected_restores"] = given.expected_restores
        if given.job_duration is not None:
            by_restores |= {"job_duration": given.job_duration, "mtbf": given.mtbf}
    searches = not _is_exact(given, chosen)
    return CheckpointSettings(
        path=url,
        every=f"{chosen.every} steps",
        layout=given.layout,
        predictor=given.predictor,
        bits=given.bits,
        table_bits=given.table_bits,
        quantize_optimizer=given.quantize_optimizer,
        bins=given.bins if searches else None,
        range_ratio=given.range_ratio if searches else None,
        recovery="partial" if chosen.partial else "full",
        priority=chosen.priority,
        fraction=PRIORITY_SHARE,
        period=given.period,
        most_pls=chosen.most_pls if chosen.partial else None,
        keep=1,
        **by_restores,
    )


def _is_exact(given: CheckpointSettings, chosen: Tactics) -> bool:
    """Whether weights stay exact because their bits would follow from the number of restores."""
    by_restores = given.expected_restores is not None or given.job_duration is not None
    return chosen.partial and by_restores and given.bits is None and not given.table_bits


class _Heard(Recording):
    """A run whose versions take no steps, and whose servers are killed on the job's clock.

    A step that a version was cut after ends when the version is committed: minutes of saving are
    seconds here and a step is minutes there, so a version that is still being written some steps
    later would be this machine's doing and not the job's.
    """

    def __init__(self, name: str, kills: Sequence[tuple[int, Failure]]) -> None:
        super().__init__(name)
        self._kills = list(kills)
        self._ended: Queue[int] = Queue()

    def on_start(self, start: Start) -> None:
        self._cluster: Any = start.bags.cluster

    def on_event(self, event: str, details: dict[str, Any]) -> None:
        super().on_event(event, details)
        if event in ("saved", "save_failed"):
            self._ended.put(details["step"])

    def on_step(self, step: Step) -> None:
        super().on_step(step)
        if step.number < step.steps and step.cut:
            while self._ended.get(timeout=_LONGEST_SAVE_SECONDS) != step.number:
                pass
        # A failure strikes in its step, and once, also where a recovery takes the step again.
        while self._kills and step.number >= self._kills[0][0] - 1:
            for shard in self._kills.pop(0)[1].shards:
                os.kill(self._cluster.launcher.pid(shard), signal.SIGKILL)


@contextmanager
def _memory_of_its_own() -> Iterator[str]:
    """A repository in this process's memory, emptied at the end: the next run needs the room."""
    url = f"memory://emulation-{uuid.uuid4().hex}"
    try:
        yield url
    finally:
        store = open_store(url)
        store.delete([info.name for info in store.list()])


def _alone_on_a_core() -> None:
    """Of a process that shares the machine with others of its kind, and is ended by its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["EMBERKEEP_THREADS"] = "1"
    from emberkeep.train.build import use_one_thread

    use_one_thread()

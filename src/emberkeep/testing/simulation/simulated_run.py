"""One run of a whole cluster from a seed, and what it shows."""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from emberkeep.checkpoint import restore
from emberkeep.cluster.local.local_cluster import local
from emberkeep.erasure import messages
from emberkeep.errors import EmberkeepError, FencedError, ProtocolError, StorageError
from emberkeep.repository import Repository
from emberkeep.runtime.pool import Pool
from emberkeep.testing.simulation.row_model import RowModel, differences, rows_of
from emberkeep.testing.simulation.scenarios import run_of
from emberkeep.testing.simulation.scheduler import (
    Process,
    Scheduler,
    SimulationError,
    undisturbed,
)
from emberkeep.testing.simulation.short_memory import short_of_memory
from emberkeep.testing.simulation.sim_job import TIMING, Caller, Follower, Job, Leader
from emberkeep.testing.simulation.sim_options import KINDS, FaultKind, Options
from emberkeep.testing.simulation.sim_threading import patched
from emberkeep.testing.simulation.sim_world import World, address_of, stores_of

_MOST_SECONDS = 900.0
# After servers or trainers have died, and nothing else. Less than the patience of callers, which
# would hide that they need it; leases, deadlines and a start of everything come to half of it.
_STILL_SECONDS = 100.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a run."""

    options: Options
    failure: str = ""
    story: list[str] = field(default_factory=list)
    virtual_seconds: float = 0.0
    real_seconds: float = 0.0
    turns: int = 0
    recoveries: int = 0
    resumes: int = 0
    parities: int = 0
    """How often the parity of a host was held against the rows."""
    extractions: int = 0
    """How often rows of a grid were moved."""
    faults: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)


def freeze_heap() -> None:
    """For a process that runs many seeds: what is loaded is not gone through again and again for
    what a run leaves behind."""
    gc.collect()
    gc.freeze()


def simulate(seed: int, kinds: tuple[FaultKind, ...] = KINDS) -> Outcome:
    """Runs a seed to its end. The same seed is the same run, message by message."""
    return run_options(run_of(seed, kinds))


def run_options(options: Options) -> Outcome:
    """Runs what was chosen by hand, as `simulate` does what a seed has chosen."""
    model = RowModel(options)
    scheduler = Scheduler(f"run {options.seed}", preemption=options.preemption)
    outcome = Outcome(options=options)
    start = time.perf_counter()
    collects = gc.isenabled()
    gc.disable()  # what it finds, and when, is no function of the seed
    world: World | None = None
    try:
        with patched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world = World(options, scheduler)
            job = Job(world, model)
            with (
                stores_of(world),
                short_of_memory(world.short, world.tell),
                _attribute(messages, "MESSAGE_NBYTES", options.message_nbytes),
            ):
                try:
                    scheduler.run(lambda: _main(job), world.harness)
                except (SimulationError, EmberkeepError, AssertionError) as error:
                    outcome.failure = f"{type(error).__name__}: {error}"
                finally:
                    scheduler.close()
            outcome.recoveries, outcome.resumes = job.recoveries, job.resumes
            outcome.parities, outcome.extractions = job.parities_checked, job.extractions
    finally:
        if collects:
            gc.enable()
    outcome.story = world.story
    outcome.virtual_seconds, outcome.turns = scheduler.seconds, scheduler.turns
    outcome.faults, outcome.messages = world.happened, world.network.sent
    outcome.real_seconds = time.perf_counter() - start
    return outcome


class _Life:
    """One start of a job: its workers, until all is done or one of them ends."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._processes: dict[int, Process] = {}
        self._errors: dict[int, BaseException | None] = {}

    def run(self) -> None:
        """Returns when the job is done, or has to be started again."""
        job, world = self._job, self._job.world
        job.started = False
        self._start(0)
        if job.options.workers != "one":
            self._start(1)
        while not job.done:
            world.scheduler.block("the job", 0.5)
            if world.scheduler.seconds > world.faults_end + _MOST_SECONDS:
                raise SimulationError(f"the job does not end: {world.scheduler.describe()}")
            self._check_moves()
            for rank in self._gone():
                if rank == 0 or job.ranks > 1:
                    return self._end()
                self._start_follower_again()
        return self._end()

    def _check_moves(self) -> None:
        """When faults have ended, nobody waits for what can never be: what is lost for good comes
        from a version instead. Who has no versions waits as long as its patience."""
        job, world = self._job, self._job.world
        still, most = world.scheduler.seconds - max(job.moved_at, world.faults_end), _STILL_SECONDS
        kills = all(fault.kind in ("kill", "kill trainer") for fault in job.options.faults)
        if not (kills and job.options.scenario):
            # A message that is lost, with its server or without, is awaited for so long.
            most += TIMING.bulk.total_seconds()
        if still > most and not job.options.goes_on:
            raise SimulationError(
                f"the job stands still for {still:.0f} s: {world.scheduler.describe()}"
            )

    def _gone(self) -> list[int]:
        return [
            rank
            for rank, process in self._processes.items()
            if not process.alive
            or self._errors.get(rank) is not None
            or process in self._job.world.replaced
        ]

    def _start(self, rank: int) -> None:
        job, world = self._job, self._job.world
        process = world.process(f"trainer-{rank}")
        world.trainers.append(process)
        self._processes[rank] = process
        self._errors.pop(rank, None)

        def train() -> None:
            try:
                first = Caller if job.options.goes_on else Leader
                (Follower if rank else first)(job, process).run()
            except EmberkeepError as error:
                world.tell(f"{process} ends: {type(error).__name__}: {error}")
                self._errors[rank] = error
                if job.started:
                    self._excuse(error)

        world.scheduler.spawn("train", train, process)

    def _excuse(self, error: EmberkeepError) -> None:
        """A job of one worker ends for a store that does not answer, for another coordinator, and
        for nothing else: servers are waited for. One of several may end for another as well, but
        never for a push that was lost on its way."""
        alone = self._job.options.workers == "one"
        if isinstance(error, ProtocolError) or (
            alone and not isinstance(error, StorageError | FencedError)
        ):
            raise SimulationError(
                f"the job ended half-way: {type(error).__name__}: {error}"
            ) from error

    def _start_follower_again(self) -> None:
        self._job.give_up_follower()
        self._retire(1)
        self._start(1)

    def _end(self) -> None:
        for rank in list(self._processes):
            self._retire(rank)
        self._job.world.scheduler.block("another start", 1.0)

    def _retire(self, rank: int) -> None:
        world, process = self._job.world, self._processes[rank]
        if process.alive and process not in world.replaced:
            world.scheduler.kill(process)
        world.trainers.remove(process)


def _main(job: Job) -> None:
    world = job.world
    for shard in range(job.options.shards):
        world.start_server(address_of(shard))
    world.schedule(job.options.faults)
    while not job.done:
        _Life(job).run()
    world.close()
    _verify(job)


@contextmanager
def _at_once() -> Iterator[None]:
    """A version is read without a thread that reads ahead: nothing can come in between any more,
    and turns cost more than the reading."""
    with _attribute(restore, "ahead_of", iter), undisturbed():
        yield


@contextmanager
def _attribute(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Something else in a module, as long as the body lasts."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _verify(job: Job) -> None:
    """Every version restores exactly what was frozen for it."""
    if job.options.workers == "asynchronous" or job.options.goes_on:
        return
    world, model = job.world, job.model
    repository = Repository.open(world.disk, clock=world.network.clock(world.harness))
    # Shards round their part of a table's capacity up: one alone may have no room.
    shards = job.options.shards if job.options.tight else 1
    target = local(shards=shards, threads=1).open(
        job.options.tables, job.options.optimizer, seed=job.options.seed
    )
    for version in repository.versions():
        manifest = repository.manifest(version)
        then = model.instants[int(manifest.counters["instant"])]
        with _at_once():
            restore.load(repository, version, target, Pool(1))
        wrong = differences(rows_of(target), then.rows)
        if wrong or manifest.step != then.step:
            raise SimulationError(f"version {version} of step {manifest.step}: {wrong}")
        if abs(manifest.counters["pls"] - then.pls) > 1e-12:
            raise SimulationError(
                f"version {version} says that PLS is {manifest.counters['pls']}, it is {then.pls}"
            )

"""A training job on a simulated cluster, by the classes that `Keeper` is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from emberkeep._types import Json
from emberkeep.checkpoint.recovery import NOTHING_TRAINED, Home
from emberkeep.checkpoint.spec import SaveSettings
from emberkeep.cluster.remote.flight_cluster import FlightCluster
from emberkeep.cluster.remote.timing import Timing
from emberkeep.errors import EmberkeepError, SaveError, ShardLostError, TableFullError
from emberkeep.keeper.recoverer import Recoverer, make_recoverer
from emberkeep.keeper.repository_saver import RepositorySaver
from emberkeep.repository import Manifest
from emberkeep.runtime.pool import Pool
from emberkeep.server.pushes import RowGradients
from emberkeep.strategies import Strategy, incremental, parity
from emberkeep.strategies import partial as partial_recovery
from emberkeep.testing.simulation.parity_check import any_left_out, check_parity
from emberkeep.testing.simulation.row_model import LR, RowModel, rows_of
from emberkeep.testing.simulation.scheduler import Process, SimulationError
from emberkeep.testing.simulation.sim_options import DEADLINE, LEASE, PATIENCE, Options
from emberkeep.testing.simulation.sim_world import World

TIMING = Timing(deadline=DEADLINE, lease=LEASE, bulk=timedelta(minutes=2), patience=PATIENCE)


_T = TypeVar("_T")


class Job:
    """What outlives trainers: the model of the rows, and how far each worker is."""

    def __init__(self, world: World, model: RowModel) -> None:
        self.world = world
        self.options: Options = world.options
        self.model = model
        self.done = False
        self.started = False
        """Whether the present leader has brought rows back, and others may push."""
        self.started_at = 0.0
        self.moved_at = 0.0
        """When it last came on: took a step, had something back, or wrote a version."""
        self.leader: Leader | None = None
        """The newest; one before it may be stopped, and wake up."""
        self.recoveries = 0
        self.resumes = 0
        self.parities_checked = 0
        self.extractions = 0
        """How often rows of a grid were moved."""
        self.went_back = False
        """Whether rows came from a version: what asynchronous workers pushed is not known then."""
        self.followed = 0
        """Steps of the second worker that were acknowledged."""
        self.pending: RowGradients | None = None
        """Its push that was not."""
        self.follower_ended = False
        """Whether it is through, and no loss can undo what it has pushed."""
        self.unsettled: list[RowGradients] = []
        """Its pushes that were, and that it keeps for a server that may yet lose them."""
        self.doubtful: list[list[RowGradients]] = []
        """What each worker that died had pushed without knowing it settled: a shard has all of
        these, the first few, or none."""

    @property
    def ranks(self) -> int:
        return 2 if self.options.workers == "synchronous" else 1

    @property
    def exact(self) -> bool:
        """Whether the model knows every row."""
        return not (self.options.workers == "asynchronous" and self.went_back)

    def come_on(self) -> None:
        self.moved_at = self.world.scheduler.seconds

    def settle(self, kept: int = 0) -> None:
        """All but the last so many pushes of the second worker are in rows for good."""
        while len(self.unsettled) > kept:
            self.model.push(*self.unsettled.pop(0))

    def give_up_follower(self) -> None:
        """The second worker is dead, and what it kept with it."""
        if self.pending is not None:
            self.unsettled.append(self.pending)
            self.followed += 1
        if self.unsettled:
            self.doubtful.append(self.unsettled)
        self.pending, self.unsettled = None, []

    def strategy(self) -> Strategy:
        strategy = self._strategy()
        return replace(strategy, spec=replace(strategy.spec, grid=self.options.grid))

    def _strategy(self) -> Strategy:
        options, every = self.options, self.options.every
        if options.recovers == "full":
            return incremental(every=every, layout=options.layout, keep="all", recovery="full")
        if options.recovers == "partial":
            return partial_recovery(every=every, priority=None, layout=options.layout, keep="all")
        assert options.parity is not None
        return parity(
            k=options.parity.k, r=options.parity.r, background=options.parity.background,
            chunk_rows=options.parity.chunk_rows, rebuild_share=options.parity.rebuild_share,
            every=every, layout=options.layout, keep="all", recovery=options.scope,
        )  # fmt: skip

    def open_cluster(self, process: Process, rank: int) -> FlightCluster:
        network, world = self.world.network, self.ranks
        return FlightCluster(
            self.options.tables, self.options.optimizer, self.world.launcher(process),
            seed=self.options.seed, pool=Pool(1), timing=TIMING, rank=rank if world > 1 else 0,
            world=world, coordinate=rank == 0, transport=network.transport(process),
            clock=network.clock(process),
        )  # fmt: skip


class Leader:
    """The trainer that coordinates, saves and recovers: what `Keeper` does on rank 0."""

    def __init__(self, job: Job, process: Process) -> None:
        self.job = job
        self.process = process
        self.steps = 0
        self._clock = job.world.network.clock(process)
        job.leader = self
        self.cluster = job.open_cluster(process, 0)
        self.saver = RepositorySaver(
            job.world.store(process), self.cluster, job.strategy(), about={},
            settings=SaveSettings(threads=1, nice=0, max_failures=1000), exclusive=False,
            must_exist=False, on_event=self._hear, clock=self._clock,
        )  # fmt: skip
        names = {table.name: table.name for table in self.cluster.tables}
        recoverer = make_recoverer(
            job.strategy(), [Home(self.cluster, names)], self.saver,
            total_steps=job.options.steps, steps=lambda: self.steps,
            go_back=self._go_back if job.ranks == 1 else None, tell=self._hear, clock=self._clock,
        )  # fmt: skip
        assert recoverer is not None
        self.recoverer: Recoverer = recoverer

    def run(self) -> None:
        """Trains to the end; what only another trainer can help is raised."""
        self._resume()
        self.job.started, self.job.started_at = True, self._clock.monotonic()
        if self.job.options.watched:
            self.job.world.scheduler.spawn("watch", self._watch, self.process)
        ended = False
        while not ended:
            try:
                if self.steps < self.job.options.own_steps:
                    self._step()
                else:
                    ended = self._finish()
            except ShardLostError as lost:
                self.recoverer.recover(lost)
        self.job.done = True

    @property
    def _leads(self) -> bool:
        """Whether no other trainer was started in the place of this one."""
        return self.job.leader is self

    def _refuse(self, what: str, began: float) -> None:
        """Nothing that a trainer begins after another has taken its place may succeed."""
        if began > self.job.started_at:
            raise SimulationError(f"{self.process} was replaced, and {what} after that")

    def _watch(self) -> None:
        """Another thread of the trainer, which has a look at the tables now and then."""
        while not self.job.done:
            self._clock.sleep(self.job.world.scheduler.random.random())
            with suppress(EmberkeepError):
                self.cluster.table_state()

    def _step(self) -> None:
        job, step = self.job, self.steps + 1
        wanted, grads = job.model.batch(step)
        began = self._clock.monotonic()
        ahead = self.cluster._ahead is not None  # read before, and taken without asking anybody
        pulled = self.cluster.pull(wanted)
        if not self._leads:
            if not ahead:
                self._refuse("pulled", began)
        elif job.options.workers != "asynchronous":
            job.model.check_pull(wanted, pulled)
        if job.options.prefetches and step < job.options.steps:
            self.cluster.prefetch(job.model.batch(step + 1)[0])
        self._clock.sleep(job.world.scheduler.random.random() * job.options.pace)
        began = self._clock.monotonic()
        try:
            self.cluster.push(wanted, grads, lr=LR)
        except TableFullError:
            if self._leads:
                job.model.refuse_step()
        else:
            if self._leads:
                job.model.take_step(job.ranks)
            else:
                self._refuse("pushed", began)
        self.steps += 1
        job.come_on()
        if self.steps % job.options.every == 0:
            self.saver.check()
            self._cut()
        if job.options.parity is not None and self._leads:
            job.parities_checked += check_parity(job.world.network, self.cluster)

    def _cut(self) -> None:
        self.saver.cut(self.steps, None, self._counted())

    def _counted(self) -> Callable[[], Json]:
        """What is asked for the counters when the rows are frozen. A trainer that stops in between
        may have had them in time."""
        began = self._clock.monotonic()

        def counters() -> Json:
            if not self._leads:
                self._refuse("froze rows", began)
            return self._counters()

        return counters

    def _counters(self) -> Json:
        return {**self.recoverer.counters(), "instant": self.job.model.instant()}

    def _finish(self) -> bool:
        """The last version; whether that and everything else is over."""
        job = self.job
        while job.options.workers == "asynchronous" and not job.follower_ended:
            self.cluster.table_state()  # somebody has to notice what is lost meanwhile
            self._clock.sleep(1.0)
        try:
            self.saver.finish(self.steps, None, self._counted())
        except SaveError as error:
            job.world.tell(f"the last save failed: {error}")
            self._clock.sleep(1.0)
            return False
        self.recoverer.recover()
        if self.steps < job.options.own_steps:
            return False
        if job.options.parity is not None:
            self.cluster.rebuild()
            job.parities_checked += check_parity(job.world.network, self.cluster)
        if job.exact:
            wrong = job.model.wrong(rows_of(self.cluster), job.doubtful)
            if wrong:
                raise SimulationError(f"after the last step: {wrong}")
        self.cluster.close()
        return True

    # -- what was lost ---------------------------------------------------------------------------

    def _resume(self) -> None:
        began = self._clock.monotonic()
        restored = self.saver.restore()
        if restored is not None:
            self._go_to(restored.manifest, began)
            self.job.resumes += 1
            self.job.world.tell(f"{self.process} resumes step {self.steps}")
            return
        self._cut()
        self.saver.wait()

    def _go_back(self) -> Manifest | None:
        began = self._clock.monotonic()
        restored = self.saver.restore()
        if restored is None:
            return None
        self._go_to(restored.manifest, began)
        return restored.manifest

    def _go_to(self, manifest: Manifest, began: float) -> None:
        if not self._leads:
            self._refuse("loaded rows", began)
            return
        self.job.model.go_back(int(manifest.counters["instant"]))
        self.job.went_back = True
        self.steps = manifest.step
        self.recoverer.load(manifest.counters)

    def _hear(self, event: str, details: dict[str, Any]) -> None:
        job, world = self.job, self.job.world
        if event in ("saved", "recovered", "returned"):
            job.come_on()
        if event == "saved":
            world.tell(f"version {details['version']} holds step {details['step']}")
        elif event == "recovered":
            job.recoveries += 1
            source = "" if details["version"] is None else f" from version {details['version']}"
            world.tell(
                f"{details['scope']} recovery of {list(details['shards'])}{source} at step "
                f"{details['step']}: {details['reason']}"
            )
            if details["scope"] == "partial":
                self._lose(details)
        elif event == "returned":
            world.tell(f"shard {details['shard']} is back with its rows")
        elif event == "extracted":
            job.extractions += details["pieces"] > 0
        elif event == "extraction_failed":
            world.tell(f"extraction failed: {details['error']}")
        elif event in ("save_failed", "save_cancelled"):
            world.tell(f"{event} at step {details['step']}: {details.get('error', '')}")

    def _lose(self, details: dict[str, Any]) -> None:
        job, manifest = self.job, self.saver.whole
        assert manifest is not None
        if manifest.version.number != details["version"]:
            raise SimulationError(f"{manifest.version} is newer than version {details['version']}")
        if not details["reason"].startswith(NOTHING_TRAINED):  # else that must be true
            job.model.lose(details["shards"], int(manifest.counters["instant"]), job.options.steps)
        if abs(job.model.pls - details["pls"]) > 1e-12:
            raise SimulationError(
                f"PLS is {details['pls']}, and {job.model.pls} was lost at step {details['step']}"
            )


class Caller:
    """Who uses the cluster alone, as its documentation says: without versions, nothing is renewed.
    A push that ends with a loss is not made again, and counts: it is finished on the shards that
    missed it before they are next read."""

    def __init__(self, job: Job, process: Process) -> None:
        self.job = job
        self.process = process
        self._clock = job.world.network.clock(process)
        self.cluster = job.open_cluster(process, 0)

    def run(self) -> None:
        job, options = self.job, self.job.options
        if options.renewed:
            self._until_back(self._renew)
        job.started = True
        for step in range(1, options.steps + 1):
            wanted, grads = job.model.batch(step)
            job.model.check_pull(wanted, self._until_back(partial(self.cluster.pull, wanted)))
            if options.prefetches and step < options.steps:
                self.cluster.prefetch(job.model.batch(step + 1)[0])
            self._clock.sleep(job.world.scheduler.random.random() * options.pace)
            try:
                self.cluster.push(wanted, grads, lr=LR)
            except ShardLostError as lost:
                job.world.tell(f"{self.process} goes on after step {step}: {lost}")
            job.model.take_step()
        wrong = job.model.wrong(self._until_back(partial(rows_of, self.cluster)))
        if wrong:
            raise SimulationError(f"after the last step: {wrong}")
        self.cluster.close()
        job.done = True

    def _renew(self) -> None:
        every = range(self.cluster.shard_count)
        self.cluster.renew(*every)
        self.cluster.serve(*every)

    def _until_back(self, call: Callable[[], _T]) -> _T:
        while True:
            try:
                return call()
            except ShardLostError as lost:
                self.job.world.tell(f"{self.process} waits: {lost}")
                self._clock.sleep(1.0)


class Follower:
    """Another worker, of a synchronous or an asynchronous job."""

    def __init__(self, job: Job, process: Process) -> None:
        self.job = job
        self.process = process
        self._clock = job.world.network.clock(process)

    def run(self) -> None:
        job = self.job
        while not job.started:
            self._clock.sleep(0.2)
        cluster = job.open_cluster(self.process, 1)
        together, job.unsettled = job.ranks > 1, []
        step = job.model.step if together else job.followed
        while step < job.options.steps:
            step += 1
            wanted, grads = job.model.batch(step, 1)
            cluster.pull(wanted)
            if job.options.prefetches and step < job.options.steps:
                cluster.prefetch(job.model.batch(step + 1, 1)[0])
            self._clock.sleep(job.world.scheduler.random.random() * job.options.pace)
            job.pending = (wanted, grads)
            cluster.push(wanted, grads, lr=LR)
            job.pending = None
            job.come_on()
            if not together:
                job.unsettled.append((wanted, grads))
                job.settle(self._doubtful(cluster))
                job.followed = step
        cluster.close()
        job.settle()
        job.follower_ended = True

    def _doubtful(self, cluster: FlightCluster) -> int:
        """How many of its last pushes a loss could undo without it. Where parity is not behind,
        hosts held each before it was acknowledged, unless they were left out; a worker keeps its
        last one whatever hosts hold."""
        parity, kept = self.job.options.parity, len(cluster._unsettled)
        behind = parity is None or parity.background or any_left_out(self.job.world.network)
        return kept if behind else min(kept, 1)

"""Processes on one repository in every order, with whatever can go wrong once.

Each process runs the real code; between any two of its storage operations the others may act for as
long as they like. That is how sleeping processes, slow networks and clocks that disagree look to a
repository. Beside the order, one operation of one process may fail, be carried out although its
answer is lost, be carried out twice, be its last, or find its clock two hours off. Whatever
happens: every acknowledged version that retention keeps reads back exactly, there is one lineage,
and what a replaced writer does after its successor started changes nothing.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import numpy as np

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.errors import (
    ChangedError,
    EmberkeepError,
    FencedError,
    NoVersionError,
    StorageError,
)
from emberkeep.repository import (
    Collector,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    RetentionPolicy,
    VersionId,
    Writer,
    fork,
    verify,
)
from emberkeep.repository.grid.catalog import StaleError
from emberkeep.repository.policies import Grid
from emberkeep.runtime.clock import SystemClock
from emberkeep.runtime.pool import Pool
from emberkeep.testing import Fault, FaultStore, ProcessDied
from emberkeep.testing.contracts import check_content, save
from emberkeep.testing.interleave import Interleaving, Stint, schedules
from tests.faults.any_order import AnyOrderStore
from tests.faults.findings import Counts, HangError, LostVersionError, WrongRowsError
from tests.faults.grids import Rows, World

NOW = timedelta(0)
JUMP = timedelta(hours=2)
OLD = VersionId(2, 1)
FAULTS = [
    Fault.LOSE, Fault.REPEAT, Fault.FAIL, Fault.DIE_BEFORE, Fault.DIE_AFTER, Fault.JUMP,
]  # fmt: skip


class Clock(SystemClock):
    """The clock of one process, at the store's time until it jumps."""

    def __init__(self) -> None:
        self.off = NOW

    def now(self) -> datetime:
        return super().now() + self.off


def copied(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for info in store.list():
        copy.put(info.name, store.get(info.name))
    return copy


@cache
def _template() -> MemoryStore:
    store = MemoryStore()
    writer = Writer.open(Repository.create(store, schema={}))
    first = save(writer, 1)
    save(writer, 2, needs=[first.version])
    save(writer, 3)
    save(writer, 4)
    return store


class Scene:
    """A repository with four versions, of which the second builds on the first, and its writer."""

    refusals: tuple[type[Exception], ...] = (FencedError, NoVersionError)

    def __init__(self) -> None:
        self.store = copied(_template())
        repository = Repository.open(self.store, clock=Clock())
        self.acknowledged = {v: repository.manifest(v) for v in repository.versions()}
        self.steps = 4
        self.held: set[VersionId] = set()
        self.built_on: dict[int, set[VersionId]] = {}
        self.collected = False
        self.jumped = False
        self.first = Writer(repository, epoch=1, newest=VersionId(4, 1), next_number=5)
        self.newest_writer = self.first

    def open(self, store: BlobStore) -> Repository:
        assert isinstance(store, FaultStore)
        clock = Clock()
        store.jump = lambda: self._jump(clock)
        return Repository.open(store, clock=clock)

    def _jump(self, clock: Clock) -> None:
        self.jumped = True
        clock.off = JUMP if self.steps % 2 else -JUMP

    def running(self, store: BlobStore) -> Writer:
        """The writer that was there from the start."""
        assert isinstance(store, FaultStore)
        self.first.repository.store = store
        clock = self.first.repository.clock
        assert isinstance(clock, Clock)
        store.jump = lambda: self._jump(clock)
        return self.first

    def save(self, writer: Writer, needs: list[VersionId] | None = None) -> Manifest:
        self.steps += 1
        manifest = save(writer, self.steps, needs=needs)
        self.acknowledged[manifest.version] = manifest
        return manifest

    def take_over(self, store: BlobStore) -> Writer:
        writer = Writer.open(self.open(store))
        if writer.epoch > self.newest_writer.epoch:
            self.newest_writer = writer
        return writer

    def collect(self, writer: Writer, keep: int = 1) -> None:
        self.collected = True
        policy: RetentionPolicy = KeepLast(n=keep) | KeepNamed()
        Collector(writer, policy=policy, grace=NOW).collect()

    def check(self) -> None:
        """What was acknowledged and is kept reads exactly; the newest of all is at least the newest
        acknowledged one; nobody but the newest writer can commit."""
        repository = Repository.open(self.store)
        versions = repository.versions()
        newest = max(self.acknowledged)
        if not versions or versions[-1] < newest:
            raise LostVersionError(f"{newest} was acknowledged, and {versions} are there")
        if not self.collected and not set(self.acknowledged) <= set(versions):
            raise LostVersionError(f"of {sorted(self.acknowledged)} only {versions} are there")
        held = self.held | self.built_on.get(self.newest_writer.epoch, set())
        if not held <= set(versions):
            raise LostVersionError(f"{held} are held, and {versions} are there")
        for version in versions:
            for manifest in repository.chain(version):
                known = self.acknowledged.get(manifest.version)
                if manifest.step > self.steps or (known and known != manifest):
                    raise WrongRowsError(f"{manifest.version} is not what was saved")
                check_content(repository, manifest)
        if not verify(repository, deep=False).ok:
            raise WrongRowsError("a healthy repository is called damaged")
        self._check_fenced(self.first, unless=self.first is self.newest_writer)
        last = self.save(Writer.open(repository))
        # What a gc that died had marked and not decided is part of the history again.
        after = Repository.open(self.store).versions()
        if after[-1] != last.version or not {*versions} <= {*after}:
            raise LostVersionError(f"{after} is how the next process goes on from {versions}")
        for version in {*after} - {*versions}:
            check_content(repository, self.acknowledged[version])
        self._check_fenced(self.newest_writer)

    def _check_fenced(self, writer: Writer, *, unless: bool = False) -> None:
        if unless:
            return
        try:
            save(writer, 99)
        except (FencedError, ProcessDied):
            return
        raise LostVersionError("a writer that was replaced has committed a version")


# -- what processes do -----------------------------------------------------------------------------


def saves(scene: Scene, store: BlobStore) -> None:
    """The writer goes on, its gc removes all but the newest version, and it saves again."""
    writer = scene.running(store)
    scene.save(writer)
    scene.save(writer)
    scene.collect(writer)
    scene.save(writer)


def saves_chained(scene: Scene, store: BlobStore) -> None:
    writer = scene.running(store)
    scene.save(writer, needs=[writer.newest] if writer.newest else None)
    scene.collect(writer)
    scene.save(writer)


def collects(scene: Scene, store: BlobStore) -> None:
    scene.collect(scene.running(store))


def opens(scene: Scene, store: BlobStore) -> None:
    scene.take_over(store)


def takes_over(scene: Scene, store: BlobStore) -> None:
    """A successor opens and saves."""
    scene.save(scene.take_over(store))


def takes_over_and_keeps(scene: Scene, store: BlobStore) -> None:
    """A successor whose retention keeps more builds on whatever its gc has left."""
    writer = scene.take_over(store)
    scene.collect(writer, keep=3)
    for version in writer.repository.versions():
        try:
            scene.save(writer, needs=[version])
        except NoVersionError:
            continue
        scene.built_on.setdefault(writer.epoch, set()).add(version)


def resumes_old(scene: Scene, store: BlobStore) -> None:
    """A successor goes on from an old version, which its own gc would let go."""
    writer = scene.take_over(store)
    scene_version = writer.repository.version(OLD.number)
    writer.repository.ensure_kept(scene_version)
    writer.resume(scene_version)
    scene.collect(writer)
    scene.save(writer, needs=[scene_version])


def pins(scene: Scene, store: BlobStore) -> None:
    repository = scene.open(store)
    held = Pin(repository, OLD)
    if not scene.jumped:  # a clock that is off can expire the pin
        scene.held.add(held.version)


def tags(scene: Scene, store: BlobStore) -> None:
    scene.open(store).tag("best", OLD)
    scene.held.add(OLD)


def reads(scene: Scene, store: BlobStore) -> None:
    """A restore: pins a version and reads all that it needs."""
    repository = scene.open(store)
    with Pin(repository, OLD) as pin:
        for manifest in repository.chain(pin.version):
            check_content(repository, manifest)


def forks(scene: Scene, store: BlobStore) -> None:
    made = fork(scene.open(store), OLD, MemoryStore())
    for manifest in made.chain(OLD):
        check_content(made, manifest)


Action = Callable[[Any, BlobStore], object]
WRITER: list[Action] = [saves, saves_chained, collects]
READERS: list[Action] = [pins, tags, reads, forks]
OTHERS: list[Action] = [opens, takes_over, takes_over_and_keeps, resumes_old, *READERS]


# -- grids ---------------------------------------------------------------------------------------


@cache
def _grid_template() -> World:
    world = World(5, Grid(ratio=0.1))
    for _ in range(4):
        world.train()
        world.save()
        if len(world.shadows) == 2:
            world.repository.tag("old", 2)
            world.extract()
    return world


class GridScene:
    """A grid of four versions, the second one tagged, that a writer has extracted in part."""

    refusals = (*Scene.refusals, StaleError)

    def __init__(self) -> None:
        template = _grid_template()
        assert isinstance(template.store, MemoryStore)
        self.store = copied(template.store)
        self.world = self._world(self.store, 6)
        self.world.rows = dict(template.rows)
        self.world.writer = Writer(
            self.world.repository, epoch=1, newest=VersionId(4, 1), next_number=5
        )
        self.world.newest = self.world.repository.manifest(4)
        self.shadows = {VersionId(n, 1): rows for n, rows in template.shadows.items()}
        self.acknowledged = set(self.shadows)
        self.held = {OLD}
        self.jumped = False

    def _world(self, store: BlobStore, seed: int) -> World:
        world = copy.copy(_grid_template())
        world.shadows, world.changed = {}, set()
        world.random = np.random.default_rng(seed)
        world.store, world.pool, world.extractor = store, Pool(1), None
        clock = Clock()
        if isinstance(store, FaultStore):
            store.jump = lambda: self._jump(clock)
        world.repository = Repository.open(store, clock=clock)
        return world

    def _jump(self, clock: Clock) -> None:
        self.jumped = True
        clock.off = JUMP

    def running(self, store: BlobStore) -> World:
        assert isinstance(store, FaultStore)
        clock = self.world.repository.clock
        assert isinstance(clock, Clock)
        store.jump = lambda: self._jump(clock)
        self.world.repository.store = store
        return self.world

    def save(self, world: World) -> None:
        world.train()
        version = VersionId(world.writer._next_number, world.writer.epoch)
        self.shadows[version] = dict(world.rows)
        self.acknowledged.add(world.save().version)

    def successor(self, store: BlobStore, number: int) -> World:
        """A process that takes over, goes on from a version, and saves."""
        world = self._world(store, 7)
        world.open()
        resumed = world.repository.manifest(number)
        world.repository.ensure_kept(resumed.version)
        world.newest = resumed if world.writer.resume(resumed.version) else None
        world.rows = self.restored(world, resumed.version)
        self.save(world)
        return world

    def restored(self, world: World, version: VersionId, *, pinned: bool = True) -> Rows:
        """As a restore does: planned again where the grid was rearranged meanwhile."""
        for attempt in range(5):
            try:
                if not pinned:
                    found = world.restored(version.number)
                else:
                    with Pin(world.repository, version):
                        found = world.restored(version.number)
                break
            except ChangedError:
                if attempt == 4:
                    raise
        if found != self.shadows[version]:
            raise WrongRowsError(f"version {version} is not what it was")
        return found

    def check(self) -> None:
        """Every version that stands is what it was, bit for bit, whichever process wrote it."""
        repository = Repository.open(self.store)
        versions = repository.versions()
        if not self.held <= {*versions} or versions[-1] < max(self.acknowledged):
            raise LostVersionError(f"{versions} of {self.acknowledged} are there, {self.held} held")
        for version in versions:
            if self.world.restored(version.number, repository) != self.shadows[version]:
                raise WrongRowsError(f"version {version} is not what it was")
        if not verify(repository, deep=False).ok:
            raise WrongRowsError("a healthy grid is called damaged")
        # And the next process goes on.
        successor = self._world(self.store, 8)
        successor.open()
        newest = repository.manifest(versions[-1])
        successor.newest = newest if successor.writer.resume(newest.version) else None
        successor.rows = dict(self.shadows[versions[-1]])
        self.save(successor)
        successor.extract()
        successor.collect(KeepLast(n=2) | KeepNamed())
        for version in Repository.open(self.store).versions():
            if self.world.restored(version.number, successor.repository) != self.shadows[version]:
                raise WrongRowsError(f"version {version} is not what it was, one process later")


def grid_goes_on(scene: GridScene, store: BlobStore) -> None:
    world = scene.running(store)
    scene.save(world)
    world.extract()
    world.collect(KeepLast(n=2) | KeepNamed())


def grid_extracts(scene: GridScene, store: BlobStore) -> None:
    world = scene.running(store)
    world.extract()
    world.collect(KeepLast(n=1) | KeepNamed())


def grid_resumes_old(scene: GridScene, store: BlobStore) -> None:
    world = scene.successor(store, 2)
    world.extract()
    world.collect(KeepLast(n=2) | KeepNamed())


def grid_resumes_newest(scene: GridScene, store: BlobStore) -> None:
    newest = Repository.open(store).versions()[-1]
    world = scene.successor(store, newest.number)
    world.extract()
    scene.save(world)


def grid_reads(scene: GridScene, store: BlobStore) -> None:
    """A restore without a pin: gc may take files away under it, and it plans again."""
    scene.restored(scene._world(store, 9), OLD, pinned=False)


def grid_reads_pinned(scene: GridScene, store: BlobStore) -> None:
    world = scene._world(store, 9)
    version = world.repository.versions()[-1]
    scene.restored(world, version)


def grid_forks(scene: GridScene, store: BlobStore) -> None:
    world = scene._world(store, 9)
    target = MemoryStore()
    made = fork(world.repository, OLD, target)
    if scene.world.restored(OLD.number, made) != scene.shadows[OLD]:
        raise WrongRowsError("the fork is not what was forked")


def grid_tags(scene: GridScene, store: BlobStore) -> None:
    world = scene._world(store, 9)
    world.repository.tag("third", VersionId(3, 1))
    scene.held.add(VersionId(3, 1))


GRID_WRITER: list[Action] = [grid_goes_on, grid_extracts]
GRID_OTHERS: list[Action] = [
    grid_resumes_old, grid_resumes_newest, grid_reads, grid_reads_pinned, grid_forks, grid_tags,
]  # fmt: skip


# -- all of them -----------------------------------------------------------------------------------

Pair = tuple[type[Any], tuple[Action, ...]]


@cache
def pairs() -> list[Pair]:
    """Every two actions that two processes can perform at once."""
    found: list[Pair] = []
    for kind, writer, others in (
        (Scene, WRITER, OTHERS), (GridScene, GRID_WRITER, GRID_OTHERS),
    ):  # fmt: skip
        found += [(kind, both) for both in itertools.product(writer, others)]
        found += [(kind, both) for both in itertools.combinations_with_replacement(others, 2)]
    return found


@cache
def triples() -> list[Pair]:
    return [
        (kind, (first, *both))
        for kind, writer, others in (
            (Scene, WRITER, OTHERS), (GridScene, GRID_WRITER, GRID_OTHERS),
        )
        for first in writer
        for both in itertools.combinations_with_replacement(others, 2)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One run: who acts, in which order, and what goes wrong where: (process, operation, what)."""

    kind: type[Any]
    actions: tuple[Action, ...]
    stints: tuple[Stint, ...] = ()
    fault: tuple[int, int, Fault] | None = None
    counts: Callable[[str, str], bool] = lambda _method, _name: True
    order: int | None = None
    """The seed of the order in which calls that are made at once take effect; None: in theirs."""

    def run(self) -> list[int]:
        """Raises what it finds; how many operations that count each process has performed."""
        scene = self.kind()
        faults = {} if self.fault is None else {self.fault[0]: {self.fault[1]: self.fault[2]}}

        stores: list[FaultStore] = []

        def process(action: Action) -> Callable[[BlobStore], object]:
            def act(store: BlobStore) -> None:
                assert isinstance(store, FaultStore)
                stores.append(store)
                if self.order is not None:
                    store.inner = AnyOrderStore(store.inner, self.order)
                action(scene, store)

            return act

        interleaving = Interleaving(
            scene.store, [process(action) for action in self.actions], self.stints, faults,
            counts=self.counts,
        )  # fmt: skip
        try:
            outcomes = interleaving.run()
        except TimeoutError as error:
            raise HangError(str(self)) from error
        for index, outcome in enumerate(outcomes):
            if outcome.error is not None and not self._may_end(scene, index, outcome.error):
                raise outcome.error
        for store in stores:
            store.faults.clear()  # those of operations that were not reached
        scene.check()
        return [outcome.operations for outcome in outcomes]

    def _may_end(self, scene: Any, index: int, error: BaseException) -> bool:
        """Whether a process may end so: refused, or by what was done to it."""
        if isinstance(error, scene.refusals):
            return True
        if scene.jumped:  # pins of a clock that is off hold nothing: readers get an error
            return isinstance(error, EmberkeepError)
        own = self.fault is not None and self.fault[0] == index
        return own and isinstance(error, StorageError | ProcessDied)

    def __str__(self) -> str:
        names = ", ".join(action.__name__ for action in self.actions)
        return f"{names}: {self.stints}, {self.fault}, order {self.order}"


def _changes(method: str, name: str) -> bool:
    """Whether others may see it. Nobody looks for a data file before a manifest names it."""
    return method.startswith(("put", "delete")) and not name.startswith("data/")


def changes_of(pair: Pair, preemptions: int = 2) -> Iterator[Case]:
    """Every schedule of so many preemptions at most in which a process is stopped right before it
    changes something: what it knows by then may be long past."""
    kind, actions = pair
    firsts = [Case(kind, actions, ((first, 2**31),), counts=_changes).run() for first in range(2)]
    most = [max(counts) for counts in zip(*firsts, strict=True)]

    def following(process: int, done: tuple[int, int], left: int) -> Iterator[tuple[Stint, ...]]:
        yield ((process, 2**31),)
        for at in range(done[process] + 1, most[process] if left else 0):
            after = (at, done[1]) if process == 0 else (done[0], at)
            for rest in following(1 - process, after, left - 1):
                yield ((process, at - max(done[process], 0)), *rest)

    for first in (0, 1):
        for stints in following(first, (-1, -1), preemptions):
            yield Case(kind, actions, stints, counts=_changes)


def counted(pair: Pair) -> list[int]:
    """How many operations each action performs when nothing comes between, at most: the one that
    comes second may be refused early."""
    kind, actions = pair
    firsts = [Case(kind, actions, ((first, 2**31),)).run() for first in range(len(actions))]
    return [max(counts) for counts in zip(*firsts, strict=True)]


def schedules_of(pair: Pair, preemptions: int = 2) -> Iterator[Case]:
    """Every schedule of a pair, without a fault."""
    kind, actions = pair
    for stints in schedules(counted(pair), preemptions):
        yield Case(kind, actions, stints)


def faults_of(pair: Pair, preemptions: int = 1) -> Iterator[Case]:
    """Every single fault at every operation, under every schedule."""
    kind, actions = pair
    operations = counted(pair)
    for stints in schedules(operations, preemptions):
        for process, number in enumerate(operations):
            for at, fault in itertools.product(range(number), FAULTS):
                yield Case(kind, actions, stints, (process, at, fault))


def sampled(chance: random.Random, operations: dict[Pair, list[int]], processes: int) -> Case:
    """One case of so many processes: any two or more preemptions, mostly with a fault."""
    kind = chance.choice((Scene, Scene, Scene, Scene, GridScene))  # which takes ten times as long
    pair = chance.choice([p for p in (pairs() if processes == 2 else triples()) if p[0] is kind])
    actions = pair[1]
    if pair not in operations:
        operations[pair] = counted(pair)
    counts = operations[pair]
    order = list(range(processes))
    chance.shuffle(order)
    stints: list[Stint] = []
    for at in range(chance.randint(1, 2 * processes - 2)):
        process = order[at % processes]
        stints.append((process, chance.randint(1, max(1, counts[process]))))
    chance.shuffle(order)
    stints += [(process, 2**31) for process in order]
    process = chance.randrange(processes)
    fault = (process, chance.randrange(max(1, counts[process])), chance.choice(FAULTS))
    return Case(kind, actions, tuple(stints), fault if chance.random() < 0.7 else None)


def checked(case: Case) -> None:
    """Runs a case; a failure says which one it was."""
    try:
        case.run()
    except BaseException:
        print(f"in {case}")
        raise


def run(seed: int, cases: int, seconds: float = math.inf, *, at_once: bool = False) -> Counts:
    """So many cases from a seed on, or until the time is over: two processes, three, without and
    with faults; how many of each. `at_once`: with stores that make calls at once."""
    chance = random.Random(seed)
    counts: Counts = Counts()
    operations: dict[Pair, list[int]] = {}
    until = time.monotonic() + seconds
    while counts["interleavings"] < cases and time.monotonic() < until:
        processes = chance.choice((2, 2, 3))
        case = sampled(chance, operations, processes)
        if at_once:
            case = replace(case, order=chance.randrange(2**31))
        checked(case)
        counts["interleavings"] += 1
        counts[f"of {processes} processes"] += 1
        counts["without a fault" if case.fault is None else case.fault[2].name] += 1
    return counts


def run_all(chosen: Sequence[Pair]) -> Counts:
    """Every schedule of these pairs with at most two preemptions, and every single fault under
    every schedule with at most one."""
    counts: Counts = Counts()
    for pair in chosen:
        for case in itertools.chain(schedules_of(pair), faults_of(pair)):
            checked(case)
            counts["interleavings"] += 1
    return counts

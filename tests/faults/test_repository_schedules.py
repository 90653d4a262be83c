"""Pairs of processes under every schedule: who may lose what, wherever one sleeps.

Each process runs the real code; between any two of its storage operations the other may act for as
long as it likes. That is how sleeping processes, slow networks and clocks that disagree look to a
repository. Every acknowledged version that retention keeps must read back exactly, there is one
lineage, and what a replaced writer does after its successor started changes nothing.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import numpy as np
import pytest

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.errors import FencedError, NoVersionError
from emberkeep.repository import (
    Collector,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    VersionId,
    Writer,
    verify,
)
from emberkeep.repository.grid.catalog import StaleError
from emberkeep.repository.policies import Grid
from emberkeep.runtime.pool import Pool
from emberkeep.testing.contracts import check_content, save
from emberkeep.testing.interleave import Interleaving, schedules
from tests.faults.grids import World

NOW = timedelta(0)


class Scene:
    """A repository with four versions, of which the second builds on the first, and its writer."""

    refusals: tuple[type[Exception], ...] = (FencedError, NoVersionError)

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.acknowledged: dict[VersionId, Manifest] = {}
        self.held: set[VersionId] = set()
        self.first = Writer.open(Repository.create(self.store, schema={}))
        baseline = self.save(self.first)
        self.save(self.first, needs=[baseline.version])
        self.save(self.first)
        self.save(self.first)
        self.newest_writer = self.first

    def save(self, writer: Writer, needs: list[VersionId] | None = None) -> Manifest:
        manifest = save(writer, len(self.acknowledged) + 1, needs=needs)
        self.acknowledged[manifest.version] = manifest
        return manifest

    def check(self) -> None:
        """What was acknowledged and is kept reads exactly; the newest acknowledged one is newest;
        nobody but the newest writer can commit."""
        repository = Repository.open(self.store)
        versions = repository.versions()
        assert versions
        assert versions[-1] == max(self.acknowledged)
        assert set(versions) <= set(self.acknowledged)
        assert self.held <= set(versions)
        for version in versions:
            for manifest in repository.chain(version):
                check_content(repository, self.acknowledged[manifest.version])
        assert verify(repository).ok
        if self.newest_writer is not self.first:
            with pytest.raises(FencedError):
                save(self.first, 99)
        last = self.save(Writer.open(repository))
        assert Repository.open(self.store).versions() == (*versions, last.version)
        with pytest.raises(FencedError):
            save(self.newest_writer, 99)


Action = Callable[[Scene, BlobStore], object]
AnyScene = TypeVar("AnyScene", "Scene", "GridScene")
Acts = Callable[[AnyScene, BlobStore], object]


def gc(writer: Writer, keep: int = 1) -> None:
    Collector(writer, policy=KeepLast(n=keep) | KeepNamed(), grace=NOW).collect()


def running(scene: Scene, store: BlobStore) -> Writer:
    scene.first.repository.store = store
    return scene.first


def saves(scene: Scene, store: BlobStore) -> None:
    """The writer goes on, and its gc removes all but the newest version."""
    writer = running(scene, store)
    scene.save(writer)
    scene.save(writer)
    gc(writer)


def saves_chained(scene: Scene, store: BlobStore) -> None:
    writer = running(scene, store)
    scene.save(writer, needs=[writer.newest] if writer.newest else None)
    gc(writer)
    scene.save(writer)


def saves_by_a_clock_that_jumps(scene: Scene, store: BlobStore) -> None:
    """With gc's own grace: hours ahead whatever was written is old, behind nothing is."""
    writer = running(scene, store)
    hours = itertools.cycle((2, 0, 3, -3))
    repository = writer.repository
    repository.clock = lambda: datetime.now(timezone.utc) + timedelta(hours=next(hours))
    collector = Collector(writer, policy=KeepLast(n=1) | KeepNamed())
    for _ in range(2):
        scene.save(writer)
        collector.collect()


def collects(scene: Scene, store: BlobStore) -> None:
    gc(running(scene, store))


def takes_over(scene: Scene, store: BlobStore) -> None:
    """A successor opens and saves."""
    writer = Writer.open(Repository.open(store))
    scene.newest_writer = writer
    scene.save(writer)


def takes_over_and_keeps(scene: Scene, store: BlobStore) -> None:
    """A successor whose retention keeps more builds on whatever its gc has left."""
    writer = Writer.open(Repository.open(store))
    scene.newest_writer = writer
    gc(writer, keep=3)
    for version in writer.repository.versions():
        try:
            scene.save(writer, needs=[version])
        except NoVersionError:
            continue
        scene.held.add(version)
    scene.held.update(itertools.islice(reversed(writer.repository.versions()), 1))


def pins(scene: Scene, store: BlobStore) -> None:
    held = Pin(Repository.open(store), VersionId(2, 1))
    scene.held.add(held.version)


def tags(scene: Scene, store: BlobStore) -> None:
    Repository.open(store).tag("best", VersionId(2, 1))
    scene.held.add(VersionId(2, 1))


FIRST: list[Action] = [saves, saves_chained, saves_by_a_clock_that_jumps, collects]
SECOND: list[Action] = [takes_over, takes_over_and_keeps, pins, tags]


def run_pair(kind: type[AnyScene], actions: Sequence[Acts[AnyScene]], stints: Any) -> list[int]:
    """Two processes on a new scene under one schedule; how many operations each performed."""
    scene = kind()

    def process(action: Acts[AnyScene]) -> Callable[[BlobStore], object]:
        return lambda store: action(scene, store)

    outcomes = Interleaving(scene.store, [process(action) for action in actions], stints).run()
    for outcome in outcomes:
        if outcome.error is not None and not isinstance(outcome.error, kind.refusals):
            raise outcome.error
    scene.check()
    return [outcome.operations for outcome in outcomes]


# -- grids ---------------------------------------------------------------------------------------


class GridScene:
    """A grid of four versions, the second one tagged, that a writer has extracted in part."""

    refusals = (*Scene.refusals, StaleError)

    def __init__(self) -> None:
        self.world = World(5, Grid(ratio=0.1))
        self.store = self.world.store
        for _ in range(4):
            self.world.train()
            self.world.save()
            if len(self.world.shadows) == 2:
                self.world.repository.tag("old", 2)
                self.world.extract()
        self.worlds = [self.world]

    def check(self) -> None:
        """Every version that stands is what it was, bit for bit, no matter who wrote it."""
        shadows = {n: rows for world in self.worlds for n, rows in world.shadows.items()}
        repository = Repository.open(self.store)
        versions = repository.versions()
        assert VersionId(2, 1) in versions
        assert versions[-1] == max(w.newest.version for w in self.worlds if w.newest is not None)
        for version in versions:
            assert self.world.restored(version.number, repository) == shadows[version.number]
        assert verify(repository).ok

    def successor(self, store: BlobStore, number: int) -> World:
        """A process that takes over, goes on from a version, and saves."""
        world = copy.copy(self.world)
        world.shadows, world.changed = {}, set()
        world.random = np.random.default_rng(6)
        world.store, world.pool = store, Pool(1)
        world.repository = Repository.open(store)
        world.open()
        resumed = world.repository.manifest(number)
        world.rows = world.restored(number)
        world.newest = resumed if world.writer.resume(resumed.version) else None
        self.worlds.append(world)
        world.train()
        world.save()
        return world


GridAction = Callable[[GridScene, BlobStore], object]


def grid_goes_on(scene: GridScene, store: BlobStore) -> None:
    scene.world.repository.store = store
    scene.world.train()
    scene.world.save()
    scene.world.extract()
    scene.world.collect(KeepLast(n=2) | KeepNamed())


def grid_extracts(scene: GridScene, store: BlobStore) -> None:
    scene.world.repository.store = store
    scene.world.extract()
    scene.world.collect(KeepLast(n=1) | KeepNamed())


def resumes_old(scene: GridScene, store: BlobStore) -> None:
    world = scene.successor(store, 2)
    world.extract()
    world.collect(KeepLast(n=2) | KeepNamed())


def resumes_newest(scene: GridScene, store: BlobStore) -> None:
    newest = Repository.open(store).versions()[-1]
    world = scene.successor(store, newest.number)
    world.extract()
    world.train()
    world.save()


GRID_FIRST: list[GridAction] = [grid_goes_on, grid_extracts]
GRID_SECOND: list[GridAction] = [resumes_old, resumes_newest]


@pytest.mark.parametrize("second", GRID_SECOND, ids=lambda action: action.__name__)
@pytest.mark.parametrize("first", GRID_FIRST, ids=lambda action: action.__name__)
def test_grids_under_schedules_of_two_preemptions(first: GridAction, second: GridAction) -> None:
    counts = run_pair(GridScene, (first, second), [])
    for stints in random.Random(8).sample(list(schedules(counts, 2)), 40):
        run_pair(GridScene, (first, second), stints)


@pytest.mark.soak
@pytest.mark.parametrize("second", GRID_SECOND, ids=lambda action: action.__name__)
@pytest.mark.parametrize("first", GRID_FIRST, ids=lambda action: action.__name__)
def test_grids_under_every_schedule_of_two_preemptions(
    first: GridAction, second: GridAction
) -> None:
    for stints in schedules(run_pair(GridScene, (first, second), []), 2):
        run_pair(GridScene, (first, second), stints)


@pytest.mark.parametrize("second", SECOND, ids=lambda action: action.__name__)
@pytest.mark.parametrize("first", FIRST, ids=lambda action: action.__name__)
def test_pairs_under_schedules_of_two_preemptions(first: Action, second: Action) -> None:
    """One preemption at every operation, and a seeded sample of two."""
    counts = run_pair(Scene, (first, second), [])
    one = list(schedules(counts, 1))
    two = list(schedules(counts, 2))[len(one) :]
    for stints in [*one, *random.Random(7).sample(two, min(60, len(two)))]:
        run_pair(Scene, (first, second), stints)


@pytest.mark.soak
@pytest.mark.parametrize("second", SECOND, ids=lambda action: action.__name__)
@pytest.mark.parametrize("first", FIRST, ids=lambda action: action.__name__)
def test_pairs_under_every_schedule_of_two_preemptions(first: Action, second: Action) -> None:
    for stints in schedules(run_pair(Scene, (first, second), []), 2):
        run_pair(Scene, (first, second), stints)

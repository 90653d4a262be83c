"""Long random histories of a grid: every version that stands is what it was, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from emberkeep.errors import FencedError
from emberkeep.repository import KeepAll, KeepEvery, KeepLast, Pin, fork, verify
from emberkeep.repository.grid.bundles import BundleStream, EncodedRows, encoded
from emberkeep.repository.grid.catalog import StaleError, grid_of, newest_catalog, plan, reading
from emberkeep.repository.grid.extraction import Extractor
from emberkeep.repository.grid.version_rows import rows_of_plan
from emberkeep.repository.policies import Grid
from tests.faults.grids import IDS, POOL, MemoryStore, World
from tests.nightly import examples

POLICIES = [KeepAll(), KeepAll(), KeepLast(n=5), KeepEvery(m=3) | KeepLast(n=2)]
RULES = st.builds(
    Grid,
    ratio=st.sampled_from([0.0, 0.02, 0.1, 0.2, 0.5, 1.0]),
    concatenate=st.booleans(),
)


def live(world: World, versions: int) -> None:
    """A history: trainings of every kind, extraction now and then, drops, resets, restarts."""
    random = world.random
    zombies: list[tuple[Extractor, object]] = []
    policy = POLICIES[int(random.integers(len(POLICIES)))]
    for number in range(versions):
        for _ in range(int(random.integers(1, 3))):
            world.train(str(random.choice(["skewed"] * 6 + ["one", "sweep", "all"])))
        world.save(baseline=random.random() < 0.03)
        if random.random() < 0.8:
            world.extract(split=bool(random.random() < 0.9))
        if random.random() < 0.3:
            world.collect(policy)
        if random.random() < 0.06:
            if world.extractor is not None:
                zombies.append((world.extractor, world.newest))
            world.open()
        if zombies and random.random() < 0.3:
            extractor, newest = zombies.pop()
            with contextlib.suppress(FencedError, StaleError):
                extractor.run(newest)  # type: ignore[arg-type]
        if number % 15 == 14:
            world.check()


@settings(
    max_examples=examples(12), deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck), derandomize=True,
)  # fmt: skip
@given(seed=st.integers(0, 2**32), rules=RULES, bits=st.sampled_from([None, None, 4]))
def test_every_version_is_what_it_was(seed: int, rules: Grid, bits: int | None) -> None:
    world = World(seed, rules, bits=bits)
    live(world, 45)
    world.extract()
    world.collect()
    world.check()
    assert world.unused_files() == set()
    assert verify(world.repository).ok


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.2, 1.0])
def test_hundreds_of_versions(seed: int, ratio: float) -> None:
    world = World(seed, Grid(ratio=ratio, concatenate=seed % 2 == 0))
    live(world, 400)
    world.extract()
    world.check()


def test_a_restore_reads_little_more_than_it_needs() -> None:
    """What accumulates in a piece without being split stays below the ratio."""
    world = World(3, Grid(ratio=0.2))
    for _ in range(40):
        world.train()
        world.save()
        world.extract()
    catalog = newest_catalog(world.repository, grid_of(world.newest))  # type: ignore[arg-type]
    newest = max(world.shadows)
    read = sum(
        piece.rows
        for bundle in reading(catalog.bundles, newest)
        for piece in bundle.pieces
        if bundle.families[piece.family]
    )
    assert read <= len(world.shadows[newest]) / 0.8 + 1


def test_dropping_versions_makes_storage_fall() -> None:
    world = World(5, Grid(ratio=0.1))
    for _ in range(40):
        world.train()
        world.save()
        world.extract()
    world.collect()
    everything = world.stored_nbytes()
    world.collect(KeepEvery(m=10) | KeepLast(n=1))
    world.train()
    world.save()
    world.extract()  # moves what remains out of files that are mostly unused
    world.collect(KeepEvery(m=10) | KeepLast(n=1))
    assert {v.number for v in world.repository.versions()} >= {10, 20, 30, 40}
    world.check()
    assert world.stored_nbytes() < 0.7 * everything
    assert world.unused_files() == set()


def test_a_fork_of_any_version_stands_alone() -> None:
    world = World(7, Grid(ratio=0.1))
    for number in range(12):
        world.train()
        world.save()
        if number != 11:
            world.extract()
    for number in (1, 6, 11, 12):
        target = MemoryStore()
        copy = fork(world.repository, number, target)
        assert verify(copy).ok
        assert world.restored(number, copy) == world.shadows[number]
        # The copy goes on as a run of its own.
        again = World.__new__(World)
        again.__dict__.update(world.__dict__)
        again.store, again.repository = target, copy
        again.rows, again.shadows = dict(world.shadows[number]), {number: world.shadows[number]}
        again.newest, again.changed = copy.manifest(number), set()
        again.open()
        for _ in range(3):
            again.train()
            again.save()
            again.extract()
            again.collect()
        again.check()


def test_a_pin_keeps_the_files_of_a_plan() -> None:
    """A reader that has pinned and planned is not disturbed by any number of rounds and gcs."""
    world = World(9, Grid(ratio=0.0))
    for _ in range(6):
        world.train()
        world.save()
        world.extract()
    with Pin(world.repository, 3) as pin:
        planned = plan(world.repository, pin.manifest)
        assert planned is not None
        for _ in range(4):
            world.train()
            world.save()
            world.extract()
            world.collect()
        rows = sum(c.ids.size for c in rows_of_plan(world.repository, planned, POOL) if c.planes)
        assert rows == len(world.shadows[3])
    world.collect()
    assert world.unused_files() == set()


class WithEmptyPieces(World):
    """Writes as earlier releases did once ids had been deleted that were not there: the first
    piece of the version has no rows, and may be its only one."""

    def _bundles(self, chosen: set[tuple[str, int]], birth: int) -> Iterator[BundleStream]:
        empty = EncodedRows(birth, None, (), np.empty(0, np.int32), np.empty(0, np.int64), ())
        others = (
            part
            for chunk in self._chunks(chosen)
            for part in encoded(chunk, list(IDS).index(chunk.table), self.codecs, POOL, birth=birth)
        )
        parts = itertools.chain([empty], others)
        yield BundleStream(parts, list(IDS), nbytes=2**62, metadata={"shard": 0})


def test_pieces_without_rows_are_taken_in_and_go() -> None:
    old = WithEmptyPieces(11, Grid(ratio=0.1))
    for trained in (True, False, True, False):
        if trained:
            old.train()
        old.save()
    old.check()
    assert verify(old.repository).ok
    world = World.__new__(World)
    world.__dict__.update(old.__dict__)
    world.open()  # this release takes over
    for number in range(3):
        if number:
            world.train()
            world.save()
        world.extract()
        world.collect()
        world.check()
    catalog = newest_catalog(world.repository, grid_of(world.newest))  # type: ignore[arg-type]
    assert min(piece.rows for _, piece in catalog.pieces()) > 0
    assert world.unused_files() == set()
    assert verify(world.repository).ok
    assert verify(fork(world.repository, 2, MemoryStore())).ok

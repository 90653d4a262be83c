"""A listing that was made while versions were committed: a later one is in it, an earlier one not.

A directory of many names is read in several calls, in an order that has nothing to do with names.
What is there all the time is found for certain, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from emberkeep.blobs import BlobInfo, MemoryStore
from emberkeep.repository import Collector, KeepAll, KeepLast, Repository, Writer, verify
from emberkeep.repository.names import VERSIONS
from emberkeep.repository.policies import Grid
from emberkeep.repository.retention import RetentionPolicy
from emberkeep.testing.contracts import add_files, check_content, save
from tests.faults.grids import World


class TornListings(MemoryStore):
    """Once, while versions are listed, others are made, of which the listing has the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], object] | None = None

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        if prefix != VERSIONS or self.meanwhile is None:
            return super().list(prefix)
        meanwhile, self.meanwhile = self.meanwhile, None
        before = list(super().list(prefix))
        known = {info.name for info in before}
        meanwhile()
        made = [info for info in super().list(prefix) if info.name not in known]
        return iter([*before, max(made, key=lambda info: info.name)])


@pytest.mark.parametrize("policy", [KeepAll(), KeepLast(n=2)])
def test_gc_leaves_alone_what_a_listing_has_missed(policy: RetentionPolicy) -> None:
    store = TornListings()
    repository = Repository.create(store, schema={})
    writer = Writer.open(repository)
    made = [save(writer, 1)]
    following = writer.begin()
    add_files(following, 2)  # older than what gc takes for young

    def meanwhile() -> None:
        made.append(following.commit(step=2))
        made.append(save(writer, 3, needs=[made[-1].version]))

    store.meanwhile = meanwhile
    collector = Collector(writer, policy=policy, grace=timedelta(0))
    collector.collect()
    for manifest in made:
        check_content(repository, manifest)
    collector.collect()
    for manifest in made[-2:]:
        check_content(repository, manifest)
    assert verify(repository).ok


def test_gc_keeps_the_rows_of_a_grid_that_only_a_missed_version_reads() -> None:
    """Versions are taken in by extraction while gc still looks at the listing from before."""
    store = TornListings()
    world = World(3, Grid(ratio=0.01), store)
    for _ in range(4):
        world.train()
        world.save()
    world.extract()

    def meanwhile() -> None:
        for _ in range(5):
            world.train("all")
            world.save()
            world.extract()

    store.meanwhile = meanwhile
    world.collect()
    for number in range(1, 10):
        rows: dict[Any, bytes] = world.restored(number)
        assert rows == world.shadows[number]
    assert verify(world.repository).ok

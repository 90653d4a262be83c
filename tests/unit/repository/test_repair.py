"""Versions that are read for hours, to be checked, repaired or copied, are held all the while."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import NoVersionError
from emberkeep.repository import Repository, Writer
from emberkeep.repository.maintenance.repair import first_damage, is_intact, repair
from emberkeep.repository.maintenance.version_copy import copy_version
from emberkeep.repository.pins import read_pins
from emberkeep.testing.virtual_clock import VirtualClock

SCHEMA = {"shards": 1, "tables": {"t": {"rows": 1, "planes": {"weight": [1, "float32"]}}}}
FILES = 10


class SlowStore(MemoryStore):
    """Each read of a data file takes as long as `takes` says; `unpinned` counts those that ended
    when no pin was valid."""

    takes = timedelta(0)
    unpinned = 0

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self._advanced = clock

    def get(self, name: str) -> bytes:
        found = super().get(name)
        if name.startswith("data") and self.takes:
            self._advanced.advance(self.takes)
            pins = read_pins(Repository.open(self, clock=self._advanced))
            now = self._advanced.now()
            self.unpinned += not any(expires > now for _, expires in pins.values())
        return found


class Places:
    """A version of many small files, and a copy of it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.stores = [SlowStore(self.clock) for _ in range(3)]
        self.first, self.second, self.third = (
            Repository.create(store, schema=SCHEMA, clock=self.clock) for store in self.stores
        )
        with Writer.open(self.first).begin() as draft:
            for number in range(FILES):
                draft.add(bytes([number]), kind="piece", suffix="bin")
            self.version = draft.commit(step=1).version
        copied = copy_version(self.first, self.version, Writer.open(self.second))
        self.copy = copied.version

    def slow(self, takes: timedelta) -> None:
        for store in self.stores:
            store.takes = takes

    @property
    def unpinned(self) -> int:
        return sum(store.unpinned for store in self.stores)


@pytest.fixture
def places() -> Places:
    return Places()


def test_a_version_is_pinned_as_long_as_it_is_checked(places: Places) -> None:
    places.slow(timedelta(minutes=9))
    assert is_intact(places.first, places.version)
    assert places.unpinned == 0


def test_both_versions_are_pinned_as_long_as_one_is_repaired(places: Places) -> None:
    for file in places.second.manifest(places.copy).files:
        places.stores[1].put(file.name, b"damage")
    places.slow(timedelta(minutes=9))
    assert repair(places.second, places.copy, places.first) == FILES
    assert places.unpinned == 0
    assert is_intact(places.second, places.copy)


def test_a_version_of_many_files_is_pinned_as_long_as_it_is_copied(places: Places) -> None:
    """None of them takes long."""
    places.slow(timedelta(minutes=9))
    copy_version(places.first, places.version, Writer.open(places.third))
    assert places.unpinned == 0


def test_a_pin_that_expired_is_no_damage(places: Places) -> None:
    """gc may have acted: nobody knows what was read."""
    places.slow(timedelta(hours=2))
    with pytest.raises(NoVersionError, match="expired"):
        is_intact(places.first, places.version)
    with pytest.raises(NoVersionError, match="expired"):
        repair(places.second, places.copy, places.first)


def test_the_file_that_is_damaged_is_named(places: Places) -> None:
    file: Any = places.first.manifest(places.version).files[3]
    assert first_damage(places.first, places.version) is None
    places.stores[0].put(file.name, b"damage")
    damage = first_damage(places.first, places.version)
    assert damage is not None
    assert damage.name == file.name

"""A grid at every single storage operation: it fails, tears, loses its answer, comes late, or is
the last thing that the process does; or a reader comes by.

The story: versions are saved, extracted and dropped, a process follows another. Whatever happens
at operation k, every version that stands reads back exactly, the next process goes on, and nothing
is left behind that nobody needs.
"""

from __future__ import annotations

import contextlib
from functools import cache

import pytest

from emberkeep.blobs import MemoryStore
from emberkeep.errors import ChangedError, DamageError, NoVersionError, StorageError
from emberkeep.repository import KeepEvery, KeepLast, Repository, Writer
from emberkeep.repository.grid.catalog import StaleError
from emberkeep.repository.policies import Grid
from emberkeep.testing import Fault, FaultStore, ProcessDied
from tests.faults.grids import World
from tests.nightly import some

POLICY = KeepEvery(m=2) | KeepLast(n=2)
TRANSIENT = [Fault.FAIL, Fault.LOSE, Fault.DELAY]


class Story(World):
    """A world whose store misbehaves; what cannot be done now is done later."""

    def tell(self, versions: int = 5) -> None:
        for number in range(versions):
            self.train()
            self._try(self.save)
            if number != 2:  # one version waits for the next round
                self._try(self.extract)
            if number % 2:
                self._try(lambda: self.collect(POLICY))

    def _try(self, action: object) -> None:
        for _ in range(3):
            try:
                action()  # type: ignore[operator]
                return
            except (StorageError, StaleError):
                settled = self._settled()
                if settled:
                    return
        raise AssertionError("a fault that goes away must not keep the process from going on")

    def _settled(self) -> bool:
        """Whether a commit whose answer was lost turns out to have happened."""
        with contextlib.suppress(StorageError):
            manifest = self.writer.settle()
            if manifest is not None:
                self.committed(manifest)
                return True
        return False


def new_story(position: int | None = None, fault: Fault = Fault.FAIL) -> tuple[MemoryStore, Story]:
    """A story that stands before its first version; the fault strikes so many operations later."""
    memory = MemoryStore()
    store = FaultStore(memory)
    story = Story(1, Grid(ratio=0.1), store=store)
    if position is not None:
        store.faults = {store.count + position: fault}
    return memory, story


@cache
def operations() -> int:
    """Of the story; counted when a test asks, not by every process that collects tests."""
    _, story = new_story()
    before = story.store.count  # type: ignore[attr-defined]
    story.tell()
    return int(story.store.count - before)  # type: ignore[attr-defined]


def check_goes_on(memory: MemoryStore, story: Story) -> None:
    """Another process takes over, goes on, and leaves nothing behind."""
    story.store = memory
    story.repository = Repository.open(memory)
    versions = story.repository.versions()
    unknown = [v for v in versions if v.number not in story.shadows]
    assert len(unknown) <= 1, "only the version in progress can stand without an acknowledgement"
    story.check()
    story.open()
    # It goes on from what is in the repository, as a restored process does.
    if versions:
        number = versions[-1].number
        story.rows = dict(story.restored(number))
        story.shadows.setdefault(number, dict(story.rows))
        story.newest = story.repository.manifest(versions[-1])
        story.changed = set()
    for _ in range(2):
        story.train()
        story.save()
        story.extract()
        story.collect(POLICY)
    story.check()
    assert story.unused_files() == set()


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_at_any_operation_loses_nothing(fault: Fault) -> None:
    survive(fault, range(TRANSIENT.index(fault), operations(), 4 * len(TRANSIENT)))


@pytest.mark.soak
@pytest.mark.parametrize("fault", TRANSIENT)
def test_every_fault_at_every_operation_loses_nothing(fault: Fault) -> None:
    survive(fault, range(operations()))


def survive(fault: Fault, positions: range) -> None:
    for position in positions:
        memory, story = new_story(position, fault)
        story.tell()
        story.store.deliver()  # type: ignore[attr-defined]
        story.check(Repository.open(memory))
        if position % 4 == 0:
            check_goes_on(memory, story)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.soak) for first in (1, 2))]
)
def test_death_at_any_operation_loses_nothing(first: int) -> None:
    """Death after an operation is death before the next one."""
    for position in some(range(first, operations(), 3)):
        memory, story = new_story(position, Fault.DIE_BEFORE)
        with contextlib.suppress(ProcessDied):
            story.tell()
        check_goes_on(memory, story)


def test_a_torn_catalog_is_passed_over() -> None:
    """Our stores never leave one; a store that does costs a round, not a version."""
    for fault in (Fault.TEAR, Fault.DIE_TORN):
        for position in range(operations()):
            memory, story = new_story()
            torn: list[str] = []

            def strike(
                number: int, method: str, name: str,
                story: Story = story, torn: list[str] = torn, position: int = position,
                fault: Fault = fault,
            ) -> None:  # fmt: skip
                if name.startswith("grid/") and name.endswith(".json") and method != "get":
                    if method == "put_if_absent" and len(torn) == position:
                        story.store.faults = {number: fault}  # type: ignore[attr-defined]
                    torn.append(name)

            story.store.before = strike  # type: ignore[attr-defined]
            with contextlib.suppress(ProcessDied):
                story.tell()
            if len(torn) <= position:
                break
            check_goes_on(memory, story)


def test_a_restore_that_races_returns_the_rows_or_says_read_again() -> None:
    """At every read of a restore without a pin, a whole round and a gc happen first."""
    position, retried = 0, 0
    while True:
        memory = MemoryStore()
        story = Story(2, Grid(ratio=0.0), store=memory)
        for _ in range(4):
            story.train()
            story.save()
            story.extract()
        story.train()
        story.save()
        reader = FaultStore(memory)
        done: list[int] = []

        def meanwhile(
            number: int, method: str, name: str,
            story: Story = story, done: list[int] = done, position: int = position,
        ) -> None:  # fmt: skip
            if number == position:
                done.append(number)
                story.extract()
                story.collect(KeepLast(n=3))

        reader.before = meanwhile
        try:
            found = story.restored(3, Repository.open(reader))
            assert found == story.shadows[3]
        except (ChangedError, NoVersionError):
            retried += 1
            assert story.restored(3, Repository.open(memory)) == story.shadows[3]
        if not done:
            break
        position += 1
    assert position > 5
    assert retried


def test_a_missing_file_under_an_unchanged_catalog_is_damage() -> None:
    story = Story(4, Grid(ratio=0.0))
    for _ in range(4):
        story.train()
        story.save()
        story.extract()
    gone = next(info.name for info in story.store.list("moved") if info.name.endswith(".grid"))
    story.store.delete([gone])
    with pytest.raises(DamageError) as raised:
        story.check()
    assert raised.value.name == gone


def test_a_zombie_cannot_name_files_that_its_successor_has_removed() -> None:
    """A round has written its bundles; before its catalog, another process takes over and its gc
    removes them as files of nobody. The catalog must not appear after that."""
    memory = MemoryStore()
    story = Story(6, Grid(ratio=0.0), store=FaultStore(memory))
    for _ in range(3):
        story.train()
        story.save()
        story.extract()
    story.train()
    story.save()
    removed: list[str] = []

    def take_over(number: int, method: str, name: str) -> None:
        if method == "put_if_absent" and name.startswith("grid/") and not removed:
            before = {info.name for info in memory.list("moved")}
            successor = Story.__new__(Story)
            successor.__dict__.update(story.__dict__)
            successor.store = memory
            successor.repository = Repository.open(memory)
            successor.writer = Writer.open(successor.repository)
            successor.collect()
            removed.extend(before - {info.name for info in memory.list("moved")})

    story.store.before = take_over  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="taken over"):
        story.extract()
    assert removed
    story.check(Repository.open(memory))

"""Every single storage operation fails, tears, loses its answer, comes late, or is the last one.

The story: a process creates a repository, commits, collects garbage, is followed by a second
process that does the same, and a version is forked. Whatever happens at operation k, every
version that was acknowledged and not let go by retention reads back exactly, and the next process
goes on from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta

import pytest

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.errors import DamageError, NoRepositoryError, StorageError
from emberkeep.repository import (
    Collector,
    KeepLast,
    Manifest,
    Repository,
    Writer,
    fork,
    newest_undamaged,
    verify,
)
from emberkeep.testing import Fault, FaultStore, ProcessDied
from emberkeep.testing.contracts import check_content, save
from tests.nightly import some

TRANSIENT = [Fault.FAIL, Fault.LOSE, Fault.TEAR, Fault.DELAY]
DEADLY = [Fault.DIE_BEFORE, Fault.DIE_AFTER, Fault.DIE_TORN]


class Story:
    """What was acknowledged to the process, kept outside of it."""

    def __init__(self) -> None:
        self.acknowledged: list[Manifest] = []

    def run(self, store: BlobStore) -> None:
        repository = retry(lambda: open_or_create(store))
        for _ in range(2):
            writer = retry(lambda: Writer.open(repository))
            collector = Collector(writer, policy=KeepLast(n=2), grace=timedelta(0))
            for _ in range(3):
                self.save(writer)
            retry(collector.collect)
            self.save(writer)
            retry(collector.collect)

    def save(self, writer: Writer) -> None:
        """Increments of two: every second version needs the one before it."""
        step = len(self.acknowledged) + 1

        def attempt() -> Manifest:
            settled = writer.settle()
            if settled is not None:
                return settled
            needs = [writer.newest] if writer.newest and step % 2 == 0 else []
            return save(writer, step, needs=needs)

        self.acknowledged.append(retry(attempt))


def open_or_create(store: BlobStore) -> Repository:
    if Repository.exists(store):
        return Repository.open(store)
    return Repository.create(store, schema={})


def retry(action: Callable[[], object], attempts: int = 3):
    """What a caller does after a failure of the store: the same again."""
    for attempt in range(attempts):
        try:
            return action()
        except StorageError:
            if attempt == attempts - 1:
                raise
    raise AssertionError


def operations_of_the_story() -> int:
    store = FaultStore(MemoryStore())
    Story().run(store)
    return store.count


COUNT = operations_of_the_story()


def check_goes_on(store: BlobStore, story: Story) -> None:
    """A later process finds the last acknowledged version, and works."""
    repository = Repository.open(store)
    if story.acknowledged:
        check_content(repository, story.acknowledged[-1])
        for manifest in repository.chain(story.acknowledged[-1].version):
            check_content(repository, manifest)
    assert verify(repository).ok
    newer = [v for v in repository.versions() if not known(v, story)]
    assert len(newer) <= 1, "only the version in progress can exist without being acknowledged"
    writer = Writer.open(repository)
    manifest = save(writer, 100)
    Collector(writer, policy=KeepLast(n=1), grace=timedelta(0)).collect()
    assert repository.versions() == (manifest.version,)
    check_content(repository, manifest)
    # Nothing is left over but the version's own files.
    assert {info.name for info in store.list("data")} == {file.name for file in manifest.files}
    assert list(store.list("condemned")) == []
    assert verify(repository).ok


def known(version: object, story: Story) -> bool:
    return any(manifest.version == version for manifest in story.acknowledged)


def test_the_story_covers_every_kind_of_operation() -> None:
    seen = set()
    store = FaultStore(MemoryStore(), before=lambda number, method, name: seen.add(method))
    Story().run(store)
    assert seen == {"put", "put_if_absent", "get", "size", "list", "delete", "sweep"}
    assert store.count > 100


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_at_any_operation_loses_nothing(fault: Fault) -> None:
    for position in some(range(COUNT), TRANSIENT.index(fault), of=4):
        memory = MemoryStore()
        store = FaultStore(memory, {position: fault})
        story = Story()
        story.run(store)
        store.deliver()
        assert len(story.acknowledged) == 8
        assert Repository.open(memory).latest() == story.acknowledged[-1].version, position
        check_goes_on(memory, story)


@pytest.mark.parametrize("fault", DEADLY)
def test_death_at_any_operation_loses_nothing(fault: Fault) -> None:
    """Death after an operation is death before the next one; each may leave something torn."""
    torn_names = set()
    every = range(COUNT)
    for position in every if fault is Fault.DIE_TORN else some(every, DEADLY.index(fault), of=4):
        memory = MemoryStore()
        store = FaultStore(memory, {position: fault})
        story = Story()
        with pytest.raises(ProcessDied):
            story.run(store)
        try:
            repository = Repository.open(memory)
        except NoRepositoryError:
            Story().run(memory)
            continue
        except DamageError as error:
            torn_names.add(error.name)
            assert not story.acknowledged
            continue
        report = verify(repository)
        if not report.ok:
            # Our stores never leave a torn object; on one that does it is damage, named, and
            # an explicit word is needed to go on without it.
            assert fault is Fault.DIE_TORN, position
            (damage,) = report.damages
            torn_names.add(damage.name.split("/")[0])
            found, _ = newest_undamaged(repository)
            expected = story.acknowledged[-1].version if story.acknowledged else None
            assert found == expected, position
            for version in damage.versions:
                repository.discard(version)
            if damage.name.startswith("writers/"):
                # Its copy in the seal is enough to go on; it stays reported.
                save(Writer.open(repository), 100)
                assert [d.name for d in verify(repository).damages] == [damage.name]
                continue
            if not damage.name.startswith("versions/"):
                memory.delete([damage.name])
        check_goes_on(memory, story)
    expected_names = {"repository.json", "versions", "writers"}
    assert torn_names >= expected_names if fault is Fault.DIE_TORN else not torn_names


@pytest.mark.parametrize("fault", [*TRANSIENT, *DEADLY])
@pytest.mark.parametrize("where", ["source", "target"])
def test_a_fork_that_is_interrupted_can_be_repeated(fault: Fault, where: str) -> None:
    source_memory = MemoryStore()
    story = Story()
    story.run(source_memory)
    top = story.acknowledged[-1]
    position = 0
    while True:
        target_memory = MemoryStore()
        faulty = FaultStore(
            source_memory if where == "source" else target_memory, {position: fault}
        )
        with contextlib.suppress(StorageError, ProcessDied):
            fork(
                Repository.open(faulty if where == "source" else source_memory),
                top.version,
                faulty if where == "target" else target_memory,
            )
        if position >= faulty.count:
            break
        faulty.deliver()
        position += 1
        try:
            copy = Repository.open(target_memory)
        except (NoRepositoryError, DamageError) as error:
            if isinstance(error, DamageError) and fault is Fault.DIE_TORN:
                target_memory.delete(["repository.json"])
            copy = fork(Repository.open(source_memory), top.version, target_memory)
        for manifest in copy.chain(top.version):
            check_content(copy, manifest)
        assert verify(copy).ok
        save(Writer.open(copy), 50)
    assert position > 5
    check_content(Repository.open(source_memory), top)


def test_a_commit_whose_answer_is_lost_for_long_is_settled_later() -> None:
    """The store performs the commit but answers nothing, three times over."""
    memory = MemoryStore()
    repository = Repository.create(memory, schema={})
    save(Writer.open(repository), 1)
    for fault in (Fault.FAIL, Fault.LOSE, Fault.DELAY):
        store = FaultStore(memory)
        writer = Writer.open(Repository.open(store))
        draft = writer.begin()
        file = draft.add(b"rows", kind="rows", suffix="bin")
        store.faults = {store.count + i: fault for i in range(3)}
        with pytest.raises(StorageError, match="not known yet"):
            draft.commit(step=2)
        # Its data survives a gc meanwhile: the version may still come to exist.
        Collector(writer, grace=timedelta(0)).collect()
        assert memory.get(file.name) == b"rows"
        settled = writer.settle()
        assert settled is not None
        assert settled.files == (file,)
        assert writer.newest == settled.version == repository.latest()
        assert writer.settle() is None
        store.deliver()
        assert repository.latest() == settled.version
        save(writer, 3)
    assert verify(repository).ok


def test_a_commit_that_comes_late_meets_the_seal() -> None:
    """The old process dies with its commit still on the network; the new one has started."""
    memory = MemoryStore()
    repository = Repository.create(memory, schema={})
    store = FaultStore(memory, delay=10_000)
    writer = Writer.open(Repository.open(store))
    first = save(writer, 1)
    draft = writer.begin()
    draft.add(b"rows", kind="rows", suffix="bin")
    store.faults = {store.count + i: Fault.DELAY for i in range(3)}
    with pytest.raises(StorageError):
        draft.commit(step=2)
    successor = Writer.open(repository)
    assert successor.newest == first.version
    store.deliver()
    assert repository.versions() == (first.version,)
    second = save(successor, 2)
    assert repository.versions() == (first.version, second.version)
    assert verify(repository).ok

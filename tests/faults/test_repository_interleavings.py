"""Two processes at once: every point at which one can act inside an operation of the other.

Stores are deterministic and processes act between storage operations only, so trying "the other
one acts right before operation k" for every k is trying every interleaving of that shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from emberkeep.blobs import BlobStore, MemoryStore
from emberkeep.errors import ConfigError, FencedError, NoVersionError, StorageError
from emberkeep.repository import (
    Collector,
    Draft,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    VersionId,
    Writer,
    fork,
    verify,
)
from emberkeep.repository.policies import Grid
from emberkeep.testing import Fault, FaultStore
from emberkeep.testing.contracts import check_content, save
from emberkeep.testing.interleave import Interleaving, schedules
from tests.faults.grids import World

NOW = timedelta(0)


class Scene:
    """A repository with three versions. The process under test sees it through `store`, which
    lets somebody else act, through `clean`, right before a chosen operation."""

    def __init__(self) -> None:
        memory = MemoryStore()
        self.memory = memory
        self.store = FaultStore(memory)
        self.repository = Repository.create(self.store, schema={})
        self.clean = Repository.open(memory)
        self.acknowledged: list[Manifest] = []
        self.held: VersionId | None = None
        self.draft: Draft | None = None
        self.present: set[str] = set()
        self.first = Writer.open(self.repository)
        baseline = self.save(self.first)
        self.save(self.first, needs=[baseline.version])
        self.save(self.first)

    def save(self, writer: Writer, *, needs: list[VersionId] | None = None) -> Manifest:
        manifest = save(writer, len(self.acknowledged) + 1, needs=needs)
        self.acknowledged.append(manifest)
        return manifest

    def check(self) -> None:
        """Every acknowledged version counts and reads exactly; nothing else counts."""
        # A writer may hear of its commit after its successor has saved the next version.
        assert sorted(m.version for m in self.acknowledged) == list(self.clean.versions())
        for manifest in self.acknowledged:
            check_content(self.clean, manifest)
        assert verify(self.clean).ok


def at_every_operation(
    act: Callable[[Scene], None],
    interrupt: Callable[[Scene], None],
    check: Callable[[Scene], None],
) -> int:
    """Runs `act` once per operation in it, with `interrupt` right before that operation."""
    position = 0
    while True:
        scene = Scene()
        waiting = [interrupt]
        chosen = scene.store.count + position

        def before(number: int, method: str, name: str) -> None:
            if number == chosen and waiting:  # noqa: B023
                waiting.pop()(scene)  # noqa: B023

        scene.store.before = before
        act(scene)
        check(scene)
        if waiting:
            return position
        position += 1


def test_a_successor_opens_at_any_point_of_a_save() -> None:
    """The old process sleeps at any point of its save; the new one opens, saves, goes on."""
    outcomes = set()

    def act(scene: Scene) -> None:
        try:
            manifest = save(scene.first, 40)
        except FencedError:
            outcomes.add("fenced")
            return
        outcomes.add("committed")
        # Committed before the successor looked: it must have started from this version.
        scene.acknowledged.insert(3, manifest)

    def interrupt(scene: Scene) -> None:
        scene.acknowledged.append(save(Writer.open(scene.clean), 50))

    def check(scene: Scene) -> None:
        if len(scene.acknowledged) == 5:
            assert [m.version.number for m in scene.acknowledged] == [1, 2, 3, 4, 5]
        scene.check()
        scene.save(Writer.open(scene.clean))
        scene.check()

    assert at_every_operation(act, interrupt, check) >= 3
    assert outcomes == {"fenced", "committed"}


@pytest.mark.parametrize("saves", [1, 3])
def test_the_old_process_saves_at_any_point_of_the_successors_opening(saves: int) -> None:
    outcomes = set()

    def act(scene: Scene) -> None:
        new = Writer.open(scene.repository)
        assert new.newest == scene.acknowledged[-1].version
        scene.save(new)

    def interrupt(scene: Scene) -> None:
        try:
            for _ in range(saves):
                scene.save(scene.first)
            outcomes.add("committed")
        except FencedError:
            outcomes.add("fenced")

    assert at_every_operation(act, interrupt, Scene.check) >= 5
    assert outcomes == {"fenced", "committed"}


def test_a_second_successor_opens_at_any_point_of_the_first_ones_opening() -> None:
    outcomes = set()

    def act(scene: Scene) -> None:
        try:
            scene.save(Writer.open(scene.repository))
            outcomes.add("opened")
        except FencedError:
            outcomes.add("fenced")

    def interrupt(scene: Scene) -> None:
        scene.save(Writer.open(scene.clean))

    def check(scene: Scene) -> None:
        scene.check()
        with pytest.raises(FencedError):
            save(scene.first, 99)

    assert at_every_operation(act, interrupt, check) >= 5
    assert outcomes == {"opened", "fenced"}


def collector(writer: Writer) -> Collector:
    return Collector(writer, policy=KeepLast(n=1) | KeepNamed(), grace=NOW)


def check_collected(scene: Scene) -> None:
    """What counts reads exactly with all it needs, and includes the newest acknowledged one."""
    versions = scene.clean.versions()
    assert versions[-1] == scene.acknowledged[-1].version
    by_version = {manifest.version: manifest for manifest in scene.acknowledged}
    for version in versions:
        for manifest in scene.clean.chain(version):
            check_content(scene.clean, by_version[manifest.version])
    assert verify(scene.clean).ok


def test_gc_runs_at_any_point_of_a_save() -> None:
    """Also when the save builds on a version that retention would let go."""

    def act(scene: Scene) -> None:
        scene.save(scene.first, needs=[VersionId(2, 1)])

    def interrupt(scene: Scene) -> None:
        collector(scene.first).collect()

    assert at_every_operation(act, interrupt, check_collected) >= 3


def test_a_save_runs_at_any_point_of_gc() -> None:
    """A save that builds on a version that gc is about to remove fails, or the version stays."""
    outcomes = set()

    def act(scene: Scene) -> None:
        collector(scene.first).collect()

    def interrupt(scene: Scene) -> None:
        try:
            scene.save(scene.first, needs=[VersionId(1, 1)])
            outcomes.add("held")
        except NoVersionError:
            outcomes.add("refused")
            scene.save(scene.first, needs=[VersionId(3, 1)])

    def check(scene: Scene) -> None:
        check_collected(scene)
        collector(scene.first).collect()
        check_collected(scene)

    assert at_every_operation(act, interrupt, check) >= 15
    assert outcomes == {"held", "refused"}


@pytest.mark.parametrize("keep", ["pin", "tag"])
def test_a_reader_holds_a_version_at_any_point_of_gc(keep: str) -> None:
    """Either the reader hears that the version goes, or gc spares it."""
    outcomes = set()

    def act(scene: Scene) -> None:
        collector(scene.first).collect()

    def interrupt(scene: Scene) -> None:
        try:
            if keep == "pin":
                Pin(scene.clean, VersionId(2, 1))
            else:
                scene.clean.tag("best", VersionId(2, 1))
            scene.held = VersionId(2, 1)
            outcomes.add("held")
        except NoVersionError:
            outcomes.add("refused")

    def check(scene: Scene) -> None:
        if scene.held:
            assert scene.held in scene.clean.versions()
        check_collected(scene)
        for _ in range(2):
            collector(scene.first).collect()
            check_collected(scene)
        expected = [1, 2, 3] if scene.held else [3]
        assert [v.number for v in scene.clean.versions()] == expected
        assert list(scene.memory.list("condemned")) == []

    assert at_every_operation(act, interrupt, check) >= 15
    assert outcomes == {"held", "refused"}


def test_gc_runs_at_any_point_of_a_pinned_read() -> None:
    outcomes = set()

    def act(scene: Scene) -> None:
        try:
            with Pin(scene.repository, VersionId(2, 1)) as pin:
                for manifest in scene.repository.chain(pin.version):
                    check_content(scene.repository, manifest)
            outcomes.add("read")
        except NoVersionError:
            outcomes.add("refused")

    def interrupt(scene: Scene) -> None:
        collector(scene.first).collect()

    assert at_every_operation(act, interrupt, check_collected) >= 8
    assert outcomes == {"read", "refused"}


def test_a_fenced_gc_deletes_nothing_of_its_successor() -> None:
    """The successor opens and saves at any point of the old writer's gc."""
    windows = []

    def act(scene: Scene) -> None:
        try:
            collector(scene.first).collect()
        except FencedError:
            return

    def interrupt(scene: Scene) -> None:
        new = Writer.open(scene.clean)
        scene.save(new, needs=[scene.acknowledged[2].version])
        scene.draft = new.begin()
        scene.draft.add(b"in progress", kind="rows", suffix="bin")
        scene.present = stored(scene)

    def check(scene: Scene) -> None:
        if scene.draft is not None:
            windows.append(not scene.present <= stored(scene))
            manifest = scene.draft.commit(step=9)
            assert scene.clean.latest() == manifest.version
            assert scene.clean.read(manifest.files[0]) == b"in progress"
            for needed in scene.acknowledged[2:]:
                check_content(scene.clean, needed)
            assert verify(scene.clean).ok

    assert at_every_operation(act, interrupt, check) >= 15
    # Right before each of its two deletions it asks; only in between is there no way to know.
    assert sum(windows) == 2


def test_a_replaced_gc_is_fenced_also_when_its_newest_version_is_gone() -> None:
    """The successor goes on, and its own gc removes what the old process saved last."""
    outcomes = set()

    def act(scene: Scene) -> None:
        try:
            collector(scene.first).collect()
            outcomes.add("collected")
        except FencedError:
            outcomes.add("fenced")

    def interrupt(scene: Scene) -> None:
        new = Writer.open(scene.clean)
        scene.save(new)
        collector(new).collect()

    assert at_every_operation(act, interrupt, check_collected) >= 15
    assert outcomes == {"collected", "fenced"}


def test_a_commit_in_doubt_is_not_repeated_under_a_name_that_was_freed() -> None:
    """It took place; the successor went on from it, and its gc has removed it since. The manifest
    would come back without its files."""
    scene = Scene()
    first = scene.store.count + 2  # the manifest, after two data files
    scene.store.faults = {first: Fault.LOSE, first + 1: Fault.FAIL, first + 2: Fault.FAIL}
    with pytest.raises(StorageError, match="not known yet"):
        save(scene.first, 40)
    new = Writer.open(scene.clean)
    assert new.newest == VersionId(4, 1)
    last = save(new, 50)
    collector(new).collect()
    with pytest.raises(FencedError):
        scene.first.settle()
    assert scene.clean.versions() == (last.version,)
    assert verify(scene.clean).ok


def test_a_commit_is_not_repeated_at_once_under_a_name_that_was_freed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer is lost after a long sleep, in which a successor took over and gc removed it."""
    scene = Scene()
    put, taken_over = scene.store.put_if_absent, list[VersionId]()

    def slept(name: str, data: Any) -> bool:
        created = put(name, data)
        if not taken_over:
            new = Writer.open(scene.clean)
            taken_over.append(save(new, 50).version)
            collector(new).collect()
            raise StorageError("the answer was lost")
        return created

    monkeypatch.setattr(scene.store, "put_if_absent", slept)
    with pytest.raises(FencedError):
        save(scene.first, 40)
    assert scene.clean.versions() == tuple(taken_over)
    assert VersionId(4, 1).manifest_name not in stored(scene)
    assert verify(scene.clean).ok


def stored(scene: Scene) -> set[str]:
    return {info.name for prefix in ("versions", "data") for info in scene.memory.list(prefix)}


def test_gc_in_a_loop_beside_a_saver_and_a_reader() -> None:
    scene = Scene()
    writer, rounds = scene.first, 120
    saved = threading.Event()
    failures: list[BaseException] = []
    reads = [0]

    def guarded(action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                action()
            except BaseException as failure:
                failures.append(failure)
                saved.set()

        return run

    def saver() -> None:
        for index in range(rounds):
            chained = index % 4 and writer.newest
            scene.save(writer, needs=[writer.newest] if chained else None)
        saved.set()

    def sweeper() -> None:
        gc = collector(writer)
        while not saved.is_set():
            gc.collect()

    def reader() -> None:
        repository = Repository.open(scene.memory)
        while not saved.is_set() or not reads[0]:
            try:
                pin = Pin(repository)
            except NoVersionError:
                continue  # removed between looking it up and pinning it: look again
            with pin:
                for manifest in repository.chain(pin.version):
                    check_content(repository, manifest)
                reads[0] += 1

    threads = [threading.Thread(target=guarded(action)) for action in (saver, sweeper, reader)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert reads[0] > 0
    collector(writer).collect()
    check_collected(scene)
    needed = scene.clean.chain(scene.acknowledged[-1].version)
    assert list(scene.clean.versions()) == [manifest.version for manifest in needed]


def grid() -> Repository:
    world = World(7, Grid(ratio=0.1))
    for _ in range(3):
        world.train()
        world.save()
        world.extract()
    return world.repository


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        pytest.param(lambda: Scene().clean, (2, 2), id="chain, one version"),
        pytest.param(lambda: Scene().clean, (2, 1), id="chain", marks=pytest.mark.soak),
        pytest.param(grid, (2, 2), id="grid, one version", marks=pytest.mark.soak),
        pytest.param(grid, (2, 1), id="grid"),
    ],
)
def test_of_two_forks_to_one_root_one_is_acknowledged(
    numbers: tuple[int, int], make: Callable[[], Repository]
) -> None:
    source = make()

    def contents(store: BlobStore) -> dict[str, bytes]:
        return {i.name: store.get(i.name) for i in store.list() if not i.name.startswith("probes")}

    def run(stints: tuple[tuple[int, int], ...]) -> list[int]:
        target = MemoryStore()
        acknowledged: list[tuple[int, dict[str, bytes]]] = []

        def forking(number: int) -> Callable[[BlobStore], None]:
            def act(store: BlobStore) -> None:
                fork(source, number, store)
                acknowledged.append((number, contents(target)))

            return act

        # Stopped right before it puts something: what it knows by then may be long past.
        outcomes = Interleaving(
            target,
            [forking(number) for number in numbers],
            stints,
            counts=lambda method, name: method.startswith("put") and not name.startswith("probes"),
        ).run()
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        assert [type(error) for error in errors] == [ConfigError], stints
        ((number, before),) = acknowledged
        after = contents(target)
        assert {name: after[name] for name in before} == before, stints
        copy = Repository.open(target)
        assert copy.versions()[-1].number == number, stints
        assert verify(copy).ok, stints
        save(Writer.open(copy), 9)
        assert verify(copy).ok, stints
        return [outcome.operations for outcome in outcomes]

    most = max(*run(((0, 2**31),)), *run(((1, 2**31),)))
    for stints in schedules([most, most], preemptions=2):
        run(stints)


def test_a_root_that_was_chosen_for_another_fork_says_so() -> None:
    source, target = Scene().clean, MemoryStore()

    def full(_: int, __: str, name: str) -> None:
        if name.startswith("versions/"):
            raise StorageError("no room")

    with pytest.raises(StorageError, match="no room"):
        fork(source, 2, FaultStore(target, before=full))
    with pytest.raises(ConfigError, match=r"fork of version 2-1 of .* repeat that one, or fork to"):
        fork(source, 3, target)
    assert verify(fork(source, 2, target)).ok

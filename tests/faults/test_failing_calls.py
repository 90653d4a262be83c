"""Every single system call of a local root fails: once, or from then on, with every usual error.

An error is not absence. Whatever fails while a repository is listed, opened, saved to, collected or
restored, one of our errors says so to the caller; once the disk is well again, every version is
there that retention keeps, none of them an orphan, and the next process goes on from them.
"""

from __future__ import annotations

import ast
import errno
import inspect
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from emberkeep.blobs import Disk, LocalStore, MemoryStore, local_store
from emberkeep.checkpoint import Checkpointer
from emberkeep.errors import EmberkeepError, MissingObjectError, StorageError
from emberkeep.repository import (
    Collector,
    KeepLast,
    KeepNamed,
    Manifest,
    Pin,
    Repository,
    Writer,
    verify,
)
from emberkeep.testing import FaultyDisk, RecordingDisk, power_cut
from emberkeep.testing.contracts import check_content, save
from tests.contracts.engine import assert_same_bits
from tests.unit.repositories import Run

CODES = [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EMFILE, errno.EACCES, errno.EINTR]
POLICY = KeepLast(n=1) | KeepNamed()


class Unsynced(Disk):
    """No power is cut here, so nothing needs to reach the medium."""

    def sync(self, handle: int) -> None:
        pass


@dataclass
class Case:
    """One root in the state of the story, on a disk that can be made to fail."""

    store: LocalStore
    disk: FaultyDisk
    committed: list[Manifest]

    def writer(self) -> Writer:
        return Writer.open(Repository.open(self.store))


Action = Callable[[], object]


def listing(case: Case) -> Action:
    names = {info.name for info in case.store.list()}

    def act() -> None:
        assert {info.name for info in case.store.list()} == names

    return act


def resuming(case: Case) -> Action:
    """What a keeper does: opens what is there, or creates it; then the newest version."""

    def act() -> None:
        if Repository.exists(case.store):
            repository = Repository.open(case.store)
        else:
            repository = Repository.create(case.store, schema={})
        assert repository.latest() == case.committed[-1].version
        assert Writer.open(repository).newest == case.committed[-1].version

    return act


def saving(case: Case) -> Action:
    writer = case.writer()

    def act() -> None:
        writer.settle()
        case.committed.append(save(writer, 6, needs=[case.committed[0].version]))

    return act


def collecting(case: Case) -> Action:
    return Collector(case.writer(), policy=POLICY, grace=timedelta(0)).collect


def restoring(case: Case) -> Action:
    repository = Repository.open(case.store)

    def act() -> None:
        with Pin(repository) as pin:
            assert pin.version == case.committed[-1].version
            for manifest in repository.chain(pin.version):
                check_content(repository, manifest)
        repository.record_restore(pin.version)

    return act


OPERATIONS = [listing, resuming, saving, collecting, restoring]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Manifest]]:
    """Two epochs, a tag, a pin, a mark of a gc that died, files of a save that died."""
    root = tmp_path_factory.mktemp("story")
    store = LocalStore(root, disk=Unsynced())
    repository = Repository.create(store, schema={})
    writer = Writer.open(repository)
    committed = [save(writer, step) for step in (1, 2, 3)]
    writer = Writer.open(repository)
    committed += [save(writer, 4), save(writer, 5, needs=[committed[1].version])]
    repository.tag("best", 1)
    Pin(repository, 3)
    writer.begin().add(b"never committed", kind="rows", suffix="bin")
    leftover = root / ".incomplete" / "4711-0123456789abcdef"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))
    return root, committed


def linked(source: Path, target: Path) -> Path:
    """A copy that costs no bytes: objects are never changed in place."""
    for directory, _, files in os.walk(source):
        below = target / os.path.relpath(directory, source)
        below.mkdir()
        for file in files:
            os.link(os.path.join(directory, file), below / file)
    return target


def begin(
    operation: Callable[[Case], Action], root: Path, committed: list[Manifest]
) -> tuple[Case, Action]:
    disk = FaultyDisk(Unsynced())
    case = Case(LocalStore(root, disk=disk), disk, list(committed))
    return case, operation(case)


def check_kept(case: Case, detail: object) -> None:
    """A later process, on a disk that is well: all that retention keeps is there, and goes on."""
    repository = Repository.open(LocalStore(case.store._root, disk=Unsynced()))
    standing = repository.versions()
    for manifest in (case.committed[0], case.committed[1], case.committed[2], case.committed[-1]):
        assert manifest.version in standing, detail
        check_content(repository, manifest)
    assert repository.tags() == {"best": case.committed[0].version}
    writer = Writer.open(repository)
    latest = save(writer, 7, needs=[case.committed[-1].version])
    assert repository.versions() == (*standing, latest.version), detail
    assert verify(repository, deep=False).ok, detail


def check_operation(
    root: Path,
    committed: list[Manifest],
    target: Path,
    operation: Callable[[Case], Action],
    codes: Callable[[str], Iterable[int]],
) -> int:
    """Fails each call of an operation with each of its codes; how many cases that were."""
    case, act = begin(operation, linked(root, target / "whole"), committed)
    case.disk.heal()
    act()
    calls = list(case.disk.calls)
    assert len(calls) >= 20
    cases = 0
    for at, call in enumerate(calls):
        for code, for_good in itertools.product(codes(call), (False, True)):
            detail = (operation.__name__, at, call, errno.errorcode[code], for_good)
            case, act = begin(operation, linked(root, target / str(cases)), committed)
            case.disk.fail(at, code, for_good=for_good)
            with suppress(EmberkeepError):
                act()
            assert len(case.disk.calls) > at, detail
            case.disk.heal()
            act()  # the same process tries again
            check_kept(case, detail)
            cases += 1
    return cases


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_call_that_fails_loses_anything(
    tmp_path: Path, story: tuple[Path, list[Manifest]], operation: Callable[[Case], Action]
) -> None:
    """Each call fails with one of the errors, the next one of its kind with the next error."""
    turns: Counter[str] = Counter()

    def code(call: str) -> list[int]:
        turns[call] += 1
        return [CODES[turns[call] % len(CODES)]]

    assert check_operation(*story, tmp_path, operation, code) == 2 * turns.total()


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_call_that_fails_with_any_error_loses_anything(
    tmp_path: Path, story: tuple[Path, list[Manifest]], operation: Callable[[Case], Action]
) -> None:
    check_operation(*story, tmp_path, operation, lambda _: CODES)


# -- the store alone -------------------------------------------------------------------------------

CALLS: dict[str, Callable[[LocalStore], object]] = {
    "put": lambda store: store.put("new/a", b"new"),
    "replace": lambda store: store.put("deep/a", b"new"),
    "create": lambda store: store.put_if_absent("new/a", b"new"),
    "taken": lambda store: store.put_if_absent("deep/a", b"new"),
    "get": lambda store: store.get("deep/a"),
    "range": lambda store: store.get_range("deep/a", 1, 2),
    "long range": lambda store: bytes(store.get_range("deep/a", 1, 2**20)),
    "into": lambda store: store.read_into("deep/a", 0, memoryview(bytearray(3))),
    "size": lambda store: store.size("deep/a"),
    "list": lambda store: sorted(info.name for info in store.list()),
    "list below": lambda store: sorted(info.name for info in store.list("deep")),
    "delete": lambda store: store.delete(["deep/a", "deep/b"]),
    "sweep": lambda store: store.sweep(older_than=timedelta(0)),
}
READING = ("get", "range", "long range", "into", "size", "list", "list below")


def small_store(root: Path) -> tuple[LocalStore, FaultyDisk]:
    disk = FaultyDisk(Unsynced())
    for name in ("deep/a", "deep/b", "deep/er/c", "d"):
        LocalStore(root, disk=Unsynced()).put(name, b"before")
    (root / ".incomplete" / "4711-0123456789abcdef").write_bytes(b"half")
    return LocalStore(root, disk=disk), disk


@pytest.mark.parametrize("what", CALLS)
def test_a_store_tells_every_error_and_takes_none_for_absence(tmp_path: Path, what: str) -> None:
    store, disk = small_store(tmp_path / "whole")
    expected = CALLS[what](store)
    calls = list(disk.calls)
    assert calls
    raised = 0
    for at, code, for_good in itertools.product(range(len(calls)), CODES, (False, True)):
        store, disk = small_store(tmp_path / f"{at}-{code}-{for_good}")
        before = {info.name for info in store.list()}
        disk.fail(at, code, for_good=for_good)
        try:
            assert CALLS[what](store) == expected
            # What was read or renamed already is not in doubt, whatever tidying up says.
            assert calls[at] in ("close", "unlink"), calls[at]
        except StorageError as error:
            said = error
            raised += 1
            assert not isinstance(said, MissingObjectError), (calls[at], errno.errorcode[code])
            assert os.strerror(code) in str(said)
        disk.heal()
        after = {info.name for info in store.list()}
        if what in (*READING, "replace", "taken", "sweep"):
            assert after == before
        if what != "delete":
            assert store.get("deep/a") in (b"before", b"new" if what == "replace" else b"before")
    assert raised >= len(CODES)


def test_a_file_where_a_directory_is_needed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "versions").write_bytes(b"in the way")
    store = LocalStore(tmp_path)
    for call in (
        lambda: list(store.list("versions")),
        lambda: store.size("versions/a"),
        lambda: store.get("versions/a"),
        lambda: store.delete(["versions/a"]),
        lambda: list(LocalStore(tmp_path / "versions" / "root").list()),
    ):
        with pytest.raises(StorageError, match="a file stands where a directory") as caught:
            call()
        assert not isinstance(caught.value, MissingObjectError)


def test_a_directory_that_was_taken_away_is_not_an_absent_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a", b"x")
    shutil.rmtree(tmp_path / "root")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(StorageError, match="removed or unmounted") as caught:
            write("a", b"y")
        assert not isinstance(caught.value, MissingObjectError)
    assert not (tmp_path / "root").exists()


def test_a_tree_that_changes_while_it_is_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    names = {f"{directory}/{file}" for directory in "abc" for file in "123"}
    for name in names:
        store.put(name, b"x")
    listed = store.list()
    first = next(listed).name
    gone = next(directory for directory in "abc" if not first.startswith(directory))
    shutil.rmtree(tmp_path / gone)
    others = {info.name for info in listed}
    assert {first, *others} == {name for name in names if not name.startswith(gone)}


def test_what_cannot_be_an_object_is_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("tags/a.json", b"x")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "tags" / ".nfs000000000001").write_bytes(b"")
    (tmp_path / "tags" / "a.json~").write_bytes(b"")
    (tmp_path / "tags" / "dangling").symlink_to(tmp_path / "nothing")
    assert [info.name for info in store.list()] == ["tags/a.json"]


def test_a_deletion_that_is_repeated_is_durable(tmp_path: Path) -> None:
    class Recording(RecordingDisk):
        fails = False

        def sync_directory(self, path: str) -> None:
            if self.fails:
                raise OSError(errno.EIO, "the directory was not synced")
            super().sync_directory(path)

    disk = Recording()
    base, after = tmp_path / "base", tmp_path / "after"
    base.mkdir()
    store = LocalStore(base / "root", disk=disk)
    store.put("a", b"x")
    disk.fails = True
    with pytest.raises(StorageError):
        store.delete(["a"])
    disk.fails = False
    store.delete(["a"])
    power_cut(disk.calls, str(base), str(after))
    assert list(LocalStore(after / "root").list()) == []


def test_every_system_call_goes_through_the_disk() -> None:
    """What does not cannot be failed by the tests above, nor be reported as an error of ours."""
    harmless = {"fspath", "PathLike", "getpid", "strerror", "path", "stat_result"}
    in_path = {"join", "dirname", "abspath", "samestat"}
    tree = ast.parse(inspect.getsource(local_store.LocalStore))
    used = {
        (node.value.attr if isinstance(node.value, ast.Attribute) else "os", node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("os", "os.path")
    }
    assert used <= {("os", name) for name in harmless} | {("path", name) for name in in_path}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "open" not in called


# -- beside training -------------------------------------------------------------------------------


def saved_twice(root: Path) -> tuple[Run, FaultyDisk]:
    disk = FaultyDisk(Unsynced())
    run = Run(layout="grid", store=LocalStore(root, disk=disk))
    run.save()
    run.save()
    run.keeper.settle()
    disk.heal()
    return run, disk


@pytest.mark.filterwarnings("ignore:saving step", "ignore:extraction ended", "ignore:old versions")
def test_threads_survive_whatever_fails_under_them(tmp_path: Path) -> None:
    """Saves and extraction run in threads of their own: an error must not end them, or a caller
    that waits for them waits for ever. Each kind of call fails where it is first used, and all
    after it; and once, where it is last used, which is in extraction or gc."""
    run, disk = saved_twice(tmp_path / "whole")
    run.save()
    run.keeper.settle()
    calls = list(disk.calls)
    first = [(calls.index(call), True) for call in set(calls)]
    last = [(len(calls) - 1 - calls[::-1].index(call), False) for call in set(calls)]
    fresh = Run(store=MemoryStore())
    for turn, (at, for_good) in enumerate(sorted(first + last)):
        run, disk = saved_twice(tmp_path / str(turn))
        disk.fail(at, CODES[turn % len(CODES)], for_good=for_good)
        with suppress(EmberkeepError):
            run.save()
        run.keeper.settle()
        disk.heal()
        run.save()
        run.keeper.close()
        repository = Repository.open(LocalStore(run.store._root, disk=Unsynced()))
        assert {*run.states} <= {version.number for version in repository.versions()}
        assert verify(repository).ok
        later = Checkpointer(repository, fresh.cluster)
        for number, expected in run.states.items():
            later.restore(number)
            for name, (ids, planes) in expected.items():
                found_ids, found = fresh.cluster.read_all(name)
                assert_same_bits(found_ids, ids)
                for plane, values in planes.items():
                    assert_same_bits(found[plane], values)

"""Every single system call of a local root fails: once, or from then on, with every usual error.

An error is not absence. Whatever fails while a repository is listed, opened, saved to, collected or
restored, the caller gets one of our errors; once the disk is well again, every version is
there that retention keeps, none of them an orphan, and the next process goes on from them.
"""

from __future__ import annotations

import ast
import errno
import inspect
import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from emberkeep.blobs import LocalStore, MemoryStore, local_store
from emberkeep.checkpoint import Checkpointer
from emberkeep.errors import EmberkeepError, MissingObjectError, StorageError
from emberkeep.repository import Manifest, Repository, verify
from emberkeep.testing import FaultyDisk, RecordingDisk, power_cut
from tests.contracts.engine import assert_same_bits
from tests.faults import failing_calls
from tests.faults.failing_calls import (
    CODES,
    OPERATIONS,
    TIER_OPERATIONS,
    Action,
    Case,
    Unsynced,
    check_operation,
    checkpointing,
    make_story,
)
from tests.nightly import examples, some
from tests.unit.repositories import Run


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Manifest]]:
    root = tmp_path_factory.mktemp("story")
    return root, make_story(root)


def test_calls_that_fail_lose_nothing_in_repositories_and_tiers() -> None:
    """A sample by seed of all that the soak tries."""
    counts = failing_calls.run(20260726, examples(160))
    print(dict(counts))
    assert min(counts[operation.__name__] for operation in TIER_OPERATIONS) >= 2


def test_a_decision_that_cannot_be_listed_is_one_of_our_errors() -> None:
    with failing_calls.prepared() as operations:
        calls, fail = operations[checkpointing]
        listed = [at for at, call in enumerate(calls) if call == "listdir"]
        assert listed
        for at, code in itertools.product(listed, (errno.EIO, errno.EMFILE)):
            fail(at, code, False)


@pytest.mark.soak
@pytest.mark.parametrize("operation", TIER_OPERATIONS)
def test_no_call_of_a_tier_that_fails_loses_anything(operation: Any) -> None:
    print(operation.__name__, dict(failing_calls.run_all(operation)))


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
    refused = 0
    cases = [
        (at, code, for_good)
        for at, (nth, code) in itertools.product(range(len(calls)), enumerate(CODES))
        for for_good in some((False, True), at + nth, of=2)
    ]
    for at, code, for_good in cases:
        store, disk = small_store(tmp_path / f"{at}-{code}-{for_good}")
        before = {info.name for info in store.list()}
        disk.fail(at, code, for_good=for_good)
        try:
            assert CALLS[what](store) == expected
            # What was read or renamed already is not in doubt, whatever tidying up says; advice
            # that is not taken costs time alone.
            assert calls[at] in ("close", "unlink", "read_no_further"), calls[at]
        except StorageError as error:
            said = error
            refused += 1
            assert not isinstance(said, MissingObjectError), (calls[at], errno.errorcode[code])
            assert os.strerror(code) in str(said)
        disk.heal()
        after = {info.name for info in store.list()}
        if what in (*READING, "replace", "taken", "sweep"):
            assert after == before
        if what != "delete":
            assert store.get("deep/a") in (b"before", b"new" if what == "replace" else b"before")
    assert refused >= len(CODES)


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
    """What does not cannot be failed by the tests above, nor come out as an error of ours."""
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
    waits for them for ever. Each kind of call fails where it is first used, and all after
    it; and once, where it is last used, which is in extraction or gc."""
    run, disk = saved_twice(tmp_path / "whole")
    run.save()
    run.keeper.settle()
    calls = list(disk.calls)
    first = [(calls.index(call), True) for call in set(calls)]
    last = [(len(calls) - 1 - calls[::-1].index(call), False) for call in set(calls)]
    fresh = Run(store=MemoryStore())
    for turn, (at, for_good) in enumerate(some(sorted(first + last))):
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

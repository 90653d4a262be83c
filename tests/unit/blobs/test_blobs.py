"""The contract of stores over every backend, and what is particular to each."""

from __future__ import annotations

import errno
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import obstore.store
import pytest

from emberkeep.blobs import Disk, LocalStore, MemoryStore, ObjectStore, open_store
from emberkeep.blobs.wrapper import ExclusiveStore, OverlayStore
from emberkeep.errors import ConfigError, MissingObjectError, StorageError, UnsupportedStoreError
from emberkeep.repository import Repository, Writer
from emberkeep.testing import RepositoryContract, StoreContract
from emberkeep.testing.contracts import check_content, save
from emberkeep.testing.virtual_clock import VirtualClock

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


class TestMemoryStore(StoreContract, RepositoryContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


class TestLocalStore(StoreContract, RepositoryContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "not" / "yet")


class WithoutLinks(Disk):
    """A file system such as exFAT: no hard links."""

    def link(self, source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no hard links here", target)


@pytest.mark.skipif(sys.platform != "linux", reason="the exclusive rename is a call of Linux")
class TestLocalStoreWithoutLinks(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path, disk=WithoutLinks())


class TestObjectStoreInMemory(StoreContract, RepositoryContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return ObjectStore(obstore.store.MemoryStore(), url="memory")


class TestObjectStoreOnDisk(StoreContract):
    """Another backend of obstore's, which answers absent names with errors of its own."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return ObjectStore(obstore.store.LocalStore(tmp_path), url="file")


class TestExclusiveStore(StoreContract):
    @pytest.fixture
    def store(self) -> ExclusiveStore:
        return ExclusiveStore(MemoryStore())

    test_of_many_creators_one_wins = None  # exactly what it cannot promise


class TestOverlayStore(StoreContract, RepositoryContract):
    @pytest.fixture
    def store(self) -> OverlayStore:
        return OverlayStore(MemoryStore())


def test_an_overlay_leaves_the_store_below_as_it_is() -> None:
    below = MemoryStore()
    for name in "abc":
        below.put(name, b"below")
    over = OverlayStore(below)
    over.put("a", b"over")
    over.delete(["b"])
    assert not over.put_if_absent("c", b"over")
    assert over.put_if_absent("b", b"again")
    over.delete(["c"])
    assert over.put("d", b"new") == 3
    assert {info.name: over.get(info.name) for info in over.list()} == {
        "a": b"over", "b": b"again", "d": b"new",
    }  # fmt: skip
    with pytest.raises(MissingObjectError):
        over.size("c")
    assert {info.name: below.get(info.name) for info in below.list()} == dict.fromkeys(
        "abc", b"below"
    )


def test_an_unreachable_endpoint_is_a_storage_error() -> None:
    store = open_store(
        "s3://bucket/run",
        endpoint="http://127.0.0.1:9",
        allow_http=True,
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
        deadline=timedelta(seconds=0.2),
    )
    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", b"x"),
        lambda: store.put_if_absent("a", b"x"),
        lambda: list(store.list("a")),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StorageError, match="check the network") as caught:
            call()
        assert SECRET not in str(caught.value)


def test_errors_of_the_system_come_out_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets and files below obstore fail as any others do."""
    store = ObjectStore(obstore.store.MemoryStore(), url="memory")
    for method, call in {
        "put": lambda: store.put("a", b"x"),
        "get": lambda: store.get("a"),
        "get_range": lambda: store.get_range("a", 0, 1),
        "head": lambda: store.size("a"),
        "list": lambda: list(store.list("a")),
        "delete": lambda: store.delete(["a"]),
    }.items():
        for code in (errno.EMFILE, errno.ECONNRESET, errno.EIO):

            def fail(*_: object, code: int = code, **__: object) -> None:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as patched:
                patched.setattr(obstore, method, fail)
                with pytest.raises(StorageError, match=os.strerror(code)) as caught:
                    call()
            assert type(caught.value) is StorageError


def test_lost_answers_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real_put, failures = obstore.put, [2]

    def flaky(*args: object, **kwargs: object) -> object:
        if failures[0]:
            failures[0] -= 1
            raise obstore.exceptions.GenericError("operation timed out")
        return real_put(*args, **kwargs)

    monkeypatch.setattr(obstore, "put", flaky)
    clock = VirtualClock()
    store = ObjectStore(obstore.store.MemoryStore(), url="memory", clock=clock)
    store.put("a", b"x")
    assert clock.monotonic() == pytest.approx(0.2 + 0.4)
    failures[0] = 1
    assert store.put_if_absent("b", b"y") is True
    # A stream cannot be rewound: its failure is the caller's.
    failures[0] = 1
    with pytest.raises(StorageError):
        store.put("c", iter([bytes(9 << 20)]))
    assert {info.name for info in store.list()} == {"a", "b"}
    # A store that stays silent is given up when another pause would end after the deadline.
    failures[0], start = 1000, clock.monotonic()
    with pytest.raises(StorageError, match="timed out"):
        store.put("d", b"z")
    assert 60 < clock.monotonic() - start <= 120


def test_exclusive_changes_nothing_on_a_capable_store() -> None:
    assert not Repository.create(MemoryStore(), schema={}, exclusive=True).exclusive


class Failing(Disk):
    """Fails one kind of call with one error."""

    def __init__(self, call: str, code: int) -> None:
        self.armed = False

        def fail(*args: object) -> None:
            if self.armed:
                raise OSError(code, os.strerror(code))
            return getattr(Disk, call)(self, *args)

        setattr(self, call, fail)


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "link"])
@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "disk is full"), (errno.EIO, "I/O error")]
)
def test_a_failing_disk_leaves_no_partial_object(
    tmp_path: Path, call: str, code: int, remedy: str
) -> None:
    disk = Failing(call, code)
    store = LocalStore(tmp_path, disk=disk)
    store.put("data/a", b"before")
    disk.armed = True
    if call != "link":
        with pytest.raises(StorageError, match=remedy):
            store.put("data/a", iter([b"after", b"wards"]))
    if call != "rename":
        with pytest.raises(StorageError, match=remedy):
            store.put_if_absent("data/b", b"new")
    disk.armed = False
    assert [info.name for info in store.list()] == ["data/a"]
    assert store.get("data/a") == b"before"
    assert list((tmp_path / ".incomplete").iterdir()) == []


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_what_cannot_be_made_durable_is_not_acknowledged(tmp_path: Path, method: str) -> None:
    disk = Failing("sync_directory", errno.EIO)
    store = LocalStore(tmp_path, disk=disk)
    store.put("data/a", b"x")
    disk.armed = True
    with pytest.raises(StorageError, match="I/O error"):
        getattr(store, method)("data/b", b"new")
    # The name is taken, but that is not durable either: no caller may hear that it is.
    with pytest.raises(StorageError, match="I/O error"):
        store.put_if_absent("data/b", b"other")
    disk.armed = False
    assert store.put_if_absent("data/b", b"other") is False


class Bare(WithoutLinks):
    def rename_new(self, source: str, target: str) -> None:
        raise OSError(errno.EINVAL, "no exclusive rename either", target)


def test_a_file_system_that_cannot_decide_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, disk=Bare())
    with pytest.raises(UnsupportedStoreError, match="another file system"):
        store.put_if_absent("a", b"x")
    with pytest.raises(UnsupportedStoreError):
        Repository.create(store, schema={})
    repository = Repository.create(store, schema={}, exclusive=True)
    check_content(repository, save(Writer.open(repository), 1))


def test_leftovers_of_dead_processes_are_swept(tmp_path: Path) -> None:
    clock = VirtualClock(datetime.now(timezone.utc))  # files have the system's times
    store = LocalStore(tmp_path, clock=clock)
    store.put("a", b"x")
    leftover = tmp_path / ".incomplete" / "4711-0123456789abcdef"
    leftover.write_bytes(b"half")
    assert [info.name for info in store.list()] == ["a"]
    assert store.sweep(older_than=timedelta(hours=1)) == 0
    clock.advance(timedelta(minutes=61))
    assert store.sweep(older_than=timedelta(hours=1)) == 1
    assert not leftover.exists()


def test_local_errors_name_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StorageError, match="a file stands where a directory is needed"):
        store.put("a", b"x")
    with pytest.raises(MissingObjectError, match="holds no object b"):
        LocalStore(tmp_path).get("b")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError):
        LocalStore(tmp_path).get("directory")


def test_open_store_by_path_and_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store("here").put("a", b"x")
    assert open_store(tmp_path / "here").get("a") == b"x"
    assert open_store(f"file://{tmp_path}/here").get("a") == b"x"
    assert open_store(tmp_path / "here").url == f"file://{tmp_path}/here"
    open_store("memory://shared").put("a", b"y")
    assert open_store("memory://shared").get("a") == b"y"
    assert open_store("s3://bucket/run", region="us-east-1").url == "s3://bucket/run"
    for bad, message in (
        ("ftp://host/x", "unknown scheme 'ftp'"),
        ("file://host/x", "three slashes"),
        ("s3://bucket/x?no_such_key=1", "check the URL"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_store(bad)
    with pytest.raises(ConfigError, match="takes no options"):
        open_store("here", region="x")

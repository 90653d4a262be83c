"""Large objects go past the page cache, byte for byte, wherever the file system lets them."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from emberkeep.blobs import Part, direct_file, file_reads, local_store, read_parts
from emberkeep.blobs.file_reads import has_queue
from emberkeep.blobs.local_store import LocalStore
from emberkeep.blobs.system_disk import BLOCK_NBYTES, Disk
from emberkeep.errors import FullError, MissingObjectError, StorageError
from emberkeep.kernels import block_reads, log_reads
from emberkeep.runtime.memory import recycled
from emberkeep.testing.disk import FaultyDisk

BUFFER_NBYTES = 4 * BLOCK_NBYTES
LENGTHS = [
    buffers * BUFFER_NBYTES + blocks * BLOCK_NBYTES + more
    for buffers in (0, 1, 2) for blocks in (0, 1) for more in (0, 1, BLOCK_NBYTES - 1)
]  # fmt: skip


class Counting(Disk):
    """Tells how many bytes were written past the page cache."""

    def __init__(self) -> None:
        self.direct: set[int] = set()
        self.direct_nbytes = 0

    def set_direct(self, handle: int, on: bool) -> bool:
        """As if every file system could, so that the test does not depend on this one."""
        (self.direct.add if on else self.direct.discard)(handle)
        return on

    def write(self, handle: int, view: memoryview) -> None:
        if handle in self.direct:
            address = np.frombuffer(view, np.uint8).ctypes.data
            offset = os.lseek(handle, 0, os.SEEK_CUR)
            assert not [n for n in (address, offset, len(view)) if n % BLOCK_NBYTES]
            self.direct_nbytes += len(view)
        super().write(handle, view)

    def is_cached(self, handle: int, offset: int) -> bool:
        return False

    def read_blocks(self, handle: int, view: memoryview, offset: int, nbytes: int) -> int:
        if handle in self.direct:
            address = np.frombuffer(view, np.uint8).ctypes.data
            assert not [n for n in (address, offset, len(view)) if n % BLOCK_NBYTES]
            self.direct_nbytes += nbytes
        return super().read_blocks(handle, view, offset, nbytes)


class Cached(Counting):
    """A file system whose files are always in the page cache."""

    def set_direct(self, handle: int, on: bool) -> bool:
        return False


class Refusing(Counting):
    """One that takes the flag, and then no write."""

    def write(self, handle: int, view: memoryview) -> None:
        if handle in self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().write(handle, view)

    def read_blocks(self, handle: int, view: memoryview, offset: int, nbytes: int) -> int:
        if handle in self.direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().read_blocks(handle, view, offset, nbytes)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "BUFFER_NBYTES", BUFFER_NBYTES)
    monkeypatch.setattr(local_store, "_LONG_NBYTES", 1)


@pytest.fixture
def says_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file system said what it has in memory."""
    monkeypatch.setattr(Disk, "says_cached", lambda *_: False)


def pieces_of(data: bytes, *lengths: int) -> list[bytes]:
    pieces = []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return [*pieces, data]


@pytest.mark.parametrize("kind", [Disk, Counting, Cached, Refusing])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_what_is_put_is_there(tmp_path: Path, kind: type[Disk], nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    disk = kind()
    store = LocalStore(tmp_path, disk=disk)
    for pieces in ([data], pieces_of(data, 1, 5000, BUFFER_NBYTES)):
        assert store.put("object", pieces) == nbytes
        assert store.get("object") == data
    if isinstance(disk, Counting):
        wanted = type(disk) is Counting and nbytes >= BUFFER_NBYTES
        assert disk.direct_nbytes == 2 * (nbytes // BLOCK_NBYTES * BLOCK_NBYTES if wanted else 0)


@pytest.mark.parametrize("kind", [Disk, Counting, Cached, Refusing])
@pytest.mark.parametrize("nbytes", [1, BLOCK_NBYTES, 3 * BLOCK_NBYTES + 5])
def test_every_range_is_read(tmp_path: Path, kind: type[Disk], nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    disk = kind()
    store = LocalStore(tmp_path, disk=disk)
    store.put("object", data)
    if isinstance(disk, Counting):
        disk.direct_nbytes = 0
    ends = [0, 1, 7, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, nbytes - 1, nbytes, 2**20]
    for start in ends:
        for length in ends:
            expected = data[start : start + length]
            assert bytes(store.get_range("object", start, length)) == expected
            into = memoryview(bytearray(length))
            assert store.read_into("object", start, into) == len(expected)
            assert into[: len(expected)] == expected
    if isinstance(disk, Counting):
        assert (disk.direct_nbytes > 0) == (type(disk) is Counting)


@pytest.mark.parametrize("kind", [Disk, Counting, Cached, Refusing])
def test_whole_blocks_are_read_straight_into_memory_of_whole_blocks(
    tmp_path: Path, kind: type[Disk]
) -> None:
    nbytes = 5 * BLOCK_NBYTES + 7
    data = np.random.default_rng(0).bytes(nbytes)
    disk = kind()
    store = LocalStore(tmp_path, disk=disk)
    store.put("object", data)
    if isinstance(disk, Counting):
        disk.direct_nbytes = 0
    area = recycled(8 * BLOCK_NBYTES)
    for first, blocks in ((0, 2), (1, 4), (3, 8), (5, 1), (6, 1)):
        start, into = first * BLOCK_NBYTES, area[: blocks * BLOCK_NBYTES]
        expected = data[start : start + len(into)]
        assert store.read_into("object", start, into) == len(expected)
        assert into[: len(expected)] == expected
    if isinstance(disk, Counting):
        assert (disk.direct_nbytes > 0) == (type(disk) is Counting)


@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_parts_of_files_are_read_as_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: bool, cached: bool
) -> None:
    class Opening(Disk):
        opened = 0

        def open_to_read(self, path: str) -> int:
            self.opened += 1
            return super().open_to_read(path)

    monkeypatch.setattr(local_store, "has_queue", lambda: queue and has_queue())
    disk = Opening()
    store = LocalStore(tmp_path, disk=disk)
    sizes = {"one": 9 * BLOCK_NBYTES + 7, "other": 5 * BLOCK_NBYTES, "short": 3}
    objects = {name: np.random.default_rng(0).bytes(nbytes) for name, nbytes in sizes.items()}
    for name, data in objects.items():
        store.put(name, data)
        with (tmp_path / name).open("rb") as file:
            if cached or not hasattr(os, "posix_fadvise"):
                assert file.read() == data
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    area = recycled(40 * BLOCK_NBYTES)
    places = [
        ("one", 0, 1), ("one", 2, 2), ("one", 9, 1), ("one", 12, 1), ("other", 1, 2),
        ("other", 3, 4), ("short", 0, 8), ("other", 5, 1),
    ]  # fmt: skip
    parts, begin = [], 0
    for name, first, blocks in places:
        end = begin + blocks * BLOCK_NBYTES
        parts.append(Part(name, first * BLOCK_NBYTES, area[begin:end]))
        begin = end
    parts.insert(1, Part("one", 5, memoryview(bytearray(100))))
    parts.append(Part("one", sizes["one"] + 1, memoryview(bytearray(3))))
    expected = [objects[name][start : start + len(into)] for name, start, into in parts]
    assert read_parts(store, parts) == [len(data) for data in expected]
    for part, data in zip(parts, expected, strict=True):
        assert part.into[: len(data)] == data
    if not queue:
        assert disk.opened == 5  # once for parts of a file that stand together
    with pytest.raises(MissingObjectError, match="nothing"):
        read_parts(store, [*parts, Part("nothing", 0, area[:BLOCK_NBYTES])])


def test_more_reads_than_a_queue_holds_from_more_files_than_are_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reads, "_OPEN_IN_CALL", 300)
    monkeypatch.setattr(file_reads, "_OPEN", 300)
    store, blocks = LocalStore(tmp_path), 400
    area = recycled(2 * blocks * BLOCK_NBYTES)
    parts, expected = [], []
    for name in ("a", "b"):
        data = np.random.default_rng(ord(name)).bytes(blocks * BLOCK_NBYTES)
        store.put(name, data)
        with (tmp_path / name).open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for at in range(0, blocks * BLOCK_NBYTES, BLOCK_NBYTES):
            begin = len(parts) * BLOCK_NBYTES
            parts.append(Part(name, at, area[begin : begin + BLOCK_NBYTES]))
        expected.append(data)
    assert read_parts(store, parts) == [BLOCK_NBYTES] * len(parts)
    assert bytes(area) == b"".join(expected)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system lists no open files")
def test_reads_of_cached_blocks_leave_nothing_open_and_close_nothing_else(tmp_path: Path) -> None:
    """A byte is read to see whether a block is cached. Where that byte goes must still be there:
    it went to memory that had become the list of open files."""
    store = LocalStore(tmp_path)
    for first in range(256):
        store.put(f"object-{first}", bytes([first]) * BLOCK_NBYTES)
    area = recycled(BLOCK_NBYTES)
    read_parts(store, [Part("object-0", 0, area)])
    before = sorted(os.listdir("/proc/self/fd"))
    for first in range(256):
        assert (tmp_path / f"object-{first}").read_bytes()  # to the cache
        assert read_parts(store, [Part(f"object-{first}", 0, area)]) == [BLOCK_NBYTES]
        assert area == bytes([first]) * BLOCK_NBYTES
    assert sorted(os.listdir("/proc/self/fd")) == before


def put_blocks(store: LocalStore, count: int) -> list[Part]:
    """A part for each of so many files of one block."""
    area = recycled(count * BLOCK_NBYTES)
    for n in range(count):
        store.put(f"f{n}", bytes([n % 251]) * BLOCK_NBYTES)
    return [Part(f"f{n}", 0, area[n * BLOCK_NBYTES : (n + 1) * BLOCK_NBYTES]) for n in range(count)]


@pytest.mark.skipif(not has_queue(), reason="the system has no such reads")
def test_a_file_system_without_direct_reads_is_not_read_by_one_thread_alone(
    tmp_path: Path, says_cached: None
) -> None:
    class Refused(Disk):
        def read_files(self, parts: Sequence[tuple[str, int, memoryview]]) -> list[int]:
            # Nothing in /proc can be read past the page cache: the system itself says so.
            return file_reads.read_files([("/proc/self/maps", 0, into) for *_, into in parts])

    store, other = LocalStore(tmp_path, disk=Refused()), LocalStore(tmp_path)
    parts = put_blocks(store, 3)
    for each in (store, other):
        assert each.reads_together
        assert each.read_parts(parts) == [BLOCK_NBYTES] * 3
        assert [bytes(part.into[:1]) for part in parts] == [b"\0", b"\1", b"\2"]
    assert not store.reads_together
    assert other.reads_together


@pytest.mark.skipif(not has_queue(), reason="the system has no such reads")
def test_files_that_calls_have_open_together_are_few(
    tmp_path: Path, says_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have a thousand open, and others of its threads need some."""
    calls, files = 24, 130
    lengths: list[int] = []
    waiting, changed = 0, threading.Condition()

    def read(*arguments: object) -> None:
        nonlocal waiting
        with changed:
            if waiting < calls:  # the first read of each call: all of them are under way at once
                waiting += 1
                lengths.append(np.asarray(arguments[2]).size)
                changed.notify_all()
                assert changed.wait_for(lambda: waiting == calls, timeout=30)

    store = LocalStore(tmp_path)
    parts = put_blocks(store, files)
    monkeypatch.setattr(block_reads, "read_files", read)
    with ThreadPoolExecutor(calls) as pool:
        for found in [pool.submit(store.read_parts, parts) for _ in range(calls)]:
            assert found.result() == [BLOCK_NBYTES] * files
    assert max(lengths) == 128
    assert sum(lengths) < 1000


@pytest.mark.skipif(not has_queue(), reason="the system has no such reads")
def test_a_queue_that_could_not_be_made_is_not_used_again(
    tmp_path: Path, says_cached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    parts = put_blocks(store, 2)
    monkeypatch.setattr(file_reads, "_idle", {})
    with monkeypatch.context() as patch:
        patch.setattr(log_reads, "open_queue", lambda *_: -1)
        assert store.read_parts(parts) == [BLOCK_NBYTES] * 2
    assert store.read_parts(parts) == [BLOCK_NBYTES] * 2
    [[queue]] = file_reads._idle.values()
    assert queue.works


def test_a_read_of_parts_that_fails_says_why(tmp_path: Path, says_cached: None) -> None:
    disk = FaultyDisk()
    store = LocalStore(tmp_path, disk=disk)
    store.put("object", bytes(4 * BLOCK_NBYTES))
    area = recycled(2 * BLOCK_NBYTES)
    parts = [Part("object", at, area[at : at + BLOCK_NBYTES]) for at in (0, BLOCK_NBYTES)]
    disk.heal()
    assert read_parts(store, parts) == [BLOCK_NBYTES] * 2
    for at, call in enumerate(list(disk.calls)):
        if call == "close":
            continue  # what was read is right
        store = LocalStore(tmp_path, disk=disk)  # asks again what is cached
        disk.fail(at, errno.EIO)
        with pytest.raises(StorageError, match="object"):
            read_parts(store, parts)


def test_where_nobody_says_what_is_cached_nothing_is_read_past_the_page_cache(
    tmp_path: Path,
) -> None:
    """All would be: what is in memory already, too."""

    class Silent(Counting):
        asked = 0

        def says_cached(self, handle: int, offset: int) -> bool | None:
            self.asked += 1
            return None

        def read_files(self, parts: Sequence[tuple[str, int, memoryview]]) -> list[int]:
            raise AssertionError("read past the page cache")

    store = LocalStore(tmp_path, disk=(disk := Silent()))
    store.put("object", bytes(range(256)) * 64)
    into = [recycled(BLOCK_NBYTES) for _ in range(3)]
    for _ in range(2):
        parts = [Part("object", at * BLOCK_NBYTES, view) for at, view in enumerate(into)]
        assert store.read_parts(parts) == [BLOCK_NBYTES] * 3
    assert b"".join(into) == bytes(range(256)) * 48
    assert not store.reads_together
    assert disk.asked == file_reads.has_queue()


def test_to_ask_whether_blocks_are_cached_has_none_read(tmp_path: Path) -> None:
    class Advised(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.advised: set[int] = set()

        def read_no_further(self, handle: int) -> None:
            self.advised.add(handle)

        def is_cached(self, handle: int, offset: int) -> bool:
            assert handle in self.advised, "the system would read ahead of a single byte"
            return False

    store = LocalStore(tmp_path, disk=Advised())
    store.put("object", bytes(8 * BLOCK_NBYTES))
    into = recycled(2 * BLOCK_NBYTES)
    assert store.read_into("object", 0, into) == len(into)
    assert store.read_into("object", 4 * BLOCK_NBYTES, into) == len(into)


def test_a_file_that_shrinks_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    class Shrinking(Counting):
        def size(self, handle: int) -> int:
            return super().size(handle) + 2 * BLOCK_NBYTES

    store = LocalStore(tmp_path, disk=Shrinking())
    store.put("object", b"x" * 5000)
    assert bytes(store.get_range("object", 10, 10**6)) == b"x" * 4990


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_a_call_that_fails_leaves_nothing_and_the_next_put_is_whole(
    tmp_path: Path, code: int
) -> None:
    data = np.random.default_rng(1).bytes(2 * BUFFER_NBYTES + 5000)
    disk = FaultyDisk(Counting())
    store = LocalStore(tmp_path, disk=disk)
    store.put("object", data)
    disk.heal()
    store.put("object", data)
    failed = []
    for at, call in enumerate(list(disk.calls)):
        disk.fail(at, code)
        try:
            store.put("another", data)
        except StorageError as error:
            failed.append(type(error))
            disk.heal()
            if call not in ("rename", "sync_directory"):
                assert sorted(blob.name for blob in store.list()) == ["object"]
        disk.heal()
        assert store.put("another", data) == len(data)
        assert store.get("another") == data
        store.delete(["another"])
    assert len(failed) >= 6
    assert set(failed) == {FullError if code == errno.ENOSPC else StorageError}
    assert not list((tmp_path / ".incomplete").iterdir())


def test_a_write_that_ends_within_a_block_goes_on_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(1).bytes(2 * BUFFER_NBYTES + 5000)
    disk, real, calls = Counting(), os.write, [0]

    def write(handle: int, view: memoryview) -> int:
        calls[0] += 1
        aligned = not (os.lseek(handle, 0, os.SEEK_CUR) % BLOCK_NBYTES or len(view) % BLOCK_NBYTES)
        if handle in disk.direct and not aligned:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(handle, view[:100] if calls[0] == 2 else view)

    monkeypatch.setattr(os, "write", write)
    store = LocalStore(tmp_path, disk=disk)
    assert store.put("object", data) == len(data)
    assert store.get("object") == data


@pytest.mark.parametrize("kind", [Disk, Counting, Cached, Refusing])
@pytest.mark.parametrize("head", [0, BLOCK_NBYTES, 2 * BLOCK_NBYTES, 5000])
@pytest.mark.parametrize("more", [0, 5])
def test_long_views_that_stand_well_are_written_from_where_they_are(
    tmp_path: Path, kind: type[Disk], head: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And come out the same bytes where they cannot be."""
    monkeypatch.setattr(direct_file, "_LONG_NBYTES", 2 * BLOCK_NBYTES)
    nbytes = 3 * BLOCK_NBYTES + more
    area = memoryview(mmap.mmap(-1, 8 * BLOCK_NBYTES))
    area[:] = np.random.default_rng(head + more).bytes(len(area))
    first, second = area[:nbytes], area[4 * BLOCK_NBYTES : 4 * BLOCK_NBYTES + nbytes]
    disk = kind()
    writes: list[int] = []
    real = os.write

    def write(handle: int, view: memoryview) -> int:
        writes.append(direct_file.address(memoryview(view)))
        return real(handle, view)

    monkeypatch.setattr(os, "write", write)
    store = LocalStore(tmp_path, disk=disk)
    store.put("object", [b"h" * head, first, b"x" * (-more % BLOCK_NBYTES), second])
    expected = b"h" * head + bytes(first) + b"x" * (-more % BLOCK_NBYTES) + bytes(second)
    assert store.get("object") == expected
    start = direct_file.address(area)
    from_there = [at for at in writes if start <= at < start + len(area)]
    if type(disk) is Counting:
        assert len(from_there) >= (0 if head % BLOCK_NBYTES else 2)
        assert disk.direct_nbytes == len(expected) // BLOCK_NBYTES * BLOCK_NBYTES

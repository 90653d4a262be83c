"""Objects as files below a local directory, durable against power cuts.

A put writes a file beside the name space, syncs it, moves it under its name and syncs the
directory: at no moment does a torn object stand under a name, and a put that returned survives
the plug being pulled.

Only "not found", said by the system, is absence. Every other error of every call comes out as
`StorageError`: a listing that failed would else be an empty one, on which runs start over and gc
deletes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from emberkeep.blobs.direct_file import (
    DirectFile,
    copy_bytes,
    is_aligned,
    read_aligned,
    read_long,
)
from emberkeep.blobs.file_reads import has_queue, open_at_once
from emberkeep.blobs.store import (
    SEGMENT,
    BlobInfo,
    Buffer,
    Part,
    as_buffers,
    check_name,
    check_range,
    is_segment,
)
from emberkeep.blobs.system_disk import BLOCK_NBYTES, Disk
from emberkeep.errors import FullError, MissingObjectError, StorageError, UnsupportedStoreError
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock

_Result = TypeVar("_Result")

_STAGING = ".incomplete"
# Held back for gc, which has to write a few documents before it may delete anything.
_RESERVE = ".reserve"
_RESERVE_NBYTES = 4 * 2**20
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LONG_NBYTES = 2**20
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK}
_NO_SUCH_RENAME = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space or let gc remove old versions, then save again",
    errno.EDQUOT: "the quota is used up: free space or raise the quota, then save again",
    errno.EACCES: "check the owner and permissions of the directory",
    errno.EPERM: "check the owner and permissions of the directory",
    errno.EROFS: "the file system is mounted read-only",
    errno.EIO: "the disk reports an I/O error: check it before trusting this copy",
    errno.ENOTDIR: "a file stands where a directory is needed: choose another root",
    errno.ENOENT: "its directory was removed or unmounted meanwhile: bring it back, then try again",
    errno.ESTALE: "the server of this mount has forgotten it: mount it again, then try again",
    errno.EMFILE: "this process has as many open files as it may: raise its limit (ulimit -n)",
    errno.ENFILE: "the system has as many open files as it may: raise its limit (fs.file-max)",
}


class LocalStore:
    """A store in a local directory. Every put is synced to the medium before it returns.

    The directory is created with the first put. Hard links decide `put_if_absent`; file systems
    without them are served by an exclusive rename, and refused if they lack that too: creating
    the file first and filling it later would let a crash leave a torn object under the name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        disk: Disk | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        try:
            self._root = os.path.abspath(os.fspath(path))
        except OSError as error:
            raise StorageError(
                f"{os.fspath(path)!r} leads nowhere: the working directory cannot be found "
                f"({error.strerror}); give an absolute path"
            ) from error
        self._staging = os.path.join(self._root, _STAGING)
        self._reserve = os.path.join(self._root, _RESERVE)
        self._spending = 0
        self._reads_blocks: bool | None = None  # not asked yet
        self._disk = disk or Disk()
        self._clock = clock
        self._durable_directories: set[str] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return Path(self._root).as_uri()

    def keep_reserve(self) -> None:
        """Holds some room back, in a file, if there is any; what gc writes may take it."""
        if self._spending:
            return
        try:
            status = self._disk.status(self._reserve)
            if status is not None and status.st_size >= _RESERVE_NBYTES:
                return
            if status is not None:
                self._disk.unlink(self._reserve)
            handle = self._disk.create(self._reserve)
            try:
                self._disk.allocate(handle, 0, _RESERVE_NBYTES)
                self._disk.sync(handle)
            finally:
                self._disk.close(handle)
        except FileExistsError:
            pass  # another process was faster
        except OSError:
            self._discard(self._reserve)

    @contextlib.contextmanager
    def spending_reserve(self) -> Iterator[None]:
        """For gc: small objects are written here also when no byte is free, at the cost of the
        reserve, which is there again afterwards."""
        with self._lock:
            self._spending += 1
        try:
            yield
        finally:
            with self._lock:
                self._spending -= 1
            self.keep_reserve()

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        if isinstance(data, bytes | bytearray | memoryview):
            return self._with_reserve(lambda: self._put(name, data))
        return self._put(name, data)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self._with_reserve(lambda: self._put_if_absent(name, data))

    def _with_reserve(self, put: Callable[[], _Result]) -> _Result:
        try:
            return put()
        except FullError:
            if not self._spending:
                raise
            self._discard(self._reserve)
            return put()

    def _put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        target = self._path(name)
        staged, size = self._stage(name, data)
        try:
            self._ensure_directory(os.path.dirname(target))
            self._call(name, self._disk.rename, staged, target)
        except BaseException:
            self._discard(staged)
            raise
        self._call(name, self._disk.sync_directory, os.path.dirname(target))
        return size

    def _put_if_absent(self, name: str, data: Buffer) -> bool:
        target = self._path(name)
        staged, _ = self._stage(name, data)
        try:
            self._ensure_directory(os.path.dirname(target))
            created = self._create(name, staged, target)
        finally:
            self._discard(staged)
        # Also when the name was taken: "taken" must still hold after a power cut.
        self._call(name, self._disk.sync_directory, os.path.dirname(target))
        return created

    def get(self, name: str) -> bytes:
        with self._open(name) as handle:
            size = self._call(name, self._disk.size, handle)
            return self._call(name, self._disk.read, handle, size, 0)

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        check_range(name, start, length)
        with self._open(name) as handle:
            if length < _LONG_NBYTES:
                self._read_no_further(handle, start)
                return self._call(name, self._disk.read, handle, length, start)
            return self._call(name, read_long, self._disk, handle, start, length)

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        """Fills `into` with bytes from `start` on; how many there were before the file ended."""
        check_range(name, start, len(into))
        with self._open(name) as handle:
            return self._read_part(name, handle, start, into)

    @property
    def reads_together(self) -> bool:
        """Whether one call of `read_parts` has as many reads under way as pay off: not where the
        file system has refused to read past the page cache, or does not say what is in it."""
        return self._reads_blocks is not False and has_queue()

    def read_parts(self, parts: Sequence[Part]) -> list[int]:
        """`read_into` of parts of files, those of whole blocks at once."""
        for part in parts:
            check_range(part.name, part.start, len(part.into))
        found = [-1] * len(parts)
        whole = [at for at, part in enumerate(parts) if is_aligned(part.start, part.into)]
        if whole and self._reads_blocks is None and has_queue():
            # Else what is in the page cache would be read past it.
            with self._open(parts[whole[0]].name) as handle:
                says = self._call(parts[whole[0]].name, self._disk.says_cached, handle, 0)
            self._reads_blocks = says is not None
        first = 0
        while first < len(whole) and self.reads_together:
            with open_at_once() as most:
                some = whole[first : first + most]
                reads = [(self._path(parts[at].name), *parts[at][1:]) for at in some]
                counts = self._call(parts[some[0]].name, self._disk.read_files, reads)
            for at, count in zip(some, counts, strict=True):
                # One that ends within a block has met the end of the file.
                if count == len(parts[at].into) or (count > 0 and count % BLOCK_NBYTES):
                    found[at] = count
                elif count == -errno.EINVAL:
                    self._reads_blocks = False
            first += len(some)
        others = [at for at, count in enumerate(found) if count < 0]
        for name, of_file in groupby(others, key=lambda at: parts[at].name):
            with self._open(name) as handle:
                for at in of_file:
                    found[at] = self._read_part(name, handle, *parts[at][1:])
        return found

    def _read_part(self, name: str, handle: int, start: int, into: memoryview) -> int:
        # Whole blocks that a caller has made room for need no copy, and bring no others with them.
        if is_aligned(start, into):
            return self._call(name, read_aligned, self._disk, handle, start, into)
        if len(into) < _LONG_NBYTES:
            self._read_no_further(handle, start)
            return self._call(name, self._disk.read_into, handle, into, start)
        found = self._call(name, read_long, self._disk, handle, start, len(into))
        copy_bytes(into[: len(found)], found)
        return len(found)

    def _read_no_further(self, handle: int, start: int) -> None:
        """Of part of a longer object: what follows is most likely not wanted."""
        if start:
            with contextlib.suppress(OSError):  # advice alone
                self._disk.read_no_further(handle)

    def size(self, name: str) -> int:
        status = self._call(name, self._disk.status, self._path(name))
        if status is None:
            raise self._missing(name)
        if stat.S_ISDIR(status.st_mode):
            raise self._explain(name, IsADirectoryError(errno.EISDIR, name))
        return status.st_size

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Objects below a prefix. What cannot be read is an error, never the end of the listing."""
        waiting = [(f"{prefix}/", self._path(prefix)) if prefix else ("", self._root)]
        while waiting:
            above, directory = waiting.pop()
            found = self._call(f"the listing of {above}*", self._disk.entries, directory)
            for entry in found or ():
                # What cannot be named is no object, and need not be readable: "lost+found" is not.
                if not is_segment(entry):
                    continue
                name, path = above + entry, os.path.join(directory, entry)
                status = self._call(name, self._disk.status, path)
                if status is None:
                    continue  # deleted since the directory was read
                if stat.S_ISDIR(status.st_mode):
                    waiting.append((f"{name}/", path))
                else:
                    yield BlobInfo(name=name, size=status.st_size, modified=_utc(status.st_mtime))

    def names(self, directory: str) -> Iterator[str]:
        """What stands directly below a directory; to look at each of thousands takes long."""
        path = self._path(directory)
        found = self._call(f"the listing of {directory}/*", self._disk.entries, path)
        return (f"{directory}/{entry}" for entry in filter(SEGMENT.match, found or ()))

    def delete(self, names: Iterable[str]) -> None:
        touched = set()
        for name in names:
            path = self._path(name)
            touched.add(os.path.dirname(path))
            with contextlib.suppress(FileNotFoundError):
                self._call(name, self._disk.unlink, path, pass_through={errno.ENOENT})
        # Also where all names were absent: a deletion that failed may have removed them, and not
        # yet for good.
        for directory in sorted(touched):
            with contextlib.suppress(FileNotFoundError):
                self._call(
                    directory, self._disk.sync_directory, directory, pass_through={errno.ENOENT}
                )

    def sweep(self, *, older_than: timedelta) -> int:
        latest = self._clock.now().timestamp() - older_than.total_seconds()
        removed = 0
        for entry in self._call(_STAGING, self._disk.entries, self._staging) or ():
            path = os.path.join(self._staging, entry)
            status = self._call(entry, self._disk.status, path)
            if status is None or status.st_mtime > latest:
                continue
            with contextlib.suppress(FileNotFoundError):  # its put has just finished
                self._call(entry, self._disk.unlink, path, pass_through={errno.ENOENT})
                removed += 1
        return removed

    def _path(self, name: str) -> str:
        return os.path.join(self._root, *check_name(name).split("/"))

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """An object, opened to be read."""
        path = self._path(name)
        try:
            handle = self._call(name, self._disk.open_to_read, path, pass_through={errno.ENOENT})
        except FileNotFoundError:
            raise self._missing(name) from None
        try:
            yield handle
        finally:
            # What was read is not in doubt.
            with contextlib.suppress(OSError):
                self._disk.close(handle)

    def _stage(self, name: str, data: Buffer | Iterable[Buffer]) -> tuple[str, int]:
        """The data as a synced file outside the name space."""
        self._ensure_directory(self._staging)
        staged = os.path.join(self._staging, f"{os.getpid()}-{secrets.token_hex(8)}")
        handle = self._call(name, self._disk.create, staged)
        try:
            try:
                file = DirectFile(self._disk, handle)
                for view in as_buffers(data):
                    self._call(name, file.write, view)
                self._call(name, file.finish)
                self._call(name, self._disk.sync, handle)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell
                    self._disk.close(handle)
                raise
            self._call(name, self._disk.close, handle)
        except BaseException:
            self._discard(staged)
            raise
        return staged, file.size

    def _create(self, name: str, staged: str, target: str) -> bool:
        """Gives the staged file its name unless that is taken."""

        def create() -> bool:
            try:
                self._disk.link(staged, target)
            except FileExistsError:
                # A network file system may repeat a link whose first answer was lost.
                return self._same(staged, target)
            return True

        def create_without_links() -> bool:
            try:
                self._disk.rename_new(staged, target)
            except FileExistsError:
                return False
            return True

        with contextlib.suppress(OSError):
            return self._call(name, create, pass_through=_NO_HARD_LINKS)
        try:
            return self._call(name, create_without_links, pass_through=_NO_SUCH_RENAME)
        except OSError as error:
            raise UnsupportedStoreError(
                f"the file system of {self._root} has neither hard links nor exclusive renames, so "
                "two writers could not be distinguished: use another file system, or "
                "exclusive=True if one process alone will ever write there"
            ) from error

    def _same(self, one: str, other: str) -> bool:
        first, second = self._disk.status(one), self._disk.status(other)
        if first is None or second is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), one)
        return os.path.samestat(first, second)

    def _discard(self, staged: str) -> None:
        # It may be renamed away already; what cannot be removed is left for `sweep`.
        with contextlib.suppress(OSError):
            self._disk.unlink(staged)

    def _ensure_directory(self, directory: str) -> None:
        """Creates a directory so that it, and the way to it, survive a power cut.

        A directory that exists may have been made by a process that died before syncing its
        parent, so each is synced once by every process that writes into it.
        """
        with self._lock:
            missing = []
            current = directory
            while current not in self._durable_directories and (
                len(current) >= len(self._root)
                or self._call(current, self._disk.status, current) is None
            ):
                missing.append(current)
                current = os.path.dirname(current)
            for path in reversed(missing):
                try:
                    self._call(path, self._disk.make_directory, path, pass_through={errno.EEXIST})
                except FileExistsError:
                    status = self._call(path, self._disk.status, path)
                    if status is None or not stat.S_ISDIR(status.st_mode):
                        raise self._explain(path, NotADirectoryError(errno.ENOTDIR, path)) from None
                self._call(path, self._disk.sync_directory, os.path.dirname(path))
                self._durable_directories.add(path)

    def _call(
        self,
        name: str,
        operation: Callable[..., _Result],
        *arguments: object,
        pass_through: Collection[int] = (),
    ) -> _Result:
        """Runs one operation; system errors come out as ours, except the codes passed through."""
        try:
            return operation(*arguments)
        except OSError as error:
            if error.errno is not None and error.errno in pass_through:
                raise
            raise self._explain(name, error) from error

    def _missing(self, name: str) -> MissingObjectError:
        return MissingObjectError(f"{self._root} holds no object {name}")

    def _explain(self, name: str, error: OSError) -> StorageError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check the disk and the directory")
        kind = FullError if error.errno in _FULL else StorageError
        return kind(f"{name} in {self._root}: {reason}; {remedy}")


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)

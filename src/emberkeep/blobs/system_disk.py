"""The system calls behind local stores and tiers, so that tests can record and fail them, and
replay any prefix of them without what was never synced."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from emberkeep.blobs import file_reads
from emberkeep.runtime import system_calls

BLOCK_NBYTES = 4096
"""Buffers, lengths and places of direct writes and reads are multiples of it."""


class Disk:
    """One method for each."""

    def create(self, path: str) -> int:
        """Opens a new file for writing; fails if the path exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, view: memoryview) -> None:
        while view:
            written = os.write(handle, view)
            view = view[written:]
            if view and written % BLOCK_NBYTES:
                # A file that is written directly takes whole blocks, at places of blocks.
                self.set_direct(handle, False)

    def set_direct(self, handle: int, on: bool) -> bool:
        """Whether what is written and read from now on goes past the page cache."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return False
        flags = fcntl.fcntl(handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, flags | flag if on else flags & ~flag)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False  # this file system has no such files
        return on

    def open_to_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_no_further(self, handle: int) -> None:
        """Has reads of an open file bring what is asked for into the page cache, and no more."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)

    def size(self, handle: int) -> int:
        """The length of an open file."""
        return os.fstat(handle).st_size

    def read(self, handle: int, nbytes: int, offset: int) -> bytes:
        """Bytes from `offset` on; fewer if the file ends before."""
        found = os.pread(handle, nbytes, offset)
        while len(found) < nbytes:
            more = os.pread(handle, nbytes - len(found), offset + len(found))
            if not more:
                break
            found += more
        return found

    def read_into(self, handle: int, view: memoryview, offset: int) -> int:
        """Fills `view` with bytes from `offset` on; how many there were before the file ended."""
        return self.read_blocks(handle, view, offset, len(view))

    def read_blocks(self, handle: int, view: memoryview, offset: int, nbytes: int) -> int:
        """Reads into `view` until `nbytes` are there or the file ends; how many there are then.

        A direct read fills whole blocks: the view may be longer than the bytes that are wanted.
        """
        done, count = 0, 1
        while done < nbytes and count:
            count = system_calls.read_at(handle, view[done:], offset + done)
            done += count
        return done

    def read_files(self, parts: Sequence[tuple[str, int, memoryview]]) -> list[int]:
        """`file_reads.read_files`: many reads at once, of files that are not open."""
        return file_reads.read_files(parts)

    def is_cached(self, handle: int, offset: int) -> bool:
        """Whether the byte there is in the page cache; yes where the system does not say."""
        return self.says_cached(handle, offset) is not False

    def says_cached(self, handle: int, offset: int) -> bool | None:
        """Whether the byte there is in the page cache; None where the system does not say."""
        if not (hasattr(os, "RWF_NOWAIT") and hasattr(os, "preadv")):
            return None
        try:
            return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return None

    def status(self, path: str) -> os.stat_result | None:
        """What a path leads to; None if there is nothing."""
        try:
            return os.stat(path)
        except FileNotFoundError:
            return None

    def entries(self, path: str) -> list[str] | None:
        """The names in a directory; None if there is no such directory."""
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return None

    def open(self, path: str, *, direct: bool) -> int:
        """Opens a file for reading and writing; `direct` keeps it out of the page cache."""
        flags = os.O_RDWR | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if direct else 0)
        return os.open(path, flags)

    def write_at(self, handle: int, view: memoryview, offset: int) -> None:
        while view:
            written = os.pwrite(handle, view, offset)
            view, offset = view[written:], offset + written

    def allocate(self, handle: int, offset: int, nbytes: int) -> None:
        """Makes sure that so many bytes from `offset` on can be written: zeros until they are."""
        system_calls.allocate(handle, offset, nbytes)

    def sync(self, handle: int) -> None:
        """Forces the file's bytes to the medium."""
        system_calls.sync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, source: str, target: str) -> None:
        """Moves a file, replacing the target."""
        os.replace(source, target)

    def link(self, source: str, target: str) -> None:
        """A second name for a file; fails if the target exists."""
        os.link(source, target)

    def rename_new(self, source: str, target: str) -> None:
        """Moves a file; fails if the target exists. For file systems without hard links."""
        system_calls.rename_new(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def empty(self, path: str) -> None:
        """Takes everything out of a file."""
        os.truncate(path, 0)

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def sync_directory(self, path: str) -> None:
        """Forces the directory's entries to the medium."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(handle)
        finally:
            os.close(handle)

"""Files written and read past the page cache, through aligned buffers that are used again.

For every page that goes through the cache the kernel makes a page, copies, and later looks for
somebody who no longer needs his. That takes ten times the processor time of moving the same bytes
from and to a buffer, and puts out of the cache what others read.
"""

from __future__ import annotations

import contextlib
import errno

from emberkeep.blobs.system_disk import BLOCK_NBYTES, Disk

BUFFER_NBYTES = 8 * 2**20
# What is shorter is collected: a write has a price of its own.
_LONG_NBYTES = 2**20


class DirectFile:
    """Collects what is written to a new file; `finish` hands on the rest.

    Long views that begin where blocks begin, in memory and in the file, are written from where they
    are. Short files go through the page cache, and so do all where the file system cannot do
    without it.
    """

    def __init__(self, disk: Disk, handle: int) -> None:
        self._disk, self._handle = disk, handle
        self._buffer: memoryview | None = None
        self._filled = 0
        self._direct: bool | None = None
        self.size = 0

    def write(self, view: memoryview) -> None:
        from emberkeep.runtime.memory import recycled  # needs numpy, `emberkeep --help` does not

        self.size += len(view)
        while view:
            if self._stands_well(view):
                whole = view[: len(view) // BLOCK_NBYTES * BLOCK_NBYTES]
                self._hand_on()
                self._put(whole)
                view = view[len(whole) :]
                continue
            if self._buffer is None:
                self._buffer = recycled(BUFFER_NBYTES)
            part = view[: BUFFER_NBYTES - self._filled]
            copy_bytes(self._buffer[self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BUFFER_NBYTES:
                self._hand_on()

    def finish(self) -> None:
        """Everything is in the file, though not yet synced."""
        if self._buffer is None:
            return
        rest = self._buffer[: self._filled]
        if self._direct:
            whole = len(rest) // BLOCK_NBYTES * BLOCK_NBYTES
            if whole:
                self._disk.write(self._handle, rest[:whole])
            rest = rest[whole:]
            self._disk.set_direct(self._handle, False)
        if rest:
            self._disk.write(self._handle, rest)
        self._buffer = None

    def _stands_well(self, view: memoryview) -> bool:
        """Whether it can be written from where it is, after what was collected."""
        if len(view) < _LONG_NBYTES or self._filled % BLOCK_NBYTES:
            return False
        return self._direct is False or address(view) % BLOCK_NBYTES == 0

    def _hand_on(self) -> None:
        """Writes what was collected: whole blocks."""
        if self._buffer is not None and self._filled:
            self._put(self._buffer[: self._filled])
            self._filled = 0

    def _put(self, blocks: memoryview) -> None:
        if self._direct is None:
            self._direct = self._started(blocks[:BLOCK_NBYTES])
            blocks = blocks[BLOCK_NBYTES:]
        if blocks:
            self._disk.write(self._handle, blocks)

    def _started(self, block: memoryview) -> bool:
        """Writes the first block; whether that went past the cache.

        Some file systems take the flag and refuse the write. One block is written or not: no byte
        can come twice.
        """
        if self._disk.set_direct(self._handle, True):
            try:
                self._disk.write(self._handle, block)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._disk.set_direct(self._handle, False)
            else:
                return True
        self._disk.write(self._handle, block)
        return False


def read_long(disk: Disk, handle: int, start: int, length: int) -> memoryview:
    """Bytes [start, start + length) of a file, cut off at its end; past the page cache, unless they
    are in it."""
    from emberkeep.runtime.memory import recycled  # as above

    end = min(start + length, disk.size(handle))
    if end <= start:
        return memoryview(b"")
    first = start // BLOCK_NBYTES * BLOCK_NBYTES
    into = recycled(-(-(end - first) // BLOCK_NBYTES) * BLOCK_NBYTES)
    found = read_aligned(disk, handle, first, into)
    return into[start - first : min(found, end - first)]


def is_aligned(start: int, into: memoryview) -> bool:
    """Whether memory and place suit a direct read: all are whole blocks."""
    return not (start | len(into) | address(into)) % BLOCK_NBYTES


def read_aligned(disk: Disk, handle: int, start: int, into: memoryview) -> int:
    """Fills whole blocks of memory with those of a file, past the page cache unless they are in it;
    how many bytes there were before the file ended."""
    wanted = min(len(into), max(disk.size(handle) - start, 0))
    found = None
    with contextlib.suppress(OSError):  # advice alone
        # Else to ask whether a byte is cached has the system read it, and some of what follows.
        disk.read_no_further(handle)
    if wanted and not disk.is_cached(handle, start) and disk.set_direct(handle, True):
        try:
            found = disk.read_blocks(handle, into, start, wanted)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise  # else this file system takes the flag and refuses to read
        disk.set_direct(handle, False)
    if found is None:
        found = disk.read_into(handle, into[:wanted], start)
    return min(found, wanted)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Without the interpreter's lock, which `target[:] = source` keeps."""
    import numpy as np

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def address(view: memoryview) -> int:
    """Where its first byte stands in memory."""
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])

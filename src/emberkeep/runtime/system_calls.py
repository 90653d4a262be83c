"""Calls that not every system has, each with what is done where it is missing.

Code elsewhere in the package uses nothing that Linux alone has, but for what stands here, direct
I/O (`tiers/log.py`), queues of reads (`kernels/log_reads.py`), lazy memory (`runtime/memory.py`)
and priorities of threads (`runtime/pool.py`), which have their own ways to do without.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY)
_AT_CWD, _NO_REPLACE, _RENAME_EXCL = -100, 1, 4


def give_way() -> None:
    """Lets other threads run."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        select.select((), (), (), 0)  # a system call that waits for nothing


def read_at(handle: int, view: memoryview, offset: int) -> int:
    """Reads into a buffer from an offset; how many bytes there were."""
    if hasattr(os, "preadv"):
        return os.preadv(handle, [view], offset)
    found = os.pread(handle, view.nbytes, offset)
    view[: len(found)] = found
    return len(found)


def allocate(handle: int, offset: int, nbytes: int) -> None:
    """Makes sure that so many bytes from `offset` on can be written: zeros until they are. Where
    neither system nor file system can, the file is only made as long."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, offset, nbytes)
            return
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
    os.ftruncate(handle, max(os.fstat(handle).st_size, offset + nbytes))


def sync(handle: int) -> None:
    """Forces a file's bytes to the medium."""
    full = getattr(fcntl, "F_FULLFSYNC", None) if sys.platform == "darwin" else None
    if full is not None:
        try:
            # fsync leaves the bytes in the drive's cache there.
            fcntl.fcntl(handle, full)
            return
        except OSError as error:  # a file system that has no more than fsync
            if error.errno not in _NOT_THERE:
                raise
    os.fsync(handle)


def sync_path(path: str | os.PathLike[str]) -> None:
    """`sync` of a file or directory by its path."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def rename_new(source: str, target: str) -> None:
    """Moves a file; fails if the target exists, and with ENOSYS where no call can do that."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    old, new = os.fsencode(source), os.fsencode(target)
    if hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_CWD, old, _AT_CWD, new, _NO_REPLACE)
    elif hasattr(libc, "renamex_np"):  # macOS
        failed = libc.renamex_np(old, new, _RENAME_EXCL)
    else:
        raise OSError(errno.ENOSYS, "no rename that spares what is there", target)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def lives(pid: int) -> bool:
    """Whether a process of this machine has that id, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    return True


def command_line(pid: int) -> bytes:
    """How a process was started; nothing where there is none."""
    if Path("/proc/self").exists():
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return b""
    shown = subprocess.run(
        ["ps", "-p", str(pid), "-o", "command="], capture_output=True, check=False
    )
    return shown.stdout

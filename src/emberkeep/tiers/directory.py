"""A tier's directory: one process has it, and only what the file system says is absent is absent.

The lock is on a file of its own, which is never renamed or removed: files of rows come under their
names by a rename, and a lock on the one that was replaced would hold nobody off.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import threading
import warnings
import weakref

from emberkeep.blobs.system_disk import Disk
from emberkeep.errors import TierError, TierInUseError
from emberkeep.runtime.system_calls import read_at
from emberkeep.tiers.record_layout import BLOCK, aligned, bytes_of

_LOCK = "lock"
_STATE = "state"
# How file systems say that they have no direct access.
_NOT_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}


class _Held:
    """The lock of one directory, for as long as somebody in this process has a claim."""

    def __init__(self, path: str, handle: int) -> None:
        self.path, self.handle = path, handle
        self.warned = False
        self.claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()

    def __del__(self) -> None:
        if self.handle >= 0:
            with contextlib.suppress(OSError):  # it has no locks
                # Said, because a child that was forked just now may still have the handle.
                fcntl.flock(self.handle, fcntl.LOCK_UN)
            os.close(self.handle)


class Claim:
    """One file of a tier is this holder's, until it is released or forgotten."""

    def __init__(self, held: _Held, name: str) -> None:
        self._held: _Held | None = held
        self._name = name
        held.claims[name] = self

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.claims.pop(self._name, None)

    def missing(self) -> str | None:
        """The path of the lock, if that is not the file any more that is locked."""
        held = self._held
        if held is None or held.handle < 0 or names(held.path, held.handle):
            return None
        return held.path

    def warn_once(self, message: str) -> None:
        """Warns, unless another file of the directory has done so."""
        if self._held is not None and not self._held.warned:
            self._held.warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=2)


_held: weakref.WeakValueDictionary[str, _Held] = weakref.WeakValueDictionary()
_mutex = threading.Lock()


def _forget_in_child() -> None:
    """A lock belongs to all who have its handle open: children that outlive the process would
    keep the next one out."""
    global _mutex
    _mutex = threading.Lock()
    for held in list(_held.values()):
        handle, held.handle = held.handle, -1
        if handle >= 0:
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def check_usable(path: str, *, exclusive: bool, disk: Disk) -> None:
    """Raises `TierError` where no files of a tier could be made below a directory, which is made if
    it is not there; nothing else is left behind."""
    try:
        make_directory(path, disk)
        with tempfile.TemporaryFile(dir=path) as probe:
            if not exclusive:
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise TierError(
            f"the tier {path} cannot be used: {error.strerror}; look at the disk and what is "
            "mounted there, or name a directory on a disk that can be written and has locks"
        ) from error


def claim(path: str, *, exclusive: bool, disk: Disk) -> Claim:
    """Makes the file at `path` the caller's, whether there is one or not.

    Nothing of a tier is looked at or created before. Raises `TierError` if another process has the
    directory, or another model of this process the file. With `exclusive` a file system without
    locks is taken at the user's word.
    """
    top, name = os.path.split(path)
    make_directory(top, disk)
    with _mutex:
        key = os.path.realpath(top)
        held = _held.get(key)
        if held is None:
            held = _held[key] = _Held(os.path.join(top, _LOCK), _locked(top, exclusive))
        if name in held.claims:
            raise _in_use(path)
        return Claim(held, name)


def _locked(top: str, exclusive: bool) -> int:
    path = os.path.join(top, _LOCK)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise _in_use(top) from None
                if not exclusive:
                    raise TierError(
                        f"the file system of {top} has no locks ({error.strerror}), so two "
                        "processes could use it at once; nothing was created. Use another file "
                        "system, or exclusive=True if one process alone will ever use this tier"
                    ) from error
            if names(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the directory was removed and made again meanwhile


def check_unlocked(path: str) -> None:
    """Refuses a file of rows that a process of an earlier release has: those lock it itself."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _in_use(path) from None
    finally:
        os.close(handle)


def _in_use(path: str) -> TierInUseError:
    return TierInUseError(
        f"{path} is in use by another process or another model: end that one first, or name "
        "another path"
    )


def names(path: str, handle: int) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def is_there(path: str) -> bool:
    """Whether anything has that name, be it a link to a disk that is not mounted.

    Only "not found", said by the file system, is absence: any other error is raised.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def make_directory(path: str, disk: Disk) -> None:
    """Makes a directory and those above it, durably."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        above = os.path.dirname(path)
        make_directory(above, disk)
        try:
            disk.make_directory(path)
        except FileExistsError:
            mode = os.stat(path).st_mode  # another process was faster; or a link leads nowhere
        else:
            disk.sync_directory(above)
            return
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def states(path: str) -> list[str]:
    """The files beside the rows of a tier that only come into being where there are rows."""
    try:
        found = os.listdir(os.path.join(path, _STATE))
    except FileNotFoundError:
        return []
    return sorted(name for name in found if name.startswith(("decision-", "step-")))


def open_file(path: str, disk: Disk, claim: Claim) -> tuple[int, bool]:
    """A file of rows, and whether it is read and written directly: past the page cache."""
    if hasattr(os, "O_DIRECT"):
        try:
            handle = disk.open(path, direct=True)
            try:
                read_at(handle, bytes_of(aligned(BLOCK)), 0)
            except BaseException:
                os.close(handle)
                raise
            return handle, True
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            claim.warn_once(
                f"the file system of {path} has no direct reads and writes "
                f"({error.strerror}): rows also take memory of the page cache, and reads are "
                "slower; keep tiers on a local disk"
            )
    return disk.open(path, direct=False), False

"""Arrays that cost memory only where they are touched, and rows that are scattered."""

from __future__ import annotations

import mmap
import os
import resource
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGE = 2 * 1024 * 1024
_MOST_FREE = 8


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_nbytes() -> int:
    """How much memory this process takes now; where the system does not say, the most it took."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def lazy_zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros whose pages exist once they are written.

    The mapping is private (a forked child gets its own copy) and reserves nothing, so an array may
    be larger than the memory. Arrays that are small beside the machine use huge pages, which make
    random rows about a third faster; larger ones do not, because a single touched row would then
    cost two megabytes.
    """
    kind = np.dtype(dtype)
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if nbytes == 0 or not sys.platform.startswith("linux"):
        return np.zeros(shape, kind)
    area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if _HUGE_PAGE <= nbytes <= _physical_bytes() // 16:
        with suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, kind).reshape(shape)


def zero_again(part: npt.NDArray[Any]) -> None:
    """Makes some rows of `lazy_zeros`, neighbours, what they were at first: zeros whose pages exist
    once they are written. Takes no memory, neither for them nor meanwhile."""
    content = part.reshape(-1).view(np.uint8)
    area = _area_of(part)
    if area is None:
        content[:] = 0
        return
    page = mmap.PAGESIZE
    start = content.ctypes.data - np.frombuffer(area, np.uint8).ctypes.data
    first, last = -(-start // page) * page, (start + content.size) // page * page
    if first < last:
        try:
            area.madvise(mmap.MADV_DONTNEED, first, last - first)
        except OSError:  # pages that were locked into memory stay there
            content[:] = 0
            return
        edges = content[: first - start], content[last - start :]
    else:
        edges = content, content[:0]
    for edge in edges:
        if edge.any():
            edge[:] = 0


def _area_of(array: npt.NDArray[Any]) -> mmap.mmap | None:
    """The mapping that an array of `lazy_zeros` is a part of, where it is one."""
    holder: object = array
    while isinstance(holder, np.ndarray):
        holder = holder.base
    if isinstance(holder, memoryview):
        holder = holder.obj
    return holder if isinstance(holder, mmap.mmap) else None


class _Recycler:
    """Memory that nobody looks at for the moment. Only what was lent keeps it alive."""

    def __init__(self) -> None:
        self.free: list[npt.NDArray[np.uint8]] = []

    def take_back(self, area: npt.NDArray[np.uint8]) -> None:
        if len(self.free) < _MOST_FREE:
            self.free.append(area)


_recyclers: weakref.WeakSet[_Recycler] = weakref.WeakSet()
_recycling = threading.Lock()


def _renew_lock() -> None:
    """A thread that held it in the parent of a forked process is not there to let it go."""
    global _recycling
    _recycling = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _recycler() -> _Recycler:
    """The one that keeps memory now; with the lock held."""
    owner = next(iter(_recyclers), None) or _Recycler()
    _recyclers.add(owner)
    return owner


@contextmanager
def buffers_kept() -> Iterator[None]:
    """What is lent in the body is kept for later parts of it, though none may be lent in between:
    else work that goes from file to file needs other buffers for each."""
    with _recycling:
        owner = _recycler()
    try:
        yield
    finally:
        del owner


def recycled(nbytes: int) -> memoryview:
    """A buffer for bytes that pass through, with anything in it.

    It may have been used before: to have fresh pages made takes longer than to fill them. It goes
    back when the last view of it is gone, and when none is lent any more all are freed.
    """
    with _recycling:
        owner = _recycler()
        fit = [at for at, area in enumerate(owner.free) if nbytes <= area.size <= 4 * nbytes]
        area = owner.free.pop(fit[0]) if fit else lazy_zeros((nbytes,), np.uint8)
    # Views of a memoryview keep the array that it was made of; those of an array do not.
    lent = area[:nbytes]
    weakref.finalize(lent, owner.take_back, area).atexit = False
    return memoryview(lent)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredRows:
    """Rows of one plane, scattered in memory: row i begins at `starts[i]` of `words`.

    A caller that can write rows from where they are saves a copy of them; an array is made by
    `np.asarray`. Words have the four bytes of the plane's own type.
    """

    words: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.starts.size, self.width

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.words.dtype

    def __getitem__(self, rows: Any) -> ScatteredRows:
        return ScatteredRows(self.words, self.starts[rows], self.width)

    def rows(self) -> npt.NDArray[Any]:
        """A view with a row for every word, so that row `starts[i]` is row i."""
        count = max(0, self.words.size - self.width + 1)
        size = self.words.itemsize
        return as_strided(self.words, (count, self.width), (size, size), writeable=False)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.rows()[self.starts], dtype)


Values = npt.NDArray[Any] | ScatteredRows
"""Rows of one plane."""

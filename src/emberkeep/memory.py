"""Arrays that cost memory only where they are touched."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGE = 2 * 1024 * 1024


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, kind).reshape(shape)

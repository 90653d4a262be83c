"""Whole blocks of files to memory, past the page cache, many reads under way at once, without the
GIL.

A thread for each read takes ten times as much of the processor, most of it to take turns.
"""

from __future__ import annotations

import errno
import os
import platform

import numpy as np
from numba import types

from emberkeep._types import I64, U8
from emberkeep.kernels._jit import inline, kernel
from emberkeep.kernels.log_reads import _IO_GETEVENTS, _IO_SUBMIT

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
# openat, close, fcntl, fadvise64, pread64, preadv2
_CALLS = {"x86_64": (257, 3, 72, 221, 17, 327), "aarch64": (56, 57, 25, 223, 67, 286)}
_OPEN, _CLOSE, _FCNTL, _ADVISE, _READ, _READ_NOW = _CALLS.get(platform.machine(), (0,) * 6)
_AT_CWD, _SET_FLAGS, _RANDOM, _NOWAIT = -100, 4, 1, 8
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = -errno.EINVAL


@inline
def _reap(context: I64, least: int, events: I64, found_R: I64) -> int:
    """Notes what has come of reads, at least of so many; none if a signal interrupts. More may be
    under way than there is room for at once."""
    most = events.shape[0]
    came = _syscall(
        _IO_GETEVENTS, context[0], min(least, most), most, np.int64(events.ctypes.data), 0, 0
    )
    for e in range(came):
        found_R[events[e, 0]] = events[e, 2]
    return max(came, 0)


@inline
def _submit(
    context: I64, queued: int, under_way: int, pointers: I64, events: I64, found_R: I64
) -> int:
    """Has reads begin; how many are under way then. What is refused is left as it is."""
    sent = 0
    while sent < queued:
        taken = _syscall(
            _IO_SUBMIT, context[0], queued - sent, np.int64(pointers.ctypes.data) + 8 * sent,
            0, 0, 0,
        )  # fmt: skip
        if taken > 0:
            sent += taken
            under_way += taken
        elif under_way > 0:
            under_way -= _reap(context, 1, events, found_R)
        else:
            break
    return under_way


@kernel
def read_files(
    context: I64, paths: U8, begins_F: I64, firsts_F: I64, starts_R: I64, addresses_R: I64,
    nbytes_R: I64, requests: I64, pointers: I64, events: I64, probe: I64, found_R: I64,
) -> None:  # fmt: skip
    """Reads parts of files; `found_R` has how many bytes there were of each, -1 or less where it
    could not be read so: -22 (EINVAL) where the file system has no such reads.

    Path f begins at `begins_F[f]` and ends with a zero; reads `firsts_F[f]:firsts_F[f + 1]` are of
    its file. What is in the page cache is taken from there. `probe` is room for three numbers: what
    is made here, and named by its address alone, would be gone before the system writes to it.
    """
    depth = requests.shape[0]
    place = np.int64(probe.ctypes.data)
    probe[0], probe[1] = place + 16, 1  # a vector of one byte
    handles_F = np.empty(begins_F.size, np.int64)
    queued = 0
    under_way = 0
    for f in range(begins_F.size):
        path = np.int64(paths.ctypes.data) + begins_F[f]
        handle = _syscall(_OPEN, _AT_CWD, path, _FLAGS, 0, 0, 0)
        handles_F[f] = handle
        if handle < 0:
            continue
        # Else to ask whether a byte is cached has the system read it, and some of what follows.
        _syscall(_ADVISE, handle, 0, 0, _RANDOM, 0, 0)
        uncached = 0
        for r in range(firsts_F[f], firsts_F[f + 1]):
            if _syscall(_READ_NOW, handle, place, 1, starts_R[r], 0, _NOWAIT) == 1:
                found_R[r] = _syscall(_READ, handle, addresses_R[r], nbytes_R[r], starts_R[r], 0, 0)
            else:
                uncached += 1
        if not uncached:
            continue
        refused = _syscall(_FCNTL, handle, _SET_FLAGS, _DIRECT, 0, 0, 0) < 0
        for r in range(firsts_F[f], firsts_F[f + 1]):
            if found_R[r] >= 0:
                continue
            if refused:
                found_R[r] = _REFUSED
                continue
            requests[queued, :] = 0
            requests[queued, 0] = r
            requests[queued, 2] = handle << 32
            requests[queued, 3] = addresses_R[r]
            requests[queued, 4] = nbytes_R[r]
            requests[queued, 5] = starts_R[r]
            pointers[queued] = np.int64(requests.ctypes.data) + queued * 64
            queued += 1
            if queued == depth:
                under_way = _submit(context, queued, under_way, pointers, events, found_R)
                queued = 0
    under_way = _submit(context, queued, under_way, pointers, events, found_R)
    while under_way > 0:  # the memory is written until the last has come
        under_way -= _reap(context, under_way, events, found_R)
    for f in range(begins_F.size):
        if handles_F[f] >= 0:
            _syscall(_CLOSE, handles_F[f], 0, 0, 0, 0, 0)

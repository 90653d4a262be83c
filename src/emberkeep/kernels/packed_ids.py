"""Sorted ids in few bits: gaps packed block by block, or one bit per id that might be there.

Ids are seen as `first + stride · unit`, units counting up from 0. All differences are taken
modulo 2^64, which is exact for any two int64 in order, whatever their distance.
"""

from __future__ import annotations

import numpy as np

from emberkeep._types import I64, U8, U64
from emberkeep.kernels._jit import kernel

_u64 = np.uint64

BLOCK = 128  # gaps that share a bit width


@kernel
def find_stride(ids: I64) -> np.uint64:
    """The greatest stride that leads from the first id to all others; 0 if they do not ascend."""
    stride = _u64(0)
    ascend = True
    for i in range(1, len(ids)):
        ascend &= ids[i] > ids[i - 1]
        if stride == _u64(1):
            continue
        gap = _u64(ids[i]) - _u64(ids[i - 1])
        if stride == _u64(0):
            stride = gap
        while gap % stride != _u64(0):
            stride, gap = gap % stride, stride
    if not ascend:
        return _u64(0)
    return max(stride, _u64(1))


@kernel
def find_widths(ids: I64, stride: np.uint64, widths: U8) -> int:
    """The bits that each block of gaps needs; returns the 64-bit words that all of them fill."""
    words = 0
    for block in range(len(widths)):
        start = block * BLOCK + 1
        stop = min(start + BLOCK, len(ids))
        union = _u64(0)
        for i in range(start, stop):
            gap = _u64(ids[i]) - _u64(ids[i - 1])
            union |= (gap if stride == _u64(1) else gap // stride) - _u64(1)
        width = 0
        while union != _u64(0):
            union >>= _u64(1)
            width += 1
        widths[block] = width
        words += ((stop - start) * width + 63) // 64
    return words


@kernel
def pack_gaps(ids: I64, stride: np.uint64, widths: U8, words: U64) -> None:
    """Writes each gap, less one, in its block's width, lowest bit first; a block starts a word."""
    words[:] = _u64(0)
    at = 0
    for block in range(len(widths)):
        start = block * BLOCK + 1
        stop = min(start + BLOCK, len(ids))
        width = int(widths[block])
        if width == 0:
            continue
        for i in range(start, stop):
            gap = _u64(ids[i]) - _u64(ids[i - 1])
            value = (gap if stride == _u64(1) else gap // stride) - _u64(1)
            place = (i - start) * width
            word = at + (place >> 6)
            offset = place & 63
            words[word] |= value << _u64(offset)
            if offset + width > 64:
                words[word + 1] |= value >> _u64(64 - offset)
        at += ((stop - start) * width + 63) // 64


@kernel
def unpack_gaps(widths: U8, words: U64, first: np.int64, stride: np.uint64, ids: I64) -> bool:
    """The way back; the caller has checked that the words are as many as the widths say.

    Returns whether the ids ascend: damaged gaps may lead beyond the last int64.
    """
    value = _u64(first)
    ids[0] = first
    ascend = True
    at = 0
    for block in range(len(widths)):
        start = block * BLOCK + 1
        stop = min(start + BLOCK, len(ids))
        width = int(widths[block])
        mask = ~_u64(0) >> _u64(64 - width) if width > 0 else _u64(0)
        for i in range(start, stop):
            gap = _u64(0)
            if width > 0:
                place = (i - start) * width
                word = at + (place >> 6)
                offset = place & 63
                gap = words[word] >> _u64(offset)
                if offset + width > 64:
                    gap |= words[word + 1] << _u64(64 - offset)
            value += ((gap & mask) + _u64(1)) * stride
            ids[i] = np.int64(value)
            ascend &= ids[i] > ids[i - 1]
        at += ((stop - start) * width + 63) // 64
    return ascend


@kernel
def set_bits(ids: I64, stride: np.uint64, words: U64) -> None:
    """Sets bit `unit` for every id."""
    words[:] = _u64(0)
    for i in range(len(ids)):
        gap = _u64(ids[i]) - _u64(ids[0])
        unit = gap if stride == _u64(1) else gap // stride
        words[np.int64(unit >> _u64(6))] |= _u64(1) << (unit & _u64(63))


@kernel
def read_bits(words: U64, first: np.int64, stride: np.uint64, ids: I64) -> int:
    """The ids of the bits that are set; returns how many there are, never writing more than fit."""
    found = 0
    for w in range(len(words)):
        word = words[w]
        unit = _u64(w) << _u64(6)
        while word != _u64(0):
            if word & _u64(0xFF) == _u64(0):
                word >>= _u64(8)
                unit += _u64(8)
                continue
            if word & _u64(1) != _u64(0):
                if found < len(ids):
                    ids[found] = np.int64(_u64(first) + unit * stride)
                found += 1
            word >>= _u64(1)
            unit += _u64(1)
    return found

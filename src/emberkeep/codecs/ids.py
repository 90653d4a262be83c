"""Ascending ids in few bytes."""

from __future__ import annotations

import math

import numpy as np

from emberkeep._types import Array
from emberkeep.errors import ConfigError, DamageError, FormatError, IdError

_ID_HEADER = np.dtype(
    [
        ("version", "u1"),
        ("kind", "u1"),
        ("zero", "u1", (6,)),
        ("count", "<u8"),
        ("first", "<i8"),
        ("last", "<i8"),
        ("stride", "<u8"),
    ]
)
_ID_VERSION = 1
MOST_IDS = 2**24
"""So many ids are packed together at most; a checkpoint has 32,768 to a chunk."""
_RANGE, _BITMAP, _GAPS = range(3)


def pack_ids(ids: Array) -> Array:
    """Ascending, distinct int64 ids in few bytes; any of the 2^64 values may occur.

    The smallest of three forms is taken: a range, a bitmap, gaps packed in blocks of 128. Whatever
    stride the ids have in common (a shard holds every n-th) costs nothing. However they are
    scattered, the body is never larger than plain int64: gaps add up to less than 2^64, so at most
    one block can need 64 bits, and the first id is in the header.

    Ids that do not ascend are refused: sort them, and the rows with them, first.
    """
    from emberkeep.kernels import packed_ids

    ids = np.ascontiguousarray(ids)
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise ConfigError(f"ids are one int64 array, not {ids.dtype} of shape {ids.shape}")
    if len(ids) > MOST_IDS:
        raise ConfigError(f"{len(ids)} ids are too many for one pack: at most {MOST_IDS}")
    header = np.zeros(1, _ID_HEADER)
    header["version"], header["count"] = _ID_VERSION, len(ids)
    if not len(ids):
        header["kind"], header["stride"] = _RANGE, 1
        return header.view(np.uint8)
    stride = np.uint64(packed_ids.find_stride(ids))
    if stride == 0:
        raise IdError("ids to pack must ascend without repeats: sort the ids and their rows first")
    first, last = int(ids[0]), int(ids[-1])
    header["first"], header["last"], header["stride"] = first, last, stride
    units = (last - first) // int(stride) + 1
    widths = np.zeros(_blocks(len(ids)), np.uint8)
    gap_words = int(packed_ids.find_widths(ids, stride, widths))
    sizes = {
        _RANGE: 0 if units == len(ids) else math.inf,
        _BITMAP: 8 * ((units + 63) // 64),
        _GAPS: _padded(len(widths)) + 8 * gap_words,
    }
    kind = min(sizes, key=lambda form: sizes[form])
    header["kind"] = kind
    packed = np.zeros(_ID_HEADER.itemsize + int(sizes[kind]), np.uint8)
    packed[: _ID_HEADER.itemsize] = header.view(np.uint8)
    body = packed[_ID_HEADER.itemsize :]
    if kind == _BITMAP:
        packed_ids.set_bits(ids, stride, body.view(np.uint64))
    elif kind == _GAPS:
        body[: len(widths)] = widths
        packed_ids.pack_gaps(ids, stride, widths, body[_padded(len(widths)) :].view(np.uint64))
    return packed


def unpack_ids(packed: Array, *, count: int) -> Array:
    """The ids that `pack_ids` packed; `count` is how many the caller knows them to be.

    The count bounds what is allocated: a damaged header cannot ask for more. No caller knows of
    more than `MOST_IDS`: a range of them has no byte of its own that would bound its length.
    """
    from emberkeep.kernels import packed_ids

    if not 0 <= count <= MOST_IDS:
        raise DamageError(f"packed ids are {count}, and at most {MOST_IDS} are read at once")
    packed = np.array(packed, np.uint8).reshape(-1)  # aligned and writable: one kernel signature
    if len(packed) < _ID_HEADER.itemsize:
        raise DamageError("packed ids end within their header: they are damaged")
    header = packed[: _ID_HEADER.itemsize].view(_ID_HEADER)[0]
    body = packed[_ID_HEADER.itemsize :]
    if header["version"] > _ID_VERSION:
        raise FormatError(
            f"ids were packed as version {header['version']} and this release reads version "
            f"{_ID_VERSION}: read them with the release that wrote them, or a later one"
        )
    kind, first, last = int(header["kind"]), int(header["first"]), int(header["last"])
    stride = header["stride"]
    if header["version"] != _ID_VERSION or header["zero"].any() or stride == 0:
        raise DamageError("packed ids have a header that is never written: they are damaged")
    if int(header["count"]) != count:
        raise DamageError(f"packed ids are {header['count']}, not the {count} expected")
    if count == 0:
        _fits(kind == _RANGE and first == last == 0 and not len(body))
        return np.empty(0, np.int64)
    _fits(first <= last and (last - first) % int(stride) == 0)
    units = (last - first) // int(stride) + 1
    ids = np.empty(count, np.int64)
    if kind == _RANGE:
        _fits(len(body) == 0 and units == count)
        # Modulo 2^64: the last step of the range may reach beyond 2^63.
        ids.view(np.uint64)[:] = np.arange(count, dtype=np.uint64) * stride
        ids.view(np.uint64)[:] += np.uint64(first & (2**64 - 1))
    elif kind == _BITMAP:
        _fits(len(body) == 8 * ((units + 63) // 64))
        found = packed_ids.read_bits(body.view(np.uint64), np.int64(first), stride, ids)
        _fits(int(found) == count)
    else:
        _fits(kind == _GAPS)
        widths, words = _gap_parts(body, count)
        _fits(bool(packed_ids.unpack_gaps(widths, words, np.int64(first), stride, ids)))
    _fits(int(ids[0]) == first and int(ids[-1]) == last)
    return ids


def _gap_parts(body: Array, count: int) -> tuple[Array, Array]:
    """Widths and words of packed gaps: as many as `count` ids and the widths themselves ask for."""
    blocks = _blocks(count)
    start = _padded(blocks)
    _fits(len(body) >= start and len(body) % 8 == 0 and not body[blocks:start].any())
    widths, words = body[:blocks], body[start:].view(np.uint64)
    gaps = np.full(blocks, _block(), np.int64)
    gaps[-1:] = count - 1 - _block() * (blocks - 1)
    _fits(not (widths > 64).any() and int(((gaps * widths + 63) // 64).sum()) == len(words))
    return widths, words


def _block() -> int:
    from emberkeep.kernels.packed_ids import BLOCK

    return BLOCK


def _blocks(count: int) -> int:
    """Blocks of gaps between `count` ids."""
    return (count - 1 + _block() - 1) // _block()


def _padded(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


def _fits(true: bool) -> None:
    if not true:
        raise DamageError("packed ids contradict their header: they are damaged")

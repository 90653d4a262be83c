"""The head of a tier's file: which batch it holds for certain, and which records count.

There are two slots, written in turn, each with a sequence number and a checksum: a torn write
leaves the other one. What a slot says is true when it is written, so the bytes that it speaks of
are synced before it, and it is synced before anybody is told.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from emberkeep.errors import DamageError, FormatError, TierError

Json = dict[str, Any]

FORMAT = 1
SLOT_NBYTES = 64 * 1024
_MAGIC = b"EMBRTIER"
_HEAD = struct.Struct("<8sQQQ")  # magic, sequence, length, checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch that the file can be taken back to.

    Records up to `stamp` belong to it, and blocks up to `sequence` must all be there; `rows` counts
    its trained rows, records up to `floor` were cleared before it. `tables` holds what rows do not:
    steps and ticks.
    """

    batch: int
    stamp: int
    sequence: int
    rows: int
    floor: int
    tables: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """The state of one file.

    `lives[l - first_life]` says where life l ended: the last stamp and the last sequence that
    count. The present life is `first_life + len(lives)`. Segments that `free` does not name, of the
    first `segments`, hold blocks that must all be there.
    """

    schema: Json
    salt: int
    segment_nbytes: int
    segments: int = 0
    free: str = ""
    first_life: int = 1
    lives: tuple[tuple[int, int], ...] = ()
    prepared: Point | None = None
    committed: Point | None = None

    @property
    def life(self) -> int:
        return self.first_life + len(self.lives)

    def point(self, batch: int) -> Point | None:
        """The point of that batch, prepared or committed."""
        for point in (self.committed, self.prepared):
            if point is not None and point.batch == batch:
                return point
        return None


def pack_bits(bits: npt.NDArray[np.bool_]) -> str:
    """Bits as text; long runs of one kind take little room."""
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes())).decode()


def unpack_bits(text: str, count: int) -> npt.NDArray[np.bool_]:
    if not text:
        return np.zeros(count, np.bool_)
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.unpackbits(packed, count=count).astype(np.bool_)


def _fields(of: Superblock | Point) -> Json:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}


def encode(block: Superblock, sequence: int) -> bytes:
    """One slot. Lives beyond its room are refused; see `Superblock.first_life`."""
    text = json.dumps({"format": FORMAT, **_fields(block)}, default=_fields).encode()
    if len(text) > SLOT_NBYTES - _HEAD.size:
        raise TierError(
            f"the head of the file needs {len(text)} bytes and has {SLOT_NBYTES - _HEAD.size}: it "
            "has been resumed too often, or has too many tables; save a version to a repository "
            "and restore it into a new tier"
        )
    checksum = xxhash.xxh3_64_intdigest(text, seed=sequence)
    head = _HEAD.pack(_MAGIC, sequence, len(text), checksum)
    return (head + text).ljust(SLOT_NBYTES, b"\0")


def decode(slots: bytes, path: str) -> tuple[Superblock, int]:
    """The newest whole slot and its sequence number."""
    found: list[tuple[int, Json]] = []
    for at in (0, SLOT_NBYTES):
        slot = slots[at : at + SLOT_NBYTES]
        if len(slot) < _HEAD.size:
            continue
        magic, sequence, length, checksum = _HEAD.unpack_from(slot)
        text = slot[_HEAD.size : _HEAD.size + length]
        if magic == _MAGIC and xxhash.xxh3_64_intdigest(text, seed=sequence) == checksum:
            found.append((sequence, json.loads(text)))
    if not found:
        raise DamageError(
            f"{path} has no readable head: it is no tier, or both of its heads are damaged; "
            "nothing was changed. Name another path, or remove the file and restore a version of a "
            "repository",
            name=path,
        )
    sequence, told = max(found, key=lambda entry: entry[0])
    if told.pop("format") != FORMAT:
        raise FormatError(f"{path} was written by a newer release of emberkeep: upgrade")
    for name in ("prepared", "committed"):
        told[name] = None if told[name] is None else Point(**told[name])
    told["lives"] = tuple((stamp, last) for stamp, last in told["lives"])
    return Superblock(**told), sequence

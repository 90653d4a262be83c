"""The head of a tier's file: which batch it holds for certain, and which records count.

There are two slots, written in turn, each with a sequence number and a checksum: a torn write
leaves the other one. What a slot says is true when it is written, so the bytes that it speaks of
are synced before it, and it is synced before anybody relies on it.

A head grows with tables, lives and segments. One that is too long for its slot lies in segments of
its own, and the slot says where, and its digest. Each slot has segments of its own, so that a
torn write of these leaves the other head as well.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import xxhash

from emberkeep._types import Bools, Json
from emberkeep.blobs.system_disk import Disk
from emberkeep.errors import DamageError, FormatError, StateError
from emberkeep.runtime.fields import MOST, Fields, parse

FORMAT = 2
SLOT_NBYTES = 64 * 1024
START = 2 * SLOT_NBYTES
"""Where the segments begin."""
_MAGIC = b"EMBRTIER"
_NONCE = re.compile(r"[0-9A-Za-z]{1,64}\Z")
_HEAD = struct.Struct("<8sQQQ")  # magic, sequence, length, checksum
ROOM = SLOT_NBYTES - _HEAD.size
"""So many bytes of a head fit its slot."""

Extents = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch that the file can be taken back to.

    Records up to `stamp` belong to it, and blocks up to `sequence` must all be there; `rows` counts
    its trained rows, records up to `floor` were cleared before it. `tables` holds what rows do not:
    steps and ticks. `nonce` names its decision; points of the first format have none. `home` leads
    from the file's directory to the one that holds the decision, where that is another tier's. On a
    server it is the URL of the store that does, and `run` the repository there.
    """

    batch: int
    stamp: int
    sequence: int
    rows: int
    floor: int
    tables: Json
    nonce: str = ""
    home: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """The state of one file.

    `lives[l - first_life]` says where life l ended: the last stamp and the last sequence that
    count. The present life is `first_life + len(lives)`. Blocks up to `synced` are there although
    no point may say so, as those of a batch that was given up. Segments that `free` does not name,
    of the first `segments`, hold blocks that must all be there, except `areas`: those hold heads,
    one list for each slot.
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
    synced: int = 0
    areas: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @property
    def life(self) -> int:
        return self.first_life + len(self.lives)


def pack_bits(bits: Bools) -> str:
    """Bits as text; long runs of one kind take little room."""
    return base64.b64encode(zlib.compress(np.packbits(bits).tobytes())).decode()


def unpack_bits(text: str, count: int) -> Bools:
    """The way back; ValueError if there are fewer bits or more, found without unpacking them."""
    if not text:
        return np.zeros(count, np.bool_)
    unpacking, nbytes = zlib.decompressobj(), -(-count // 8)
    try:
        packed = unpacking.decompress(base64.b64decode(text), nbytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(packed) != nbytes:
        raise ValueError(f"not {count} bits")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(np.bool_)


def _fields(of: Superblock | Point) -> Json:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}


def encode(block: Superblock) -> bytes:
    """A head as text, of any length."""
    return json.dumps({"format": FORMAT, **_fields(block)}, default=_fields).encode()


def slot(text: bytes, sequence: int, area: Extents = ()) -> bytes:
    """One slot: the head itself if it fits, else where in the file it lies."""
    if len(text) > ROOM:
        assert sum(nbytes for _, nbytes in area) == len(text)
        digest = xxhash.xxh3_128_hexdigest(text)
        text = json.dumps({"format": FORMAT, "area": list(area), "xxh3_128": digest}).encode()
    checksum = xxhash.xxh3_64_intdigest(text, seed=sequence)
    head = _HEAD.pack(_MAGIC, sequence, len(text), checksum)
    return (head + text).ljust(SLOT_NBYTES, b"\0")


def _decode(file: BinaryIO, path: str) -> tuple[Superblock, int]:
    """The newest whole head and its sequence number."""
    for sequence, head in sorted(_whole_slots(file, path), key=lambda entry: -entry[0]):
        if head.number("format", least=1) > FORMAT:
            raise FormatError(f"{path} was written by a newer release of emberkeep: upgrade")
        whole = _from_area(file, path, head) if "area" in head else head
        if whole is not None:
            return _superblock(whole), sequence
    raise DamageError(
        f"{path} has no readable head: it is no tier, or both of its heads are damaged; "
        "nothing was changed. Name another path, or remove the file and restore a version of a "
        "repository",
        name=path,
    )


def _whole_slots(file: BinaryIO, path: str) -> list[tuple[int, Fields]]:
    """What the slots say, each with its sequence number."""
    slots = file.read(2 * SLOT_NBYTES)
    found: list[tuple[int, Fields]] = []
    for at in (0, SLOT_NBYTES):
        taken = slots[at : at + SLOT_NBYTES]
        if len(taken) < _HEAD.size:
            continue
        magic, sequence, length, checksum = _HEAD.unpack_from(taken)
        text = taken[_HEAD.size : _HEAD.size + length]
        if magic == _MAGIC and xxhash.xxh3_64_intdigest(text, seed=sequence) == checksum:
            found.append((sequence, Fields(path, parse(path, text))))
    return found


def is_newest(path: str) -> bool:
    """Whether the head that `read_head` finds is for certain the last one that was written: both
    slots are whole, and the other one has the head before it."""
    with open(path, "rb") as file:
        numbers = sorted(sequence for sequence, _ in _whole_slots(file, path))
        file.seek(0)
        newest = _decode(file, path)[1]
    return numbers == [newest - 1, newest]


def _from_area(file: BinaryIO, path: str, place: Fields) -> Fields | None:
    """A head that lies in segments; None if it is torn."""
    size = os.fstat(file.fileno()).st_size
    extents = _pairs(place, "area")
    if any(offset > size for offset, _ in extents) or sum(n for _, n in extents) > size:
        return None
    text = b""
    for offset, nbytes in extents:
        file.seek(offset)
        text += file.read(nbytes)
    if xxhash.xxh3_128_hexdigest(text) != place.text("xxh3_128"):
        return None
    return Fields(path, parse(path, text))


def _superblock(head: Fields) -> Superblock:
    """From the fields of a head; those of the first format have no areas."""
    segments = head.number("segments", most=2**32)
    areas = head.list_of("areas", list) if "areas" in head else [[], []]
    numbers = [segment for area in areas for segment in area]
    if len(areas) != 2 or any(type(n) is not int or not 0 <= n < segments for n in numbers):
        raise head.wrong("areas", "two lists of segments")
    return Superblock(
        schema=head.plain("schema"),
        salt=head.number("salt"),
        segment_nbytes=head.number("segment_nbytes", least=1, most=2**40),
        segments=segments,
        free=head.text("free"),
        first_life=head.number("first_life", least=1, most=2**32),
        lives=tuple(_pairs(head, "lives")),
        prepared=_point(head.object("prepared")) if "prepared" in head else None,
        committed=_point(head.object("committed")) if "committed" in head else None,
        synced=head.number("synced") if "synced" in head else 0,
        areas=(tuple(areas[0]), tuple(areas[1])),
    )


def _pairs(head: Fields, field: str) -> list[tuple[int, int]]:
    """A list of pairs of numbers."""
    pairs = head.list_of(field, list)
    for pair in pairs:
        if [type(number) for number in pair] != [int, int] or not (
            0 <= min(pair) <= max(pair) <= MOST
        ):
            raise head.wrong(field, "pairs of numbers")
    return [(first, second) for first, second in pairs]


def _point(point: Fields) -> Point:
    nonce = point.text("nonce") if "nonce" in point else ""
    if nonce and not _NONCE.match(nonce):
        raise point.wrong("nonce", "a nonce")
    home = point.text("home") if "home" in point else ""
    if "\0" in home:
        raise point.wrong("home", "a path")
    return Point(
        batch=point.number("batch", most=10**100), stamp=point.number("stamp"),
        sequence=point.number("sequence"), rows=point.number("rows"),
        floor=point.number("floor"), tables=point.plain("tables"), nonce=nonce, home=home,
        run=point.text("run") if "run" in point else "",
    )  # fmt: skip


def extents_of(area: Sequence[int], segment_nbytes: int, nbytes: int) -> list[tuple[int, int]]:
    """Where a head of so many bytes lies in the segments of its area; nowhere if its slot does."""
    if nbytes <= ROOM:
        return []
    extents = []
    for place, segment in enumerate(area):
        count = min(segment_nbytes, nbytes - place * segment_nbytes)
        if count > 0:
            extents.append((START + segment * segment_nbytes, count))
    return extents


def create(
    path: str, schema: Json, segment_nbytes: int, area_nbytes: int, disk: Disk
) -> tuple[Superblock, int]:
    """A new file without rows; it stands under its name once it is whole.

    `area_nbytes` are those that a segment has for a head.
    """
    head = Superblock(schema=schema, salt=secrets.randbits(63), segment_nbytes=segment_nbytes)
    while len(text := encode(head)) > max(ROOM, head.segments * area_nbytes):
        area = tuple(range(head.segments + 1))
        head = replace(head, areas=(area, ()), segments=len(area))
    extents = extents_of(head.areas[0], area_nbytes, len(text))
    content = slot(text, 1, extents).ljust(START, b"\0")
    content += (text if extents else b"").ljust(head.segments * area_nbytes, b"\0")
    staged = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        disk.unlink(staged)
    handle = disk.create(staged)
    try:
        disk.write(handle, memoryview(content))
        disk.sync(handle)
    finally:
        disk.close(handle)
    disk.rename(staged, path)
    disk.sync_directory(os.path.dirname(path))
    return head, 1


def read_head(path: str) -> tuple[Superblock, int]:
    """The newest whole head of a file and its sequence number."""
    with open(path, "rb") as file:
        return _decode(file, path)


def check_schema(path: str, written: Json, wanted: Json) -> None:
    """Refuses a file of another model, by name."""
    for key in sorted({*written, *wanted}):
        if written.get(key) != wanted.get(key):
            raise StateError(
                f"{path} belongs to another model: its {key} is {written.get(key)!r}, this model's "
                f"{wanted.get(key)!r}; nothing was changed. Name another path, or build the model "
                "as it was"
            )

"""What the repository asks of a store, and nothing more.

A store maps names to byte strings. Its one unusual duty is `put_if_absent`: of any number of
callers that create the same name at once, exactly one wins. The commit protocol rests on that
call; everything else could be done by any file server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from emberkeep.errors import ConfigError

Buffer: TypeAlias = bytes | bytearray | memoryview

# Segments never begin with a dot: that excludes "." and "..", and leaves dotted names to the
# stores themselves (the local store keeps unfinished puts under one).
SEGMENT = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9_=.-]*\Z")
_LONGEST_NAME = 400

_READS_AT_ONCE = 16
_LONGEST_PART, _SHORTEST_PART = 8 * 2**20, 2**20
_MOST_NBYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobInfo:
    """One line of a listing. `modified` is UTC, by the store's clock."""

    name: str
    size: int
    modified: datetime


class BlobStore(Protocol):
    """Named objects, written whole and never changed in part.

    Every implementation guarantees:

    - An object appears under its name complete or not at all, and is durable when the call that
      wrote it returns. A listing or read that begins later sees it.
    - A call that raises `StorageError` may or may not have taken effect; the store decides
      nothing for its caller.
    - All methods may be called from several threads.

    A store may have `reads_at_once`, the number of reads at once that pay off (`reads_at_once`),
    and `calls_at_once`, an executor, if each call waits for a network (`calls`).

    `emberkeep.testing.StoreContract` is the same list as tests.
    """

    @property
    def url(self) -> str:
        """The root, for messages; holds no credentials."""
        ...

    def put(self, name: str, data: Buffer | Iterable[Buffer]) -> int:
        """Writes an object, replacing one of that name; returns its size.

        An iterable is streamed in bounded memory; it must not change a buffer after handing it
        over. If it raises, nothing appears under the name and its exception comes through.
        """
        ...

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """Creates an object unless the name is taken; True if this call created it.

        False says only that the name is taken, durably. The holder may be this very call, when
        its first answer was lost and a layer below retried: callers compare the content.
        """
        ...

    def get(self, name: str) -> bytes:
        """The whole object; `MissingObjectError` if there is none."""
        ...

    def get_range(self, name: str, start: int, length: int) -> Buffer:
        """Bytes [start, start + length), cut off at the object's end; nobody else has them."""
        ...

    def size(self, name: str) -> int:
        """The object's size; `MissingObjectError` if there is none."""
        ...

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Objects below a directory-like prefix ("" or "a/b"), in no particular order."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects, durably when it returns; absent names are fine."""
        ...

    def sweep(self, *, older_than: timedelta) -> int:
        """Removes what interrupted puts left behind outside the name space; returns how many.

        `older_than` protects the puts that are under way.
        """
        ...


@runtime_checkable
class KeepsReserve(Protocol):
    """A store that holds room back, so that gc works when it is full."""

    def keep_reserve(self) -> None: ...

    def spending_reserve(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class ReadsInto(Protocol):
    """A store that can read where its caller wants the bytes to be."""

    def read_into(self, name: str, start: int, into: memoryview) -> int:
        """Fills `into` with bytes from `start` on; how many there were before the object ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How much of a store is read at once: `depth` reads, of `nbytes` together.

    Reads wait for a disk or a network, not for a core: how many there are does not depend on cores.
    Memory that is taken for bytes which were not used yet is bounded by `nbytes`, but for a single
    read that is longer.
    """

    depth: int
    nbytes: int

    def __post_init__(self) -> None:
        for name in ("depth", "nbytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"read_{name} must be 1 or more, not {getattr(self, name)}")

    @classmethod
    def of(
        cls, store: BlobStore | None, depth: int | None = None, nbytes: int | None = None
    ) -> Reading:
        """What suits a store, where nothing else is given."""
        depth = reads_at_once(store) if depth is None else depth
        if nbytes is None:
            nbytes = min(depth * _LONGEST_PART, _MOST_NBYTES)
        return cls(depth=depth, nbytes=nbytes)

    @property
    def part_nbytes(self) -> int:
        """The length of reads of which as many as may be are under way; whole blocks of a disk."""
        fitting = min(self.nbytes // self.depth, _LONGEST_PART)
        return max(fitting // _SHORTEST_PART, 1) * _SHORTEST_PART


def reads_at_once(store: BlobStore | None) -> int:
    """How many reads of a store pay off at once, as its `reads_at_once` says: 16 unless it does."""
    return int(getattr(store, "reads_at_once", _READS_AT_ONCE))


@runtime_checkable
class ListsNames(Protocol):
    """A store in which names alone are found sooner than sizes and times."""

    def names(self, directory: str) -> Iterator[str]:
        """What stands directly below a directory, which may be directories too."""
        ...


class Part(NamedTuple):
    """Part of an object, from `start` on, and the memory that it shall fill."""

    name: str
    start: int
    into: memoryview


@runtime_checkable
class ReadsParts(Protocol):
    """A store in which parts of objects are read sooner together than one after the other.

    It may have `reads_together`: whether one call has as many reads under way as pay off, where
    places and memory are whole blocks of 4096 bytes."""

    def read_parts(self, parts: Sequence[Part]) -> list[int]:
        """`ReadsInto.read_into` of each."""
        ...


def read_parts(store: BlobStore, parts: Sequence[Part]) -> list[int]:
    """`ReadsParts.read_parts` of any store."""
    if isinstance(store, ReadsParts):
        return store.read_parts(parts)
    return [read_into(store, *part) for part in parts]


def read_into(store: BlobStore, name: str, start: int, into: memoryview) -> int:
    """`ReadsInto.read_into` of any store: others give bytes of their own, which are copied."""
    if isinstance(store, ReadsInto):
        return store.read_into(name, start, into)
    data = memoryview(store.get_range(name, start, len(into)))
    into[: len(data)] = data
    return len(data)


def check_name(name: str) -> str:
    """The name itself, if it cannot leave the root on any backend.

    Names are relative, slash-separated, and limited to letters, digits, `_`, `-`, `=` and inner
    dots: portable over file systems, URLs and object stores without any escaping.
    """
    if len(name) > _LONGEST_NAME or not all(map(is_segment, name.split("/"))):
        raise ConfigError(
            f"{name!r} cannot name an object: use relative slash-separated parts of letters, "
            f"digits, '_', '-', '=' and inner dots, at most {_LONGEST_NAME} characters"
        )
    return name


def is_segment(text: str) -> bool:
    """Whether it may stand between the slashes of a name."""
    return SEGMENT.match(text) is not None


def check_range(name: str, start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise ConfigError(f"{name}: range start {start} and length {length} must not be negative")


def as_buffers(data: Buffer | Iterable[Buffer]) -> Iterator[memoryview]:
    """The data as flat byte views, so that backends handle one shape."""
    pieces: Iterable[Buffer] = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes:
            yield view.cast("B")

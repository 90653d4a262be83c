"""What a shard sends the hosts of its parity: one numbered stream, in order, to all of them.

Every message goes to every host of its source, whether it concerns that host or not: the number
of the last one that a host holds then says exactly which changes it has seen, and all hosts see
whatever the source says at the same point of its history.

A write that is too large for one message is cut into several, next to each other in the stream. It
is settled as a whole, and undone as a whole. The alternative, one message in several frames that a
host puts together, would leave streams as they were, but take room for all of it twice on either
side, and be one wait for all of it: as messages, each part that a host holds is progress.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from emberkeep._types import I64, U8, U32, Bools, Words
from emberkeep.wire.protocol import FRAME_NBYTES

Layer: TypeAlias = Literal["records", "marks"]
LAYERS: tuple[Layer, Layer] = ("records", "marks")
State: TypeAlias = tuple[int, ...]
PushNumber: TypeAlias = tuple[str, int]

MESSAGE_NBYTES = FRAME_NBYTES
"""What changes or fills more bytes of rows than this goes in several messages."""

_ROW_NUMBER_NBYTES = 8
_DECODE_BITS = 20


@dataclass(frozen=True, slots=True)
class Shape:
    """What is coded of one slab.

    A trained row's *record* is all its planes, in 32-bit words; its *marks* are a byte 1 and, in a
    slab with dynamic tables, its id. Both are zeros for a row that is not trained.
    """

    rows: int
    """The most rows that any shard has in this slab."""
    words: int
    mark_nbytes: int

    @property
    def message_rows(self) -> int:
        """How many rows a message has room for."""
        row_nbytes = _ROW_NUMBER_NBYTES + 4 * self.words + self.mark_nbytes
        return max(1, MESSAGE_NBYTES // row_nbytes)


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows of one slab and by what they changed, old XOR new, grouped by slot.

    Row `stripes[i] * k + s` for i in `bounds[s]:bounds[s + 1]`; likewise the rows whose marks
    changed, which are few.
    """

    slab: int
    stripes: I64
    bounds: I64
    records: U32
    marked: I64
    marked_bounds: I64
    marks: U8

    def of_layer(self, layer: Layer) -> tuple[I64, I64, Words]:
        """Bounds by slot, stripes and differences of one layer."""
        if layer == "records":
            return self.bounds, self.stripes, self.records
        return self.marked_bounds, self.marked, self.marks

    @property
    def nbytes(self) -> int:
        return self.records.nbytes + self.stripes.nbytes + self.marks.nbytes + self.marked.nbytes

    def pieces(self) -> Iterator[Changed]:
        """The same in pieces that have about as much in them as a message may."""
        count = -(-self.nbytes // MESSAGE_NBYTES)
        rows, marks = (-(-where.size // max(1, count)) for where in (self.stripes, self.marked))
        for i in range(count):
            bounds, of_rows = _within(self.bounds, i * rows, rows)
            marked_bounds, of_marks = _within(self.marked_bounds, i * marks, marks)
            yield Changed(
                self.slab, self.stripes[of_rows], bounds, self.records[of_rows],
                self.marked[of_marks], marked_bounds, self.marks[of_marks],
            )  # fmt: skip


def _within(bounds: I64, first: int, count: int) -> tuple[I64, slice]:
    """Bounds of some of the rows alone, and which those are."""
    return np.clip(bounds - first, 0, count), slice(first, first + count)


@dataclass(frozen=True, slots=True)
class Differences:
    """What one write changed; `push` names the worker's push that it was, if it was one.

    `state` is what the shard knows beside its rows, after the write.

    A large write is in several messages (`of_write`): all but the last have `more`, and name no
    push. Where a stream ends after one of those, it is taken back to before the first.
    """

    parts: tuple[Changed, ...]
    push: PushNumber | None
    state: State
    more: bool = False
    """Whether the next message goes on with the same write."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def of_write(parts: Sequence[Changed], push: PushNumber | None, state: State) -> list[Differences]:
    """What is said of a write: one message, or several where it changed much."""
    if sum(part.nbytes for part in parts) <= MESSAGE_NBYTES:
        return [Differences(tuple(parts), push, state)]
    cut: list[list[Changed]] = [[]]
    nbytes = 0
    for piece in (piece for part in parts for piece in part.pieces()):
        if cut[-1] and nbytes + piece.nbytes > MESSAGE_NBYTES:
            cut.append([])
            nbytes = 0
        cut[-1].append(piece)
        nbytes += piece.nbytes
    *some, last = map(tuple, cut)
    return [
        *(Differences(pieces, None, state, more=True) for pieces in some),
        Differences(last, push, state),
    ]


@dataclass(frozen=True, slots=True)
class Point:
    """Where a stream stands: the last push of each worker, and the shard's state after them."""

    ledger: Mapping[str, int]
    state: State


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows to be decoded: the stripes of one group, ascending, in one layer of one slab."""

    number: int
    group: int
    slab: int
    layer: Layer
    stripes: I64


def decode_numbers() -> Iterator[int]:
    """Names for decodes that no other coordinator, nor an earlier life of this one, has used."""
    return itertools.count(secrets.randbits(42) << _DECODE_BITS)


def is_earlier(number: int, than: int) -> bool:
    """Whether the same coordinator has named one decode before another."""
    return number < than and number >> _DECODE_BITS == than >> _DECODE_BITS


@dataclass(frozen=True, slots=True)
class Syndrome:
    """What one host makes of a decode: the sum of the unknown rows of each stripe, and by slot
    which those are."""

    total: Words
    unknown: Mapping[int, Bools]


@dataclass(frozen=True, slots=True)
class Standing:
    """What a shard has yet to get back."""

    lost_K: tuple[bool, ...]
    """By slot: whether rows are not back."""
    blind: bool
    """Whether it does not even know which rows it had."""
    complete: bool
    """Whether all parity that it holds is there."""
    streams: Mapping[int, tuple[int, int]]
    """By source: the number after which its stream is followed, and the last one held."""
    goes_to: Mapping[int, tuple[int, ...]]
    """By source, of those that are followed and of the shard itself: the hosts that its stream
    goes to, as the last message says that is held. Nothing is known of a stream without one."""


@dataclass(frozen=True, slots=True)
class Values:
    """The rows that one member has in a decode; zeros where it is still without them itself, and
    nothing where it has none of them."""

    decode: int
    slot: int
    values: Words | None
    unknown: Bools

    @property
    def nbytes(self) -> int:
        return self.unknown.nbytes + (0 if self.values is None else self.values.nbytes)


@dataclass(frozen=True, slots=True)
class Fill:
    """All trained rows that one member has in stripes start..stop of a group, for a new host."""

    host: int
    p: int
    slab: int
    slot: int
    start: int
    stop: int
    stripes: I64
    records: U32
    marks: U8

    @property
    def nbytes(self) -> int:
        return self.records.nbytes + self.marks.nbytes


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a stream. `settled` is the number that all live hosts were known to hold,
    `goes_to` are the hosts that the stream goes to from this message on."""

    source: int
    epoch: int
    number: int
    settled: int
    body: Differences | Values | Fill
    goes_to: tuple[int, ...] = ()

"""The receiving side of streams: the parity that one shard holds of the rows of others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from emberkeep._types import I64, U8, U32, Bools, Words
from emberkeep.erasure.coded_slabs import SlabRows
from emberkeep.erasure.codes import Code, Placement, products
from emberkeep.erasure.messages import (
    LAYERS,
    Changed,
    Differences,
    Fill,
    Message,
    Point,
    Shape,
    State,
    Syndrome,
    Values,
    Wanted,
    is_earlier,
)
from emberkeep.errors import StreamError
from emberkeep.kernels import galois
from emberkeep.runtime.memory import lazy_zeros, zero_again
from emberkeep.runtime.pool import Job, Pool, spans

# Fewer rows than this are not worth a thread: one adds a row in 25 ns, and to have another help
# takes some tens of microseconds.
_LEAST_ROWS = 4096

Sum: TypeAlias = tuple[U32, I64, int, U32, np.uint32]
"""What `galois.add_product` is to add to the parity of one host."""


@dataclass(slots=True)
class _Sums:
    """What is to be added to the parity of one host, and to its decodes.

    All that takes memory is done when a sum is queued: to add it takes none that matters.
    """

    records: list[Sum] = field(default_factory=list)
    marks: list[tuple[U8, I64, U8]] = field(default_factory=list)

    def queue(self, target: Words, at: I64, first: int, values: Words, coefficient: int) -> None:
        """target[first + at[i]] += coefficient * values[i]."""
        if values.shape != (at.size, target.shape[1]) or values.dtype != target.dtype:
            raise ValueError(f"{values.shape} of {values.dtype} for {at.size} parity rows")
        if values.dtype == np.uint32:
            self.records.append((target, at, first, values, np.uint32(coefficient)))
        else:
            self.marks.append((target, at + first, products(coefficient)[values]))

    def extend(self, others: _Sums) -> None:
        self.records += others.records
        self.marks += others.marks


@dataclass(slots=True)
class _Stream:
    epoch: int
    base: int  # what came before is in no message that is kept, and cannot be undone
    last: int
    whole: int  # the last one that ends a write
    ledger: dict[str, int]
    state: State
    sealed: bool = False
    goes_to: tuple[int, ...] | None = None  # the hosts that the last message names
    # What may have to be undone: the changes, and the ledger's entry and the state before them.
    retained: deque[tuple[Message, int | None, State]] = field(default_factory=deque)


@dataclass(slots=True)
class _Decode:
    """A decode as one host sees it: what live members have, and whose rows are unknown."""

    wanted: Wanted
    p: int
    total: Words
    unknown: dict[int, Bools] = field(default_factory=dict)


class ParityHost:
    """Parity rows 0..r-1 for every stripe number, fed by the streams of k + r - 1 sources.

    Thread-safe, with a lock of its own under which it calls nobody. A host that starts in the
    place of a lost one is not `complete`: its parity is filled by the members, stripe by stripe,
    and a difference beyond what a member has filled is dropped, because the row that it belongs
    to is yet to be sent.

    A change that fails before anything was added changes nothing, and may be made again. One that
    fails half-way puts its source *in doubt*: before anybody looks at it, the parity that codes
    rows of that source starts over. So what counts as whole is the code of all that is held.
    """

    def __init__(
        self, index: int, placement: Placement, shapes: Sequence[Shape], *, complete: bool = True,
        pool: Pool | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self.pool = pool
        self.placement = placement
        self.code = Code(placement.k, placement.r)
        self.shapes = tuple(shapes)
        self.stripes = [placement.stripes(shape.rows) for shape in self.shapes]
        self.lock = threading.Lock()
        self.updates = 0
        self._slots = {s: placement.slots_on(s, index) for s in placement.sources(index)}
        self._streams: dict[int, _Stream] = {}
        self._decodes: dict[int, _Decode] = {}
        # Stripes that a member has filled, by (p, slab, source); without an entry, all.
        self._filled: dict[tuple[int, int, int], int] = {}
        # Sources of which parity may hold a part of a change: from before it until after it.
        self._in_doubt: set[int] = set()
        self._records: list[U32] = []
        self._marks: list[U8] = []
        for shape, stripes in zip(self.shapes, self.stripes, strict=True):
            rows = placement.r * stripes
            self._records.append(lazy_zeros((rows, shape.words), np.uint32))
            self._marks.append(lazy_zeros((rows, shape.mark_nbytes), np.uint8))
        if not complete:
            for p in range(placement.r):
                self._begin_filling(p)

    @contextmanager
    def _sound(self) -> Iterator[None]:
        """The lock, with no source in doubt."""
        with self.lock:
            self._end_doubt()
            yield

    def _end_doubt(self) -> None:
        """Starts over what a change that failed half-way may have changed; with the lock."""
        for source in list(self._in_doubt):
            stream = self._streams.get(source)
            while stream is not None and _newest(stream) > stream.last:
                _take_back(stream)
            self._start_filling_over(source)

    # -- streams ---------------------------------------------------------------------------------

    def follow(self, source: int, epoch: int, number: int, point: Point) -> None:
        """Begins to take the stream of a source's epoch, after its message `number`."""
        with self.lock:
            self._streams[source] = _Stream(
                epoch, number, number, number, dict(point.ledger), point.state
            )

    def receive(self, message: Message) -> int:
        """Takes the next message of a stream; returns the number that is now held.

        What was received before changes nothing. A message of another epoch, one after a seal
        and one that leaves a gap are refused. One that fails, for whatever reason, may be sent
        again.
        """
        (held,) = receive_together([(self, message)], self.pool)
        return held

    def _receive(self, message: Message, sums: _Sums) -> int:
        """`receive`, with the sums left to the caller, who holds the lock. The source is in doubt
        until they are added."""
        stream = self._streams.get(message.source)
        if stream is None or stream.epoch != message.epoch or stream.sealed:
            raise StreamError(
                f"shard {self.index} does not follow epoch {message.epoch} of shard "
                f"{message.source}: the sender was replaced and must stop"
            )
        if message.number <= stream.last:
            return stream.last
        if message.number != stream.last + 1:
            raise StreamError(
                f"shard {self.index} holds {stream.last} of the stream of shard "
                f"{message.source} and was sent {message.number}: send what is between"
            )
        added = self._sums_of(message)
        self._in_doubt.add(message.source)
        self._note(message, stream)
        sums.extend(added)
        if not (isinstance(message.body, Differences) and message.body.more):
            stream.whole = message.number
        stream.last = message.number
        stream.goes_to = message.goes_to
        while stream.retained and stream.retained[0][0].number <= message.settled:
            stream.retained.popleft()
        return stream.last

    def settle(self, source: int, number: int) -> None:
        """Everything up to `number` is held by all live hosts and will never be undone."""
        with self.lock:
            retained = self._streams[source].retained
            while retained and retained[0][0].number <= number:
                retained.popleft()

    def seal(self, source: int) -> int:
        """Takes nothing more of a source that is lost; returns the last number that it sent. Of a
        write whose last message is not there, nothing counts: it can only be undone."""
        with self.lock:
            self._streams[source].sealed = True
            return self._streams[source].whole

    def roll(self, source: int, number: int) -> Point:
        """Undoes what a sealed stream brought after `number`. Doing it again changes nothing.

        A host that is being filled was not asked which number that is, so what it has of the
        source's rows may end before it, as may that of one which the source had left out; one that
        was filled may have started after it, while others were behind. Parity that the source is a
        member of starts over then.
        """
        with self._sound():
            stream = self._streams[source]
            behind = stream.last < number
            while _newest(stream) > number:
                sums = self._sums_of_changes(stream.retained[-1][0])
                self._in_doubt.add(source)
                _take_back(stream)
                _add_all([sums], self.pool)
                self._in_doubt.discard(source)
            stream.last = stream.whole = number
            if self._filled or behind or number < stream.base:
                self._start_filling_over(source)
            return Point(dict(stream.ledger), stream.state)

    def refill(self, source: int) -> None:
        """Parity that codes rows of a source starts over: the rows came from a repository, or the
        source had left this host out."""
        with self._sound():
            self._start_filling_over(source)

    def _start_filling_over(self, source: int) -> None:
        self._in_doubt.add(source)
        for p in range(self.placement.r):
            if source in self.placement.members(self.placement.group_on(self.index, p)):
                self._zero(p)
                self._begin_filling(p)
        self._in_doubt.discard(source)

    def clear(self) -> None:
        """All rows of all shards are untrained: so is their parity, which is whole then."""
        with self._sound():
            self._in_doubt.update(self._slots)
            for p in range(self.placement.r):
                self._zero(p)
            self._filled.clear()
            self._decodes.clear()
            self._in_doubt.clear()

    def start_over(self) -> None:
        """Nothing of the parity is right any more: all of it is to be filled again."""
        with self.lock:
            self._in_doubt.update(self._slots)
            self._end_doubt()

    def let_go(self) -> None:
        """Lets go of all memory: the shard is lost."""
        with self.lock:
            self._records, self._marks, self._streams, self._decodes = [], [], {}, {}
            self._in_doubt.clear()

    def _sums_of(self, message: Message) -> _Sums:
        """What a message adds. Nothing has changed yet."""
        body = message.body
        if isinstance(body, Differences):
            return self._sums_of_changes(message, follow=True)
        sums = _Sums()
        if isinstance(body, Values):
            self._add_values(body, sums)
        elif self._fills(message.source, body):
            self._add(body.p, body.slot, body.slab, body.stripes, body.records, sums)
            self._add(body.p, body.slot, body.slab, body.stripes, body.marks, sums)
        return sums

    def _sums_of_changes(self, message: Message, *, follow: bool = False) -> _Sums:
        """What differences add or, once more, take back; decodes may have to `follow` them."""
        assert isinstance(message.body, Differences)
        sums = _Sums()
        for part in message.body.parts:
            self._add_changed(message.source, part, sums)
            if follow and self._decodes:
                self._follow_changed(message.source, part, sums)
        return sums

    def _note(self, message: Message, stream: _Stream) -> None:
        """Takes down what a message says beside its sums."""
        body = message.body
        if isinstance(body, Differences):
            push = None if body.push is None else stream.ledger.get(body.push[0])
            stream.retained.append((message, push, stream.state))
            if body.push is not None:
                stream.ledger[body.push[0]] = body.push[1]
            stream.state = body.state
        elif isinstance(body, Values):
            if body.decode in self._decodes:
                self._decodes[body.decode].unknown.setdefault(body.slot, body.unknown)
        elif self._fills(message.source, body):
            self._fill_until((body.p, body.slab, message.source), body.stop)

    # -- parity ----------------------------------------------------------------------------------

    def _add_changed(self, source: int, part: Changed, sums: _Sums) -> None:
        for p, slot in self._slots[source]:
            for layer in LAYERS:
                bounds, stripes, values = part.of_layer(layer)
                low, high = int(bounds[slot]), int(bounds[slot + 1])
                if low < high:
                    stripes, values = stripes[low:high], values[low:high]
                    filled = self._filled.get((p, part.slab, source)) if self._filled else None
                    if filled is not None:
                        present = stripes < filled
                        stripes, values = stripes[present], values[present]
                    self._add(p, slot, part.slab, stripes, values, sums)
            self.updates += int(part.bounds[slot + 1] - part.bounds[slot])

    def _add(self, p: int, slot: int, slab: int, stripes: I64, values: Words, sums: _Sums) -> None:
        target: Words = (self._records if values.dtype == np.uint32 else self._marks)[slab]
        first, coefficient = p * self.stripes[slab], self.code.coefficients[p][slot]
        sums.queue(target, stripes, first, values, coefficient)

    def _zero(self, p: int) -> None:
        for slab, stripes in enumerate(self.stripes):
            part = slice(p * stripes, (p + 1) * stripes)
            zero_again(self._records[slab][part])
            zero_again(self._marks[slab][part])

    def _begin_filling(self, p: int) -> None:
        # What has been summed up for them belongs to parity that is gone.
        self._decodes = {n: decode for n, decode in self._decodes.items() if decode.p != p}
        for slab in range(len(self.stripes)):
            for member in self.placement.members(self.placement.group_on(self.index, p)):
                self._filled[p, slab, member] = 0

    def _fills(self, source: int, fill: Fill) -> bool:
        """Whether it is for this host, and not of before the parity that it fills started over."""
        key = (fill.p, fill.slab, source)
        return fill.host == self.index and self._filled.get(key) == fill.start

    def fill_from(
        self, p: int, slab: int, source: int, start: int, stop: int, rows: SlabRows
    ) -> None:
        """Adds all rows that a member has in stripes start..stop, straight from where they are.

        Nobody changes them meanwhile, and every change of them before was received.
        """
        slot = self.placement.slot(source, self.placement.group_on(self.index, p))
        with self._sound():
            stripes, sums = rows.trained(slab, slot, start, stop), _Sums()
            marks = rows.values(slab, "marks", stripes * self.placement.k + slot)
            self._add(p, slot, slab, stripes, marks, sums)
            first, coefficient = p * self.stripes[slab], self.code.coefficients[p][slot]
            self._in_doubt.add(source)
            rows.add_records(slab, slot, stripes, coefficient, self._records[slab], first)
            _add_all([sums], self.pool)
            self._fill_until((p, slab, source), stop)
            self._in_doubt.discard(source)

    def parity_records(self, p: int, slab: int) -> tuple[U32, int]:
        """The parity of a slab as it is, and the row at which that of number p begins."""
        return self._records[slab], p * self.stripes[slab]

    def _fill_until(self, key: tuple[int, int, int], stop: int) -> None:
        self._filled[key] = stop
        # A unit is whole when all its members have filled all its slabs, and not before.
        unit = [entry for entry in self._filled if entry[0] == key[0]]
        if all(self._filled[entry] >= self.stripes[entry[1]] for entry in unit):
            for entry in unit:
                del self._filled[entry]

    @property
    def complete(self) -> bool:
        """Whether all parity is there; a host that is not protects nothing yet."""
        with self._sound():
            return not self._filled

    @property
    def unprotected_stripes(self) -> int:
        """Parity rows that some member has yet to fill."""
        with self._sound():
            worst: dict[tuple[int, int], int] = {}
            for (p, slab, _), filled in self._filled.items():
                worst[p, slab] = min(filled, worst.get((p, slab), filled))
            return sum(self.stripes[slab] - filled for (_, slab), filled in worst.items())

    def to_fill(self) -> list[tuple[int, int, int, int]]:
        """(p, slab, source, stripes filled) of what members have yet to send."""
        with self._sound():
            return sorted(
                (p, slab, source, filled)
                for (p, slab, source), filled in self._filled.items()
                if filled < self.stripes[slab]
            )

    @property
    def streams(self) -> dict[int, tuple[int, int]]:
        """By source: the number after which its stream is followed, and the last one held."""
        with self.lock:
            return {source: (stream.base, stream.last) for source, stream in self._streams.items()}

    @property
    def goes_to(self) -> dict[int, tuple[int, ...]]:
        """By source: the hosts that its stream goes to, where a message has said so."""
        with self.lock:
            return {
                source: stream.goes_to
                for source, stream in self._streams.items()
                if stream.goes_to is not None
            }

    def held(self, source: int) -> int:
        """The last number of a source's stream that is held."""
        with self.lock:
            return self._streams[source].last

    # -- decoding --------------------------------------------------------------------------------

    def begin(self, wanted: Sequence[Wanted]) -> None:
        """Opens an accumulator for each decode, once; refused for parity that is being filled."""
        for one in wanted:
            p = (one.group - self.index) % self.placement.n
            like = (self._records if one.layer == "records" else self._marks)[one.slab]
            total = np.zeros((one.stripes.size, like.shape[1]), like.dtype)
            with self._sound():
                if any(key[0] == p for key in self._filled):
                    raise StreamError(
                        f"the parity of group {one.group} on shard {self.index} is being filled: "
                        "no row can be decoded from it yet"
                    )
                self._decodes.setdefault(one.number, _Decode(one, p, total))

    def syndromes(self, numbers: Sequence[int]) -> list[Syndrome | None]:
        """What each decode comes to; None until every member has spoken.

        Whatever members change after that is in both the parity and the accumulator, so the sum
        stays what it was when they spoke. A decode that was dropped is refused.
        """
        return [self._syndrome(number) for number in numbers]

    def _syndrome(self, number: int) -> Syndrome | None:
        with self._sound():
            decode = self._decodes.get(number)
            if decode is None:
                raise StreamError(
                    f"shard {self.index} knows no decode {number}: a shard was lost since it "
                    "began, or its parity started over"
                )
            if len(decode.unknown) < self.placement.k:
                return None
            wanted = decode.wanted
            parity = self._records if wanted.layer == "records" else self._marks
            at = wanted.stripes + decode.p * self.stripes[wanted.slab]
            found = parity[wanted.slab][at]
            found ^= decode.total
            return Syndrome(found, dict(decode.unknown))

    def drop(self, numbers: Sequence[int] | None = None) -> None:
        """Ends decodes, or all of them."""
        with self.lock:
            for number in list(self._decodes) if numbers is None else numbers:
                self._decodes.pop(number, None)

    def end_earlier(self, number: int) -> None:
        """A coordinator that makes one decode after the other begins this one: those before that
        it did not end have failed."""
        with self.lock:
            self._decodes = {n: d for n, d in self._decodes.items() if not is_earlier(n, number)}

    def _add_values(self, body: Values, sums: _Sums) -> None:
        decode = self._decodes.get(body.decode)
        if decode is None or body.slot in decode.unknown:
            return  # once: a second time would take the values out of the sum again
        if body.values is not None:
            coefficient = self.code.coefficients[decode.p][body.slot]
            sums.queue(decode.total, np.arange(len(decode.total)), 0, body.values, coefficient)

    def _follow_changed(self, source: int, part: Changed, sums: _Sums) -> None:
        """Later changes of members that have spoken are in the parity: they go to both."""
        for decode in self._decodes.values():
            wanted = decode.wanted
            slot = self.placement.slot(source, wanted.group)
            if wanted.slab != part.slab or slot not in decode.unknown:
                continue
            bounds, stripes, values = part.of_layer(wanted.layer)
            rows = slice(int(bounds[slot]), int(bounds[slot + 1]))
            stripes, values = stripes[rows], values[rows]
            places = np.searchsorted(wanted.stripes, stripes)
            places = np.minimum(places, wanted.stripes.size - 1)
            found = wanted.stripes[places] == stripes
            if found.any():
                coefficient = self.code.coefficients[decode.p][slot]
                sums.queue(decode.total, places[found], 0, values[found], coefficient)


def _newest(stream: _Stream) -> int:
    """The number of the last change that may have to be undone."""
    return stream.retained[-1][0].number if stream.retained else -1


def _take_back(stream: _Stream) -> None:
    """Undoes what the last change has done to the ledger and the state."""
    message, push, state = stream.retained[-1]
    if isinstance(message.body, Differences) and message.body.push is not None:
        worker = message.body.push[0]
        if push is None:
            stream.ledger.pop(worker, None)
        else:
            stream.ledger[worker] = push
    stream.state = state
    stream.retained.pop()  # last: to do all of it again changes nothing


def receive_together(letters: Sequence[tuple[ParityHost, Message]], pool: Pool | None) -> list[int]:
    """`ParityHost.receive` of several messages to several hosts, whose parity is summed up at
    once."""
    hosts = sorted({host.index: host for host, _ in letters}.items())
    sums = {index: _Sums() for index, _ in hosts}
    numbers: list[int] = []
    refused: StreamError | None = None
    with ExitStack() as held:
        for _, host in hosts:
            held.enter_context(host._sound())
        for host, message in letters:
            try:
                numbers.append(host._receive(message, sums[host.index]))
            except StreamError as error:  # those before it are added all the same
                refused = error
                break
        _add_all(list(sums.values()), pool)
        for _, host in hosts:
            host._in_doubt.clear()
    if refused is not None:
        raise refused
    return numbers


def _add_all(sums_H: Sequence[_Sums], pool: Pool | None) -> None:
    for sums in sums_H:
        for target, at, values in sums.marks:
            target[at] ^= values
    _add_up([sums.records for sums in sums_H], pool)


def _add_up(sums_H: Sequence[Sequence[Sum]], pool: Pool | None) -> None:
    """Adds the sums of hosts: those of one in turn, because they may meet in a row."""
    sums_H = [sums for sums in sums_H if sums]
    rows = sum(one[1].size for sums in sums_H for one in sums)
    if pool is not None and pool.threads > 1 and len(sums_H) > 1 and rows >= _LEAST_ROWS:
        _add_together(sums_H, pool)
        return
    for sums in sums_H:
        for one in sums:
            size = one[1].size
            parts = () if pool is None else spans(size, pool.threads, _LEAST_ROWS)
            if pool is None or len(parts) < 2:
                galois.add_product(0, size, *one)
            else:
                pool.together(Job(galois.write_add_product, parts, one))


def _add_together(sums_H: Sequence[Sequence[Sum]], pool: Pool) -> None:
    """Adds the sums of several hosts in one round, which costs as much as some thousand rows."""
    flat = [one for sums in sums_H for one in sums]
    table = np.array(
        [
            (
                target.ctypes.data, target.shape[0], target.shape[1], stripes.ctypes.data, first,
                values.ctypes.data, stripes.size, int(coefficient),
            )
            for target, stripes, first, values, coefficient in flat
        ],
        np.int64,
    )  # fmt: skip
    bounds, parts = np.cumsum([0, *map(len, sums_H)]), [(h, h + 1) for h in range(len(sums_H))]
    pool.together(Job(galois.write_add_products, parts, (bounds, table)))

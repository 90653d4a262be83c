"""Bringing lost shards back: decides what can be done, and has the members do it, step by step.

A loss is handled in this order: the streams of the lost shards are sealed at every live host and
rolled back to the last message that all whole hosts hold; replacements begin there, in a new
epoch, without rows; marks come back first, so that it is known which rows there were; then the
rows, those that somebody asks for before the others; then the parity that the lost shards held.
Training goes on beside all but the first two.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from emberkeep._types import I64, Bools, Words
from emberkeep.erasure.codes import Code, Placement, products
from emberkeep.erasure.messages import Layer, Point, Shape, Standing, Syndrome, Wanted
from emberkeep.errors import ParityLossError, ShardLostError, StreamError
from emberkeep.kernels import galois
from emberkeep.runtime.pool import ForkLock

# Stripes whose marks are one decode, and the most bytes that the marks of a row have.
_MARK_STRIPES = 2**18
_MARK_NBYTES = 9
# What is decoded in one round takes about so many bytes in any one frame, a quarter of what a frame
# may have, and in the memory of any one member.
_ROUND_NBYTES = 2**26
# Of a stripe: its number, and that of the row that comes back.
_NUMBERS_NBYTES = 16


class HostSide(Protocol):
    """The parity that a shard holds of others; see `ParityHost`."""

    @property
    def stripes(self) -> Sequence[int]: ...

    @property
    def shapes(self) -> Sequence[Shape]: ...

    def seal(self, source: int) -> int: ...

    def roll(self, source: int, number: int) -> Point: ...

    def follow(self, source: int, epoch: int, number: int, point: Point) -> None: ...

    def refill(self, source: int) -> None: ...

    def to_fill(self) -> list[tuple[int, int, int, int]]: ...

    def begin(self, wanted: Sequence[Wanted]) -> None: ...

    def syndromes(self, numbers: Sequence[int]) -> list[Syndrome | None]: ...

    def drop(self, numbers: Sequence[int] | None = None) -> None: ...


class SourceSide(Protocol):
    """A shard's own stream; see `Source`."""

    @property
    def epoch(self) -> int: ...

    def detach(self, host: int) -> None: ...


class MemberSide(Protocol):
    """The parity side of a shard, in this process or behind a wire; see `ParityMember`."""

    @property
    def index(self) -> int: ...

    @property
    def source(self) -> SourceSide: ...

    @property
    def host(self) -> HostSide: ...

    def standing(self) -> Standing: ...

    def attach(self, host: int) -> tuple[int, Point]: ...

    def send_values(self, wanted: Sequence[Wanted]) -> None: ...

    def send_fill(self, host: int, p: int, slab: int, start: int, stop: int) -> bool: ...

    def install(self, slab: int, layer: Layer, rows: I64, values: Words) -> None: ...

    def unknown(self, slab: int, layer: Layer, rows: I64) -> Bools: ...

    def reveal(self) -> None: ...


AnyMember = TypeVar("AnyMember", bound=MemberSide)
Replace = Callable[[int, int, Point], AnyMember]
Calls = Sequence[Callable[[], Any]]
LostStripes: TypeAlias = tuple[int, int, Layer, I64]
"""What is to be decoded: group, slab, layer and stripes, ascending."""


def in_turn(calls: Calls) -> list[Any]:
    """Makes calls one after the other."""
    return [call() for call in calls]


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode under way."""

    wanted: Wanted
    hosts: tuple[int, ...]


class Rebuilder(Generic[AnyMember]):
    """The members of all shards, and what is being done about lost ones.

    `deliver` returns when every message that was posted before has been received; `each` makes
    calls to several members. Calls are serialised: who asks for a row waits at most for the chunk
    that is being decoded. Where there are several coordinators, `numbers` names each decode once
    and for all.
    """

    def __init__(
        self,
        placement: Placement,
        members: Sequence[AnyMember],
        deliver: Callable[[], object],
        *,
        each: Callable[[Calls], list[Any]] = in_turn,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.placement = placement
        self.code = Code(placement.k, placement.r)
        self.members = list(members)
        self.lock = ForkLock()
        self.decoded_rows = 0
        self.decoded_nbytes = 0
        self.left_out: dict[int, set[int]] = {}
        """By shard: hosts that its stream was last known to go on without."""
        self._deliver = deliver
        self._each = each
        self._numbers = itertools.count(1) if numbers is None else numbers

    # -- a loss ----------------------------------------------------------------------------------

    def check(self, lost: Collection[int]) -> dict[int, Standing]:
        """Refuses losses that parity cannot make good; nothing has been changed then. Returns how
        those stand that are not lost; hosts whose parity cannot be used are not complete."""
        standings = self._standings(lost)
        for host in {host for shard in lost for host in self._late(shard, standings)}:
            standings[host] = dataclasses.replace(standings[host], complete=False)
        for group in range(self.placement.n):
            unknown = [
                member
                for slot, member in enumerate(self.placement.members(group))
                if member in lost or standings[member].lost_K[slot]
            ]
            if len(unknown) > len(self._parities(group, standings)):
                named = ", ".join(map(str, sorted({*unknown, *lost})))
                raise ParityLossError(
                    f"shards {named} are lost or not rebuilt yet, more than parity with "
                    f"k={self.placement.k}, r={self.placement.r} can bring back: recover from the "
                    "repository"
                )
        return standings

    def hopeless(self, lost: Collection[int]) -> list[int]:
        """Shards that are not lost, but whose missing rows went with those that are."""
        standings = self._standings(lost)
        return [index for index, standing in standings.items() if any(standing.lost_K)]

    def _standings(
        self, lost: Collection[int] = (), *, silent: bool = False
    ) -> dict[int, Standing]:
        """How all members stand that are not lost; some may be `silent`. A host that a stream goes
        on without is not complete, whatever it believes."""
        living = [member for member in self.members if member.index not in lost]
        asked = [partial(_unless_silent, m) if silent else m.standing for m in living]
        found = zip(living, self._each(asked), strict=True)
        standings = {m.index: standing for m, standing in found if standing is not None}
        for shard in range(self.placement.n):
            for host in self._left_out(shard, standings):
                standings[host] = dataclasses.replace(standings[host], complete=False)
        return standings

    def _left_out(self, shard: int, standings: dict[int, Standing]) -> list[int]:
        """The live hosts that a shard's stream does not go to: as it says itself or, of a lost
        one, as the host says that holds the most of it."""
        hosts = [host for host in self.placement.hosts(shard) if host in standings]
        gone: set[int] = set()
        if shard in standings:
            goes_to = standings[shard].goes_to[shard]
        else:
            gone = self.left_out.get(shard, gone)
            heard = [standings[h] for h in hosts if shard in standings[h].goes_to]
            newest = max(heard, key=lambda standing: standing.streams[shard][1], default=None)
            goes_to = tuple(hosts) if newest is None else newest.goes_to[shard]
        return [host for host in hosts if host in gone or host not in goes_to]

    def _parities(self, group: int, standings: dict[int, Standing]) -> list[int]:
        """The numbers of a group's parity rows that are whole."""
        hosts = [self.placement.host(group, p) for p in range(self.placement.r)]
        return [p for p, host in enumerate(hosts) if host in standings and standings[host].complete]

    def spares(self, shard: int, hosts: Collection[int]) -> bool:
        """Whether all rows that a shard has lost can be decoded without some hosts."""
        standings = self._standings(silent=True)
        for group, own in self.placement.groups(shard):
            lost = [
                member not in standings or standings[member].lost_K[slot]
                for slot, member in enumerate(self.placement.members(group))
            ]
            left = [
                p
                for p in self._parities(group, standings)
                if self.placement.host(group, p) not in hosts
            ]
            if lost[own] and sum(lost) > len(left):
                return False
        return True

    def _late(self, shard: int, standings: dict[int, Standing]) -> list[int]:
        """The hosts whose stream of a lost shard began after what others hold of it: they were
        filled with rows as nobody can have them any more."""
        hosts = [host for host in self.placement.hosts(shard) if host in standings]
        streams = {
            host: standings[host].streams[shard] for host in hosts if standings[host].complete
        }
        number = min((last for _, last in streams.values()), default=0)
        return [host for host, (base, _) in streams.items() if base > number]

    def recover(self, lost: Collection[int], replace: Replace[AnyMember]) -> dict[int, Point]:
        """Puts replacements in the place of lost shards; where each of their streams goes on.

        `replace(shard, number, point)` makes the member of an empty shard, in a new epoch, whose
        stream goes on after `number` and whose host is not complete. What the lost shards had
        done after that point is undone everywhere, and must be sent to them again.
        """
        with self.lock:
            self.check(lost)
            # What they may have said until now; nothing more is heard of them from here on.
            held_S = {shard: self._seal(shard, lost) for shard in lost}
            standings = self.check(lost)
            points = {shard: self._roll_back(shard, held_S[shard], standings) for shard in lost}
            self._forget(lost)
            for shard in lost:
                self.members[shard] = replace(shard, *points[shard])
            for shard in lost:
                self._join(shard, lost)
            return {shard: point for shard, (_, point) in points.items()}

    def start_over(self, shards: Collection[int], replace: Replace[AnyMember]) -> None:
        """Puts empty shards in the place of others; their rows will come from a repository.

        Whatever their parity said is void: it is filled again as soon as there are rows.
        """
        with self.lock:
            self._forget(shards)
            for shard in shards:
                for host in self.placement.hosts(shard):
                    if host not in shards:
                        # First: the server may live, and would fill what starts over with rows
                        # that are about to be replaced.
                        self.members[host].host.seal(shard)
                        self.members[host].host.refill(shard)
            for shard in shards:
                self.members[shard] = replace(shard, 0, Point({}, ()))
            for shard in shards:
                self._join(shard, shards)

    def _forget(self, lost: Collection[int]) -> None:
        """Ends all decodes, which may have heard of what was rolled back since, and sends nothing
        more to lost hosts."""
        for member in self.members:
            if member.index not in lost:
                member.host.drop()
                for shard in lost:
                    member.source.detach(shard)

    def _seal(self, shard: int, lost: Collection[int]) -> dict[int, int]:
        hosts = [host for host in self.placement.hosts(shard) if host not in lost]
        return {host: self.members[host].host.seal(shard) for host in hosts}

    def _roll_back(
        self, shard: int, held: Mapping[int, int], standings: Mapping[int, Standing]
    ) -> tuple[int, Point]:
        whole = [host for host in held if standings[host].complete]
        number = min(held[host] for host in whole)
        points = {host: self.members[host].host.roll(shard, number) for host in held}
        return number, next(points[host] for host in whole if held[host] == number)

    def _join(self, shard: int, lost: Collection[int]) -> None:
        """The streams from and to a replacement."""
        joining = self.members[shard]
        for host in self.placement.hosts(shard):
            number, point = joining.attach(host)
            self.members[host].host.follow(shard, joining.source.epoch, number, point)
        for source in self.placement.sources(shard):
            if source not in lost:
                number, point = self.members[source].attach(shard)
                joining.host.follow(source, self.members[source].source.epoch, number, point)

    # -- decoding --------------------------------------------------------------------------------

    def start(self, group: int, slab: int, layer: Layer, stripes: I64) -> Decode:
        """Has every member of a group say what it has of some stripes, ascending."""
        return self.start_all([(group, slab, layer, stripes)])[0]

    def start_all(self, parts: Sequence[LostStripes]) -> list[Decode]:
        """`start` for several groups at once: each host and each member is asked once. A host that
        does not answer is not needed where others hold parity of the same rows."""
        standings = self._standings(silent=True)
        decodes = []
        started: dict[int, list[Wanted]] = defaultdict(list)
        spoken: dict[int, list[Wanted]] = defaultdict(list)
        for group, slab, layer, stripes in parts:
            members = self.placement.members(group)
            if silent := [member for member in members if member not in standings]:
                raise ShardLostError(silent)
            most = sum(standings[member].lost_K[slot] for slot, member in enumerate(members))
            parities = self._parities(group, standings)[:most]
            if len(parities) < most:
                # To go on would be to take lost rows for rows that were never trained.
                raise StreamError(
                    f"rows of group {group} are lost on {most} shards, and {len(parities)} of its "
                    "parity rows are whole: none can be decoded"
                )
            wanted = Wanted(next(self._numbers), group, slab, layer, stripes)
            decode = Decode(wanted, tuple(self.placement.host(group, p) for p in parities))
            for host in decode.hosts:
                started[host].append(wanted)
            for member in members if decode.hosts else ():
                spoken[member].append(wanted)
            decodes.append(decode)
        self._each([partial(self.members[i].host.begin, wanted) for i, wanted in started.items()])
        self._each([partial(self.members[i].send_values, wanted) for i, wanted in spoken.items()])
        return decodes

    def finish(self, decode: Decode) -> bool:
        """Solves a decode and brings the rows back; False while members have yet to speak.

        A decode that began before a loss is refused with `StreamError`: it may include
        what was undone since.
        """
        return not self.finish_all([decode])

    def finish_all(self, decodes: Sequence[Decode]) -> list[Decode]:
        """`finish` for several decodes; those whose members have yet to speak."""
        asked: dict[int, list[int]] = defaultdict(list)
        for decode in decodes:
            for host in decode.hosts:
                asked[host].append(decode.wanted.number)
        replies = self._each([partial(self.members[i].host.syndromes, n) for i, n in asked.items()])
        answers: dict[tuple[int, int], Syndrome | None] = {
            (host, number): answer
            for (host, numbers), reply in zip(asked.items(), replies, strict=True)
            for number, answer in zip(numbers, reply, strict=True)
        }
        ended: dict[int, list[int]] = defaultdict(list)
        waiting = []
        for decode in decodes:
            number = decode.wanted.number
            found = [
                answer for host in decode.hosts if (answer := answers[host, number]) is not None
            ]
            if len(found) < len(decode.hosts):
                waiting.append(decode)
                continue
            for host in decode.hosts:
                ended[host].append(number)
            if found:  # else nobody had lost anything
                self._solve(decode, found)
        self._each([partial(self.members[i].host.drop, numbers) for i, numbers in ended.items()])
        return waiting

    def _solve(self, decode: Decode, found: Sequence[Syndrome]) -> None:
        wanted, unknown = decode.wanted, found[0].unknown
        assert all(
            np.array_equal(unknown[slot], other.unknown[slot])
            for other in found
            for slot in unknown
        ), "hosts differ on which rows are unknown"
        parities = [(wanted.group - host) % self.placement.n for host in decode.hosts]
        members = self.placement.members(wanted.group)
        for slots, at in _patterns(unknown):
            if len(slots) > len(parities):
                raise StreamError("a shard was lost while rows of it were decoded: decode again")
            stripes, needed = wanted.stripes, [answer.total for answer in found[: len(slots)]]
            if at.size < stripes.size:
                stripes, needed = stripes[at], [syndrome[at] for syndrome in needed]
            solution = self.code.solution(slots, parities[: len(slots)])
            for slot, coefficients in zip(slots, solution, strict=True):
                values = _combined(coefficients, needed)
                rows = stripes * self.placement.k + slot
                self.members[members[slot]].install(wanted.slab, wanted.layer, rows, values)
                if wanted.layer == "records":
                    self.decoded_rows += rows.size
                    self.decoded_nbytes += values.nbytes

    # -- bringing back ---------------------------------------------------------------------------

    def recover_marks(self, done: set[object] | None = None) -> None:
        """Finds out which rows replacements have lost; until then they cannot serve. Where that
        fails half-way, what is `done` need not be done again for the same replacements."""
        done = set() if done is None else done
        with self.lock:
            blind = self.blind()
            whose = tuple(member.index for member in blind)
            for nth, some in enumerate(self._rounds(self.lost_marks(blind), _MARK_NBYTES)):
                if (whose, nth) not in done:
                    self._complete(self.start_all(some))
                    done.add((whose, nth))
            for member in blind:
                member.reveal()

    def lost_marks(self, blind: Collection[AnyMember]) -> Iterator[LostStripes]:
        """All that is to be decoded to find out which rows replacements have lost."""
        lost = {member.index for member in blind}
        for group in range(self.placement.n):
            if lost.intersection(self.placement.members(group)):
                for slab, count in enumerate(self.members[0].host.stripes):
                    for first in range(0, count, _MARK_STRIPES):
                        stripes = np.arange(first, min(first + _MARK_STRIPES, count))
                        yield group, slab, "marks", stripes

    def blind(self) -> list[AnyMember]:
        """The members of replacements whose marks are not back."""
        standings = self._standings()
        return [member for member in self.members if standings[member.index].blind]

    def recover_rows(self, shard: int, slab: int, rows: I64) -> int:
        """Brings those of the rows back that are lost; returns how many that were."""
        if not rows.size:
            return 0
        with self.lock:
            missing = rows[self.members[shard].unknown(slab, "records", rows)]
            if (np.diff(missing) <= 0).any():
                missing = np.unique(missing)
            parts: list[LostStripes] = []
            bounds, order = np.empty(self.placement.k + 1, np.int64), np.empty_like(missing)
            galois.group_by_slot(missing, self.placement.k, bounds, order)
            stripes = missing[order] // self.placement.k
            for group, slot in self.placement.groups(shard):
                lost = stripes[bounds[slot] : bounds[slot + 1]]
                if lost.size:
                    parts.append((group, slab, "records", lost))
            if parts:
                words = self.members[shard].host.shapes[slab].words
                for some in self._rounds(parts, 4 * words):
                    self._recover_parts(some)
            return int(missing.size)

    def _rounds(self, parts: Iterable[LostStripes], row_nbytes: int) -> Iterator[list[LostStripes]]:
        """What is decoded one after the other, so that whatever is said of it fits into a frame:
        the questions, and the answers."""
        # A host says of every member whether it has the row.
        nbytes = row_nbytes + _NUMBERS_NBYTES + self.placement.k
        most = room = max(1, _ROUND_NBYTES // nbytes)
        some: list[LostStripes] = []
        for group, slab, layer, stripes in parts:
            at = 0
            while at < stripes.size:
                now = stripes[at : at + room]
                some.append((group, slab, layer, now))
                at += now.size
                room -= now.size
                if not room:
                    yield some
                    some, room = [], most
        if some:
            yield some

    def _recover_parts(self, parts: Sequence[LostStripes]) -> None:
        self._complete(self.start_all(parts))

    def _complete(self, started: Sequence[Decode]) -> None:
        self._deliver()
        if self.finish_all(started):
            raise StreamError("a shard was lost while rows were decoded: decode them again")

    def fill(self, stripes: int, hosts: Collection[int] | None = None) -> int:
        """Has members send some stripes to hosts that are not whole; how many parts they sent.

        A member that is without some of the rows itself is passed over.
        """
        with self.lock:
            calls = []
            for member in self.members:
                if hosts is None or member.index in hosts:
                    for p, slab, source, filled in member.host.to_fill():
                        stop = min(filled + stripes, member.host.stripes[slab])
                        send = self.members[source].send_fill
                        calls.append(partial(send, member.index, p, slab, filled, stop))
            sent = self._each(calls)
            self._deliver()
            return sum(map(int, sent))


def _unless_silent(member: MemberSide) -> Standing | None:
    try:
        return member.standing()
    except ShardLostError:
        return None


def _patterns(unknown: Mapping[int, Bools]) -> Iterator[tuple[list[int], I64]]:
    """Which slots are unknown together, ascending, and in which of the stripes just those."""
    slots = sorted(slot for slot in unknown if unknown[slot].any())
    if len(slots) == 1:
        yield slots, np.flatnonzero(unknown[slots[0]])
        return
    patterns = np.zeros(next(iter(unknown.values())).size, np.int64)
    for i, slot in enumerate(slots):
        patterns += unknown[slot].astype(np.int64) << i
    for pattern in np.unique(patterns[patterns > 0]).tolist():
        together = [slot for i, slot in enumerate(slots) if pattern >> i & 1]
        yield together, np.flatnonzero(patterns == pattern)


def _combined(coefficients: Sequence[int], syndromes: Sequence[Words]) -> Words:
    """The sum of syndromes times coefficients."""
    if list(coefficients) == [1]:
        return syndromes[0]
    total = np.zeros_like(syndromes[0])
    for coefficient, syndrome in zip(coefficients, syndromes, strict=True):
        if syndrome.dtype == np.uint32:
            every = np.arange(len(total))
            galois.add_product(
                0, every.size, total, every, 0, syndrome, np.uint32(coefficient)
            )  # fmt: skip
        else:
            total ^= products(coefficient)[syndrome]
    return total

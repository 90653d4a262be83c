"""Who brings lost shards back: decides what can be, and has the guards do it, step by step.

A loss is handled in this order: the streams of the lost shards are sealed at every live host and
rolled back to the last message that all whole hosts hold; replacements begin there, in a new
epoch, without rows; marks come back first, so that it is known which rows there were; then the
rows, those that somebody asks for before the others; then the parity that the lost shards held.
Training goes on beside all but the first two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from emberkeep.erasure.codes import Code, Placement, products
from emberkeep.erasure.guard import Guard
from emberkeep.erasure.messages import I64, Bools, Layer, Point, Wanted, Words
from emberkeep.errors import ParityLossError
from emberkeep.kernels import galois

Replace = Callable[[int, int, Point], Guard]

# Stripes whose marks are decoded at a time: a few bytes each.
_MARK_STRIPES = 2**18


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode under way."""

    wanted: Wanted
    hosts: tuple[int, ...]


class Coordinator:
    """The guards of all shards, and what is being done about lost ones.

    `deliver` returns when every message that was posted before has been received. Calls are
    serialised: who asks for a row waits at most for the chunk that is being decoded.
    """

    def __init__(
        self, placement: Placement, guards: Sequence[Guard], deliver: Callable[[], object]
    ) -> None:
        self.placement = placement
        self.code = Code(placement.k, placement.r)
        self.guards = list(guards)
        self.lock = threading.RLock()
        self.decoded_rows = 0
        self.decoded_nbytes = 0
        self._deliver = deliver
        self._decodes = 0

    # -- a loss ----------------------------------------------------------------------------------

    def check(self, lost: Collection[int]) -> None:
        """Refuses losses that parity cannot make good; nothing has been changed then."""
        for group in range(self.placement.n):
            members = self.placement.members(group)
            unknown = [
                member
                for slot, member in enumerate(members)
                if member in lost or self.guards[member].lost(slot)
            ]
            if len(unknown) > len(self._parities(group, lost)):
                named = ", ".join(map(str, sorted({*unknown, *lost})))
                raise ParityLossError(
                    f"shards {named} are lost or not rebuilt yet, more than parity with "
                    f"k={self.placement.k}, r={self.placement.r} can bring back: recover from the "
                    "repository"
                )

    def _parities(self, group: int, lost: Collection[int]) -> list[int]:
        """The numbers of a group's parity rows that are whole."""
        return [
            p
            for p in range(self.placement.r)
            if (host := self.placement.host(group, p)) not in lost
            and self.guards[host].host.complete
        ]

    def recover(self, lost: Collection[int], replace: Replace) -> dict[int, Point]:
        """Puts replacements in the place of lost shards; where each of their streams goes on.

        `replace(shard, number, point)` makes the guard of an empty shard, in a new epoch, whose
        stream goes on after `number` and whose host is not complete. What the lost shards had
        done after that point is undone everywhere, and must be sent to them again.
        """
        with self.lock:
            self.check(lost)
            points: dict[int, tuple[int, Point]] = {}
            for shard in lost:
                points[shard] = self._roll_back(shard, lost)
            for guard in self.guards:
                guard.host.drop()
                for shard in lost:
                    guard.source.detach(shard)
            for shard in lost:
                self.guards[shard] = replace(shard, *points[shard])
            for shard in lost:
                self._join(shard, lost)
            return {shard: point for shard, (_, point) in points.items()}

    def begin_anew(self, shards: Collection[int], replace: Replace) -> None:
        """Puts empty shards in the place of others whose rows come from elsewhere.

        Whatever their parity said is void: it is filled again as soon as there are rows.
        """
        with self.lock:
            for guard in self.guards:
                guard.host.drop()
                for shard in shards:
                    guard.source.detach(shard)
            for shard in shards:
                for host in self.placement.hosts(shard):
                    self.guards[host].host.refill(shard)
                self.guards[shard] = replace(shard, 0, Point({}, ()))
            for shard in shards:
                self._join(shard, shards)

    def _roll_back(self, shard: int, lost: Collection[int]) -> tuple[int, Point]:
        hosts = [host for host in self.placement.hosts(shard) if host not in lost]
        held = {host: self.guards[host].host.seal(shard) for host in hosts}
        whole = [host for host in hosts if self.guards[host].host.complete]
        number = min(held[host] for host in whole)
        points = {host: self.guards[host].host.roll(shard, number) for host in hosts}
        return number, points[whole[0]]

    def _join(self, shard: int, lost: Collection[int]) -> None:
        """The streams from and to a replacement."""
        mine = self.guards[shard]
        for host in self.placement.hosts(shard):
            number, point = mine.attach(host)
            self.guards[host].host.follow(shard, mine.source.epoch, number, point)
        for source in self.placement.sources(shard):
            if source not in lost:
                number, point = self.guards[source].attach(shard)
                mine.host.follow(source, self.guards[source].source.epoch, number, point)

    # -- decoding --------------------------------------------------------------------------------

    def start(self, group: int, slab: int, layer: Layer, stripes: I64) -> Decode:
        """Has every member of a group say what it has of some stripes, ascending."""
        members = self.placement.members(group)
        most = sum(self.guards[member].lost(slot) for slot, member in enumerate(members))
        parities = self._parities(group, ())[:most]
        self._decodes += 1
        wanted = Wanted(self._decodes, group, slab, layer, stripes)
        decode = Decode(wanted, tuple(self.placement.host(group, p) for p in parities))
        for host in decode.hosts:
            self.guards[host].host.begin(wanted)
        if decode.hosts:
            for member in members:
                self.guards[member].send_values(wanted)
        return decode

    def finish(self, decode: Decode) -> bool:
        """Solves a decode and brings the rows back; False while members have yet to speak."""
        wanted = decode.wanted
        answers = [self.guards[host].host.syndrome(wanted.number) for host in decode.hosts]
        for host in decode.hosts:
            if None not in answers:
                self.guards[host].host.drop(wanted.number)
        found = [answer for answer in answers if answer is not None]
        if len(found) < len(answers):
            return False
        if not found:
            return True  # nobody had lost anything
        unknown = found[0][1]
        assert all(
            np.array_equal(unknown[slot], other[slot]) for _, other in found for slot in unknown
        ), "members told their hosts different things"
        parities = [(wanted.group - host) % self.placement.n for host in decode.hosts]
        self._solve(wanted, parities, [answer[0] for answer in found], unknown)
        return True

    def _solve(
        self, wanted: Wanted, parities: list[int], syndromes: list[Words],
        unknown: dict[int, Bools],
    ) -> None:  # fmt: skip
        members = self.placement.members(wanted.group)
        slots = sorted(slot for slot in unknown if unknown[slot].any())
        patterns = sum((unknown[slot].astype(np.int64) << i for i, slot in enumerate(slots)),
                       np.zeros(wanted.stripes.size, np.int64))  # fmt: skip
        for pattern in np.unique(patterns[patterns > 0]).tolist():
            mine = [slot for i, slot in enumerate(slots) if pattern >> i & 1]
            at = np.flatnonzero(patterns == pattern)
            stripes, needed = wanted.stripes, syndromes[: len(mine)]
            if at.size < stripes.size:
                stripes, needed = stripes[at], [syndrome[at] for syndrome in needed]
            solution = self.code.solution(mine, parities[: len(mine)])
            for slot, coefficients in zip(mine, solution, strict=True):
                values = _combined(coefficients, needed)
                rows = stripes * self.placement.k + slot
                self.guards[members[slot]].install(wanted.slab, wanted.layer, rows, values)
                if wanted.layer == "records":
                    self.decoded_rows += rows.size
                    self.decoded_nbytes += values.nbytes

    # -- bringing back ---------------------------------------------------------------------------

    def recover_marks(self) -> None:
        """Finds out which rows replacements have lost; until then they cannot serve."""
        with self.lock:
            started = self.start_marks()
            self._deliver()
            for decode in started:
                assert self.finish(decode)
            for guard in self._blind():
                guard.reveal()

    def start_marks(self) -> list[Decode]:
        """Has everybody say what is needed to find out which rows replacements have lost."""
        blind = {guard.index for guard in self._blind()}
        return [
            self.start(group, slab, "marks", np.arange(first, min(first + _MARK_STRIPES, count)))
            for group in range(self.placement.n)
            if blind.intersection(self.placement.members(group))
            for slab, count in enumerate(self.guards[0].host.stripes)
            for first in range(0, count, _MARK_STRIPES)
        ]

    def _blind(self) -> list[Guard]:
        """The guards of replacements whose marks are not back."""
        first = np.zeros(1, np.int64)
        return [guard for guard in self.guards if guard.unknown(0, "marks", first)[0]]

    def recover_rows(self, shard: int, slab: int, rows: I64) -> int:
        """Brings those of the rows back that are lost; returns how many that were."""
        if not rows.size:
            return 0
        with self.lock:
            missing = rows[self.guards[shard].unknown(slab, "records", rows)]
            if (np.diff(missing) <= 0).any():
                missing = np.unique(missing)
            started = []
            for group, slot in self.placement.groups(shard):
                mine = missing[missing % self.placement.k == slot]
                if mine.size:
                    started.append(self.start(group, slab, "records", mine // self.placement.k))
            self._deliver()
            for decode in started:
                assert self.finish(decode)
            return int(missing.size)

    def fill(self, stripes: int) -> int:
        """Has members send some stripes to hosts that are not whole; how many parts they sent.

        A member that is without some of the rows itself is passed over.
        """
        with self.lock:
            sent = 0
            for guard in self.guards:
                for p, slab, source, filled in guard.host.to_fill():
                    stop = min(filled + stripes, guard.host.stripes[slab])
                    sent += self.guards[source].send_fill(guard.index, p, slab, filled, stop)
            self._deliver()
            return sent


def _combined(coefficients: Sequence[int], syndromes: Sequence[Words]) -> Words:
    """The sum of syndromes times coefficients."""
    if list(coefficients) == [1]:
        return syndromes[0]
    total = np.zeros_like(syndromes[0])
    for coefficient, syndrome in zip(coefficients, syndromes, strict=True):
        if syndrome.dtype == np.uint32:
            every = np.arange(len(total))
            galois.add_product(
                total, every, 0, syndrome, 0, every.size, np.uint32(coefficient)
            )  # fmt: skip
        else:
            total ^= products(coefficient)[syndrome]
    return total

"""Bringing rows back where all shards are in one process: straight from where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from emberkeep.erasure.coded_slabs import SlabRows
from emberkeep.erasure.member import ParityMember
from emberkeep.erasure.rebuilder import LostStripes, Rebuilder

# What is brought back before anybody else may go on: about a millisecond's work.
_MOST_NBYTES = 2**21


class LocalRebuilder(Rebuilder[ParityMember]):
    """A rebuilder of shards of this process, which needs no messages for what is usual.

    While it holds the locks of all shards no row changes, and once all mail is delivered the
    parity stands where the rows do: what is lost is the sum of the two. Streams are not concerned.
    Where several rows of a stripe are lost, or the plain parity is, members speak as ever.
    """

    def _recover_parts(self, parts: Sequence[LostStripes]) -> None:
        standings = self._standings()
        rest = []
        for part in parts:
            group, slab, _, stripes = part
            members = list(enumerate(self.placement.members(group)))
            lost = [(slot, m) for slot, m in members if standings[m].lost_K[slot]]
            if len(lost) > 1 or 0 not in self._parities(group, standings):
                rest.append(part)
                continue
            ((slot, shard),) = lost
            others = [(rows_of(self.members[m]), s) for s, m in members if m != shard]
            parity, first = self.members[self.placement.host(group, 0)].host.parity_records(0, slab)
            for start, stop in self._spans(slab, 0, stripes.size):
                with self._at_rest():
                    rows_of(self.members[shard]).solve(
                        slab, slot, stripes[start:stop], parity, first, others
                    )
            self.decoded_rows += stripes.size
            self.decoded_nbytes += stripes.size * parity[:1].nbytes
        if rest:
            super()._recover_parts(rest)

    def fill(self, stripes: int, hosts: Collection[int] | None = None) -> int:
        with self.lock:
            filled = 0
            for member in self.members:
                if hosts is not None and member.index not in hosts:
                    continue
                for p, slab, source, first in member.host.to_fill():
                    rows = rows_of(self.members[source])
                    if rows.lost(
                        self.placement.slot(source, self.placement.group_on(member.index, p))
                    ):
                        continue
                    last = min(first + stripes, member.host.stripes[slab])
                    for start, stop in self._spans(slab, first, last):
                        with self._at_rest():
                            member.host.fill_from(p, slab, source, start, stop, rows)
                    filled += 1
            self._deliver()
            return filled

    def _spans(self, slab: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Rows that are brought back without a break, so that nobody waits for many."""
        words = self.members[0].host.shapes[slab].words
        step = max(1, _MOST_NBYTES // (4 * words))
        for start in range(first, last, step):
            yield start, min(start + step, last)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """No row changes, and every change has been received."""
        self._deliver()  # most of it, before anybody has to wait
        with ExitStack() as held:
            for member in self.members:
                held.enter_context(member.lock)
            self._deliver()
            yield


def rows_of(member: ParityMember) -> SlabRows:
    """The rows of a shard of this process."""
    assert isinstance(member.rows, SlabRows)
    return member.rows

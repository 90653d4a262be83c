"""Bringing rows back where all shards are in one process: straight from where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from emberkeep.erasure.coordinator import Coordinator, Part
from emberkeep.erasure.guard import Guard
from emberkeep.erasure.slabs import SlabRows


class NearCoordinator(Coordinator[Guard]):
    """A coordinator of shards of this process, which needs no messages for what is usual.

    While it holds the locks of all shards no row changes, and once all mail is delivered the
    parity stands where the rows do: what is lost is the sum of the two. Streams are not concerned.
    Where several rows of a stripe are lost, or the plain parity is, members speak as ever.
    """

    def _recover_parts(self, parts: Sequence[Part]) -> None:
        standings = self._standings()
        rest = []
        with self._at_rest():
            for part in parts:
                group, slab, _, stripes = part
                members = [
                    (member, slot) for slot, member in enumerate(self.placement.members(group))
                ]
                lost = [its for its in members if standings[its[0]].lost_K[its[1]]]
                if len(lost) > 1 or 0 not in self._parities(group, standings):
                    rest.append(part)
                    continue
                ((shard, slot),) = lost
                others = [(rows_of(self.guards[m]), s) for m, s in members if m != shard]
                parity, first = self.guards[self.placement.host(group, 0)].host.records_near(
                    0, slab
                )
                rows_of(self.guards[shard]).solve(slab, slot, stripes, parity, first, others)
                self.decoded_rows += stripes.size
                self.decoded_nbytes += stripes.size * parity[:1].nbytes
        if rest:
            super()._recover_parts(rest)

    def fill(self, stripes: int, hosts: Collection[int] | None = None) -> int:
        with self.lock, self._at_rest():
            filled = 0
            for guard in self.guards:
                if hosts is not None and guard.index not in hosts:
                    continue
                for p, slab, source, start in guard.host.to_fill():
                    stop = min(start + stripes, guard.host.stripes[slab])
                    rows = rows_of(self.guards[source])
                    slot = self.placement.slot(source, self.placement.group_on(guard.index, p))
                    if not rows.lost(slot):
                        guard.host.fill_near(p, slab, source, start, stop, rows)
                        filled += 1
            return filled

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """No row changes, and every change has been received."""
        self._deliver()  # most of it, before anybody has to wait
        with ExitStack() as held:
            for guard in self.guards:
                held.enter_context(guard.lock)
            self._deliver()
            yield


def rows_of(guard: Guard) -> SlabRows:
    """The rows of a shard of this process."""
    assert isinstance(guard.rows, SlabRows)
    return guard.rows

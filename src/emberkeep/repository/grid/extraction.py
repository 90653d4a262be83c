"""Extraction: rows that a newer version overwrote move out of the pieces that live on.

A *round* takes every version that was committed since the last one. The process that holds a
shard prepares the round in its part (`shard_extraction`): writes the files that rows move to, and
the segment of the catalog that tells of them. When all shards have, one generation names what they
prepared, and from then on it counts; if one has not, nothing does.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from emberkeep.errors import DamageError, StorageError
from emberkeep.repository import names
from emberkeep.repository.grid.catalog import (
    Catalog,
    Change,
    Part,
    StaleError,
    commit,
    newest_catalog,
    shard_of_file,
    uncovered,
)
from emberkeep.repository.grid.shard_extraction import RoundOrder, ShardExtraction, ShardRound
from emberkeep.repository.manifest import Manifest
from emberkeep.repository.names import VersionId
from emberkeep.repository.pieces import KIND
from emberkeep.repository.policies import Grid
from emberkeep.repository.writer import Writer
from emberkeep.runtime.bandwidth import Bandwidth
from emberkeep.runtime.crew import Crew

_ATTEMPTS = 3

Remote = Callable[[RoundOrder], ShardRound]
Holders = Callable[[int], Remote | None]
"""Who prepares rounds in the part of a shard; None if this process does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """What a round did."""

    versions: tuple[int, ...] = ()
    covered: int
    generation: int
    pieces: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    skipped: bool = False


class Extractor:
    """Rounds of extraction in one grid, for its current writer, in one thread.

    A round that fails leaves the grid as it was and files that gc removes; the next round does its
    work.
    """

    def __init__(
        self, writer: Writer, grid: VersionId, settings: Grid, bandwidth: Bandwidth | None = None,
        holders: Holders = lambda _: None,
    ) -> None:  # fmt: skip
        self.writer = writer
        self._bandwidth = bandwidth or Bandwidth(None, clock=writer.repository.clock)
        self.grid = grid
        self.settings = settings
        self.catalog: Catalog | None = None
        self.read_nbytes = 0
        self.read_seconds = 0.0
        # Bytes of the living pieces, which a restore of the newest version reads, and of the rows
        # in them that are not known to have ended, which is what a new baseline would hold.
        self.living = (0, 0)
        self.stored_nbytes = 0
        self._holders = holders
        self._shards: dict[int, ShardExtraction] = {}

    def run(self, newest: Manifest, *, split: bool = True) -> Extracted:
        """Takes in all versions up to `newest`; without `split` nothing is rewritten now."""
        known = newest_catalog(self.writer.repository, self.grid)
        try:
            return self._run(newest, known, split)
        except DamageError as error:
            # A file may be missing because a later writer, or our own gc, was done with it.
            self.writer.check()
            if newest_catalog(self.writer.repository, self.grid).generation != known.generation:
                raise StaleError from error
            raise

    def settle(self, newest: Manifest, *, split: bool = True) -> Extracted:
        """`run`, and again if gc has changed the catalog meanwhile."""
        for _ in range(_ATTEMPTS - 1):
            with suppress(StaleError):
                return self.run(newest, split=split)
        return self.run(newest, split=split)

    def _run(self, newest: Manifest, catalog: Catalog, split: bool) -> Extracted:
        repository = self.writer.repository
        waiting = uncovered(repository, newest, catalog.covered)
        covered = max([catalog.covered, *(m.version.number for m in waiting)])
        parts, mixed = _parts(catalog, waiting)
        nonce = secrets.token_hex(8)
        prefix = names.round_prefix(self.grid, self.writer.epoch, nonce)
        self.writer.hold_files([prefix])
        try:
            orders = [
                RoundOrder(
                    grid=self.grid, part=part, shard=shard, epoch=self.writer.epoch, nonce=nonce,
                    waiting=tuple(m.version for m in waiting), split=split, rules=self.settings,
                )
                for shard, part in parts.items()
            ]  # fmt: skip
            prepared = self._prepare(orders, waiting)
            following = catalog
            changed = [
                done.part
                for order, done in zip(orders, prepared, strict=True)
                if done.part != order.part
            ]
            if changed or covered != catalog.covered:
                change = Change(parts=changed, covered=covered, mixed=mixed and bool(changed))
                following = commit(
                    self.writer, self.grid, partial(_following, base=catalog, change=change)
                )
        except StorageError:
            # A generation may still come to exist, so its files stay until the next writer's gc.
            raise
        except BaseException:
            self.writer.let_go_files([prefix])
            raise
        self.writer.let_go_files([prefix])
        self.catalog = following
        self.read_nbytes += sum(done.read_nbytes for done in prepared)
        self.read_seconds += sum(done.read_seconds for done in prepared)
        read, needed = (sum(done.living[at] for done in prepared) for at in (0, 1))
        self.living = read, needed
        self.stored_nbytes = sum(done.stored_nbytes for done in prepared)
        return Extracted(
            versions=tuple(m.version.number for m in waiting),
            covered=covered,
            generation=following.generation,
            pieces=sum(done.pieces for done in prepared),
            read_nbytes=sum(done.read_nbytes for done in prepared),
            written_nbytes=sum(done.written_nbytes for done in prepared),
            skipped=not split,
        )

    def _prepare(
        self, orders: Sequence[RoundOrder], waiting: Sequence[Manifest]
    ) -> list[ShardRound]:
        """Has every shard prepare its part: servers all at once, this process the others."""
        asked = [(order, self._holders(order.shard)) for order in orders]
        remote = sum(holder is not None for _, holder in asked)
        with Crew(max(1, remote), "emberkeep-round", clock=self.writer.repository.clock) as crew:
            answers = [
                None if holder is None else crew.submit(holder, order) for order, holder in asked
            ]
            found: list[ShardRound] = []
            errors: list[BaseException] = []
            for order, answer in zip(orders, answers, strict=True):
                try:
                    found.append(
                        self._local(order.shard).run(order, waiting)
                        if answer is None
                        else answer.result()
                    )
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return found

    def _local(self, shard: int) -> ShardExtraction:
        if shard not in self._shards:
            self._shards[shard] = ShardExtraction(self.writer.repository, self.grid, shard)
            self._shards[shard].bandwidth = self._bandwidth
        return self._shards[shard]


def _parts(catalog: Catalog, waiting: Sequence[Manifest]) -> tuple[dict[int, Part], bool]:
    """The part of each shard that a round concerns, and whether one of them was that of all.

    That of a catalog of format 1 is the first shard's where there is but one. Where there are
    several it stays as it is: such a grid is not continued.
    """
    files = (file for manifest in waiting for file in manifest.of_kind(KIND))
    shards = {shard_of_file(file) for file in files}
    shards |= {part.shard for part in catalog.parts if part.shard is not None}
    parts = {shard: catalog.part(shard) for shard in sorted(shards)}
    mixed = [part for part in catalog.parts if part.shard is None]
    if mixed and shards <= {0}:
        return {0: replace(mixed[0], shard=0)}, True
    return parts, False


def _following(catalog: Catalog, *, base: Catalog, change: Change) -> Change:
    """The change, if it was prepared for the newest catalog."""
    if catalog.generation != base.generation:
        raise StaleError
    return change

"""What a client of shard servers remembers of its own requests until their outcome is known."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from emberkeep._types import F32, Rates, RowIds
from emberkeep.cluster.base import Routed
from emberkeep.cluster.shard_handle import ShardHandle


class Ahead:
    """A prefetched pull, and what it needs to be completed by the push before it."""

    def __init__(self, wanted: Sequence[RowIds], routed: Routed, rows: Future[list[F32]]) -> None:
        self.wanted = wanted
        self.routed = routed
        self.rows = rows
        self.complete = False

    def answers(self, wanted: Sequence[RowIds]) -> bool:
        return same_ids(wanted, self.wanted)


def same_ids(wanted: Sequence[RowIds], before: Sequence[RowIds]) -> bool:
    """Whether both are one caller's arrays."""
    return len(wanted) == len(before) and all(
        a.ids is b.ids for a, b in zip(wanted, before, strict=True)
    )


@dataclass(slots=True)
class SentPush:
    """A push that was sent to shards, and that a loss may yet take away from some of them."""

    incarnation: int
    number: int
    routed: Routed
    grads: Sequence[F32]
    lr: Rates
    answered: dict[int, int]
    """The shards that have answered it, each with the epoch in which it did."""
    settled: bool = False
    """Whether no loss could undo it when all shards had answered."""
    missing: set[int] = field(default_factory=set)
    """Of a push that was given up: the shards that have not answered it."""

    def answer(self, shard: ShardHandle) -> None:
        self.answered[shard.index] = shard.epoch

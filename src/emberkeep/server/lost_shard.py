"""A shard that an epoch has no more: another epoch has it, or a write to it ended half-way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from emberkeep.cluster.shard import Shard
from emberkeep.errors import EpochError, ShardLostError


@dataclass(frozen=True, slots=True)
class GoneShard:
    """In the place of a shard that another epoch has."""

    index: int
    state: ClassVar[str] = "lost"
    torn: ClassVar[str] = ""

    def held(self) -> tuple[int, int]:
        return 0, 0

    def nothing(self) -> int:
        return 0

    dirty_rows = steps = nothing

    def tier_status(self) -> list[Any]:
        return []

    def kill(self) -> None:
        """Not this epoch's any more."""

    def __getattr__(self, name: str) -> Any:
        raise ShardLostError((self.index,))


@contextmanager
def or_lost(shard: Shard, *, changed: bool = False) -> Iterator[None]:
    """A write to a shard, which is lost with it if the body ends half-way: the next to hear of that
    is `EpochError`, and rows come from where lost ones do. Sent again to rows which have the half
    of it, it would count twice. With `changed` rows have changed before the body: any error in it
    is one half-way."""
    try:
        yield
    except BaseException as error:
        if changed:
            shard.tear(error)
        if not shard.torn:
            raise
        raise EpochError(
            f"shard {shard.index} has let go of all its rows: a write ended half-way "
            f"({shard.torn}); recover it as a lost one"
        ) from error

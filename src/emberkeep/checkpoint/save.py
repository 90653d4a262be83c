"""One save: what a version is made of, and how far it has come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta

from emberkeep._types import Json
from emberkeep.checkpoint.spec import VersionSpec
from emberkeep.codecs import Codec
from emberkeep.repository import Manifest
from emberkeep.rows.snapshot import Cut, FrozenRows
from emberkeep.rows.tracker import PRIORITISED, SINCE_BASELINE, SINCE_VERSION
from emberkeep.runtime.clock import Clock, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a version holds beside rows: dense state as safetensors, the rest as plain data.

    `dense` may be a function that makes the bytes; it is called in the background.
    """

    dense: bytes | Callable[[], bytes] | None = None
    reader: Json = field(default_factory=dict)
    user: Json = field(default_factory=dict)
    counters: Json = field(default_factory=dict)


class Saving:
    """A save under way: `copied` when no row is needed any more, `committed` when it is durable."""

    def __init__(self, step: int, pause: timedelta, clock: Clock, *, whole: bool = True) -> None:
        self.step = step
        self.pause = pause
        self.whole = whole
        self.started = clock.monotonic()
        self.copied: Future[None] = Future()
        self.committed: Future[Manifest] = Future()
        self.cancelled = threading.Event()
        self.ended = Event(clock)
        # Whether a newer save may not give it up.
        self.spared = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one version is made of, from the freeze to the commit."""

    saving: Saving
    frozen: Cut[Sequence[FrozenRows]]
    """By shard, with the state of their tables."""
    extras: Extras
    since: str | None
    """What the rows have changed since; None for all rows."""
    codecs: dict[str, Codec]
    spec: VersionSpec

    @property
    def in_grid(self) -> bool:
        return self.spec.layout == "grid"

    @property
    def advanced(self) -> list[str]:
        """The cursors that forget the rows once they are committed."""
        if self.since == PRIORITISED:
            return [PRIORITISED]
        return [SINCE_VERSION] if self.since else [SINCE_VERSION, SINCE_BASELINE]

    def close(self, advanced: Sequence[str]) -> None:
        for rows in (rows for shard in self.frozen for rows in shard):
            rows.close(advanced)

"""Tells what happens to a server without a request: leases that expire, parity that is behind,
background threads that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from emberkeep._types import Json
from emberkeep.runtime.background import Retry, Worker
from emberkeep.runtime.background_failures import ThreadFailures, background_failures
from emberkeep.runtime.clock import SYSTEM_CLOCK, Clock
from emberkeep.runtime.system_calls import lives
from emberkeep.server.epoch import Epoch
from emberkeep.server.shard_service import ShardService

_MOST_SECONDS = 1.0
KEEP_ROWS_FOR = timedelta(minutes=30)
"""How long a server without a coordinator keeps its rows."""


@dataclass(slots=True)
class _Seen:
    """What was known of one epoch when it was last looked at; times are monotonic, and those at
    which something happened, not at which it was seen, where that is known."""

    epoch: Epoch
    expired_at: float | None = None
    unprotected_at: float | None = None
    missing_since: float | None = None


class Parent:
    """The process that has started this one, by its id: when it is gone, this one has another.

    It is the process that counts, not its thread which has forked. Where something stands between
    the two, a wrapper of the interpreter say, that is watched instead. Process 1 is never gone:
    its container ends with it.
    """

    def __init__(self, pid: int) -> None:
        self._now = os.getppid()
        self._gone_before = self._now != pid and not lives(pid)

    @property
    def gone(self) -> bool:
        return self._gone_before or os.getppid() != self._now


class ServerWatch:
    """Looks at a server four times while a lease lasts, once a second at least.

    Events: "lease_expired" and "lease_resumed"; "unprotected" and "protected"; "recovering" and
    "recovered" with the scope "parity"; "background_failed"; "rows_dropped", when no coordinator
    was heard of for `keep_rows_for` (None: rows stay), after which `on_dropped` is called. `upkeep`
    is called at each look, also at one that fails.
    """

    def __init__(
        self, served: ShardService, clock: Clock = SYSTEM_CLOCK,
        upkeep: Callable[[], object] = lambda: None,
        keep_rows_for: timedelta | None = KEEP_ROWS_FOR,
        on_dropped: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._served = served
        self._keep_seconds = float("inf")
        if keep_rows_for is not None:
            self._keep_seconds = keep_rows_for.total_seconds()
        self._on_dropped = on_dropped
        self._upkeep = upkeep
        self._clock = clock
        self._seen: _Seen | None = None
        self._failures: dict[str, ThreadFailures] = background_failures.by_thread()
        self._worker = Worker("emberkeep-watch", self._look, retry=Retry(limit=None), clock=clock)

    def start(self) -> None:
        self._worker.wake()

    def close(self) -> None:
        self._worker.close()

    def _look(self) -> float:
        try:
            self.look()
        finally:
            self._upkeep()
        epoch = self._served.epoch
        return _MOST_SECONDS if epoch is None else min(_MOST_SECONDS, epoch.lease_seconds / 4)

    def look(self) -> None:
        """Tells what has changed since the last look."""
        epoch = self._served.epoch
        if epoch is None:
            self._seen = None
        else:
            if self._seen is None or self._seen.epoch is not epoch:
                self._seen = _Seen(epoch)
            self._look_at_lease(self._seen)
            self._look_at_parity(self._seen)
        self._look_at_threads()

    def _tell(self, event: str, epoch: Epoch, **details: object) -> None:
        about: Json = {"epoch": epoch.number, "shard": epoch.shard.index}
        self._served.events(event, {**about, "run": epoch.coordinator, **details})

    def _look_at_lease(self, seen: _Seen) -> None:
        epoch, now = seen.epoch, self._clock.monotonic()
        if epoch.lapsed and not epoch.left and seen.expired_at is None:
            seen.expired_at = now - max(0.0, epoch.silent_seconds - epoch.lease_seconds)
            self._tell(
                "lease_expired", epoch, silent_seconds=round(epoch.silent_seconds, 3),
                lease_seconds=epoch.lease_seconds,
            )  # fmt: skip
        elif epoch.lapsed and epoch.silent_seconds > self._keep_seconds:
            self._tell("rows_dropped", epoch, silent_seconds=round(epoch.silent_seconds, 3))
            self._served.let_go(epoch)
            self._on_dropped()
        elif not epoch.lapsed and seen.expired_at is not None:
            seconds, seen.expired_at = now - seen.expired_at, None
            self._tell("lease_resumed", epoch, expired_seconds=round(seconds, 3))

    def _look_at_parity(self, seen: _Seen) -> None:
        epoch, now = seen.epoch, self._clock.monotonic()
        if epoch.parity_service is None:
            return
        status = epoch.parity_service.status()
        missing = int(status["missing_rows"])
        if missing and seen.missing_since is None:
            seen.missing_since = now
            self._tell("recovering", epoch, scope="parity", missing_rows=missing)
        elif not missing and seen.missing_since is not None:
            seconds, seen.missing_since = now - seen.missing_since, None
            rows = int(status["rebuilt_rows"])
            self._tell("recovered", epoch, scope="parity", rows=rows, seconds=round(seconds, 3))
        since, stripes = float(status["unprotected_since"]), int(status["unprotected_stripes"])
        if (since or stripes) and seen.unprotected_at is None:
            seen.unprotected_at = now
            if since:
                seen.unprotected_at -= max(0.0, self._clock.now().timestamp() - since)
            at = datetime.fromtimestamp(since, timezone.utc) if since else self._clock.now()
            self._tell("unprotected", epoch, since=at.isoformat("T", "seconds"), stripes=stripes)
        elif not (since or stripes) and seen.unprotected_at is not None:
            seconds, seen.unprotected_at = now - seen.unprotected_at, None
            self._tell("protected", epoch, unprotected_seconds=round(seconds, 3))

    def _look_at_threads(self) -> None:
        failures = background_failures.by_thread()
        for name, now in failures.items():
            before = self._failures.get(name)
            if before is None or now.errors > before.errors:
                about = {"thread": name, "errors": now.errors, "error": now.last}
                stopped = now.stopped_since is not None
                self._served.events("background_failed", {**about, "stopped": stopped})
        self._failures = failures
